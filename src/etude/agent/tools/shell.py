"""Running a command inside the sandbox."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

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
from etude.sandbox.protocol import WORKSPACE_ROOT, ExecResult, Job, Workspace

_ENVIRONMENT = {
    # Nobody sits at a terminal: what would open an editor, a pager or a prompt must fail at once.
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "EDITOR": "false",
    "VISUAL": "false",
    "GIT_TERMINAL_PROMPT": "0",
    # A repository's configuration may name programs that git runs for as little as `git status`.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "log.showSignature",
    "GIT_CONFIG_VALUE_1": "false",
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
        return await _foreground(context, args)


async def _foreground(
    context: ToolContext, args: ShellArguments, *, cwd: str = WORKSPACE_ROOT, keep: bool = False
) -> ToolResult:
    """Run to the end; what then still runs is killed, or with `keep` becomes a job."""
    workspace = await context.workspace()
    timeout = min(args.timeout or context.timeout, context.timeout)
    argv = ["bash", "-c", args.command]
    result = await workspace.exec(argv, timeout=timeout, cwd=cwd, env=_ENVIRONMENT, keep=keep)
    ended = _ended(_output(result), result.exit_code, timeout if result.timed_out else None)
    if not result.job:
        return ended
    context.jobs[result.job] = StartedJob(args.command)
    return replace(ended, text=f"{ended.text}\n[job {result.job} still runs]")


def _output(result: ExecResult) -> str:
    """Both streams, standard error after standard output."""
    parts = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    return "\n".join(parts) or "(no output)"


def _ended(output: str, exit_code: int, cut: float | None = None) -> ToolResult:
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

_FIRST_LOOK = 0.5
_POLL = 0.03


class SessionShellArguments(ShellArguments):
    """`cwd` is a folder; a `background` command is not waited for."""

    cwd: Word = "."
    background: bool = False


class SessionShell(Tool[SessionShellArguments]):
    """`Shell` that keeps what a command leaves running, as a job. Jobs die with the session; the
    tool `job` reads and stops them."""

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
        return await _foreground(context, args, cwd=args.cwd, keep=True)


async def find_job(workspace: Workspace, name: str) -> Job | None:
    """The job of this name."""
    return next((job for job in await workspace.jobs() if job.id == name), None)


async def new_output(context: ToolContext, workspace: Workspace, name: str) -> str:
    """What the job has written since the session last looked."""
    started = context.jobs.setdefault(name, StartedJob(""))
    text, started.read = await workspace.output(name, started.read)
    return text


async def _background(context: ToolContext, args: SessionShellArguments) -> ToolResult:
    """Start and look once: most that fails does so at once."""
    workspace = await context.workspace()
    name = await workspace.start(["bash", "-c", args.command], cwd=args.cwd, env=_ENVIRONMENT)
    context.jobs[name] = StartedJob(args.command)
    deadline = time.monotonic() + _FIRST_LOOK
    job = await find_job(workspace, name)
    while job is not None and job.running and time.monotonic() < deadline:
        await asyncio.sleep(_POLL)
        job = await find_job(workspace, name)
    output = (await new_output(context, workspace, name)).rstrip("\n")
    if job is None or job.running:
        return ToolResult("\n".join(filter(None, (f"job {name} runs.", output))))
    return _ended(output or "(no output)", job.exit_code or 0)
