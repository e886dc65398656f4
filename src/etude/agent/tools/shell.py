"""Running a command inside the sandbox."""

from __future__ import annotations

from pydantic import Field

from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)
from etude.sandbox.protocol import ExecResult

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

    async def run(self, context: ToolContext, args: ShellArguments) -> ToolResult:
        """See `Tool.run`."""
        workspace = await context.workspace()
        timeout = min(args.timeout or context.timeout, context.timeout)
        result = await workspace.exec(
            ["bash", "-c", args.command], timeout=timeout, env=_ENVIRONMENT
        )
        output = _output(result)
        if result.timed_out:
            return ToolResult(
                f"cut at {timeout:g} s, every process of it was killed; output so far:\n{output}",
                ErrorClass.TIMEOUT,
            )
        if result.exit_code != 0:
            return ToolResult(f"exit code {result.exit_code}\n{output}", ErrorClass.NONZERO_EXIT)
        return ToolResult(output)


def _output(result: ExecResult) -> str:
    """Both streams, standard error after standard output."""
    parts = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    return "\n".join(parts) or "(no output)"
