"""Running a command inside the sandbox."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import TYPE_CHECKING

from pydantic import Field

from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    StartedJob,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)
from etude.sandbox.process import uninterrupted
from etude.sandbox.protocol import WORKSPACE_ROOT, ExecResult, Workspace

if TYPE_CHECKING:
    from etude.sandbox.protocol import Job

_ENVIRONMENT = {
    # Nobody sits at a terminal: what would open an editor, a pager or a prompt must fail at once.
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "EDITOR": "false",
    "VISUAL": "false",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "TERM": "dumb",
}


class ShellArguments(Arguments):
    """`timeout` in seconds; the session's own limit is the ceiling."""

    command: Word
    timeout: float | None = Field(default=None, gt=0)


class Shell(Tool[ShellArguments]):
    """`bash -c` in the sandbox. Whatever the command left running dies when it ends."""

    name = "shell"
    description = "run a bash command"
    arguments = ShellArguments
    effect = Effect.EXECUTE

    def subject(self, args: ShellArguments) -> str:
        """The command."""
        return args.command

    async def run(self, context: ToolContext, args: ShellArguments) -> ToolResult:
        """See `Tool.run`."""
        return await _foreground(context, args.command, args.timeout, WORKSPACE_ROOT)


async def _foreground(
    context: ToolContext, command: str, wanted: float | None, cwd: str
) -> ToolResult:
    """Run to the end."""
    workspace = await context.workspace()
    timeout = min(wanted or context.timeout, context.timeout)
    result = await workspace.exec(
        ["bash", "-c", command], timeout=timeout, cwd=cwd, env=_ENVIRONMENT
    )
    return _ended(_output(result), result.exit_code, timeout if result.timed_out else None)


def _output(result: ExecResult) -> str:
    """Both streams, standard error after standard output."""
    parts = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    return "\n".join(parts) or "(no output)"


def _ended(output: str, exit_code: int, cut: float | None) -> ToolResult:
    """A command's end; `cut` is the limit in seconds at which it was killed."""
    if cut is not None:
        return ToolResult(
            f"cut at {cut:g} s, every process of it was killed; output so far:\n{output}",
            ErrorClass.TIMEOUT,
        )
    if exit_code != 0:
        return ToolResult(f"exit code {exit_code}\n{output}", ErrorClass.NONZERO_EXIT)
    return ToolResult(output)


# In a person's session commands may leave jobs behind.

_LEAVES_JOBS = re.compile(r"(?<![&<>|\\])&(?![&>])")
"""A single `&`. One in quotes is met too; such a command is only run in the slower way."""
_WRAPPER = """
finish() { code=$?; trap - EXIT; [ -z "$(jobs -rp)" ] && exit $code; printf '\\n%s %s\\n' "$0" $code
  wait; exit $code; }
trap finish EXIT
eval "$1"
"""
"""Says after the command's end with which code it ended, then waits for what it left running."""
_FIRST_LOOK = 0.5
_POLL = 0.03


class SessionShellArguments(ShellArguments):
    """`cwd` is a folder; a `background` command is not waited for."""

    cwd: Word = "."
    background: bool = False


class SessionShell(Tool[SessionShellArguments]):
    """`Shell` with background jobs: of a command that ends with some of its processes running,
    and with `background`. They die with the session; the tool `job` reads and stops them."""

    name = "shell"
    description = "run a bash command; what it leaves running becomes a job"
    arguments = SessionShellArguments
    effect = Effect.EXECUTE

    def subject(self, args: SessionShellArguments) -> str:
        """The command."""
        return args.command

    async def run(self, context: ToolContext, args: SessionShellArguments) -> ToolResult:
        """See `Tool.run`."""
        if args.background:
            return await _background(context, args)
        if _LEAVES_JOBS.search(args.command):
            return await _leaving(context, args)
        return await _foreground(context, args.command, args.timeout, args.cwd)


async def find_job(workspace: Workspace, name: str) -> Job | None:
    """The job of this name."""
    return next((job for job in await workspace.jobs() if job.id == name), None)


async def new_output(context: ToolContext, workspace: Workspace, name: str) -> str:
    """What the job has written since the session last looked."""
    started = context.jobs.setdefault(name, StartedJob(""))
    text, started.read = await workspace.output(name, started.read)
    return text


async def _start(
    context: ToolContext, workspace: Workspace, args: SessionShellArguments, *bash: str
) -> str:
    name = await workspace.start(["bash", "-c", *bash], cwd=args.cwd, env=_ENVIRONMENT)
    context.jobs[name] = StartedJob(args.command)
    return name


async def _background(context: ToolContext, args: SessionShellArguments) -> ToolResult:
    """Start and look once: most that fails does so at once."""
    workspace = await context.workspace()
    name = await _start(context, workspace, args, args.command)
    deadline = time.monotonic() + _FIRST_LOOK
    job = await find_job(workspace, name)
    while job is not None and job.running and time.monotonic() < deadline:
        await asyncio.sleep(_POLL)
        job = await find_job(workspace, name)
    output = (await new_output(context, workspace, name)).rstrip("\n")
    if job is None or job.running:
        return ToolResult("\n".join(filter(None, (f"job {name} runs.", output))))
    return _ended(output or "(no output)", job.exit_code or 0, None)


async def _leaving(context: ToolContext, args: SessionShellArguments) -> ToolResult:
    """Run as a job until the command itself has ended; what it left running goes on."""
    workspace = await context.workspace()
    timeout = min(args.timeout or context.timeout, context.timeout)
    mark = f"end-{secrets.token_hex(8)}"
    name = await _start(context, workspace, args, _WRAPPER, mark, args.command)
    said = re.compile(rf"\n{mark} (\d+)\n")
    output = ""
    deadline = time.monotonic() + timeout
    try:
        while True:
            job = await find_job(workspace, name)
            output += await new_output(context, workspace, name)
            end = said.search(output)
            if end is not None or job is None or not job.running:
                break
            if time.monotonic() >= deadline:
                await workspace.stop(name)
                output += await new_output(context, workspace, name)
                return _ended(output.rstrip("\n") or "(no output)", 0, timeout)
            await asyncio.sleep(_POLL)
    except asyncio.CancelledError:
        await uninterrupted(workspace.stop(name))
        raise
    text = said.sub("", output).rstrip("\n") or "(no output)"
    if end is None:
        return _ended(text, (job.exit_code if job else None) or 0, None)
    result = _ended(text, int(end.group(1)), None)
    return ToolResult(f"{result.text}\n[job {name} still runs]", result.error_class)
