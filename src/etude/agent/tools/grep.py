"""Searching the workspace."""

from __future__ import annotations

from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)

_MATCHES_PER_FILE = 50
_LINE_CHARS = 300
_LINES = 200


class GrepArguments(Arguments):
    """A Perl-like regular expression; `path` is a file or folder."""

    pattern: Word
    path: Word = "."


class Grep(Tool[GrepArguments]):
    """Lines that match, as `path:line: text`. The search runs inside the sandbox."""

    name = "grep"
    description = "search a file or folder for a regular expression"
    arguments = GrepArguments
    effect = Effect.READ

    async def run(self, context: ToolContext, args: GrepArguments) -> ToolResult:
        """See `Tool.run`."""
        workspace = await context.workspace()
        options = ["-rnIHP", f"-m{_MATCHES_PER_FILE}", "--exclude-dir=.git", "-e", args.pattern]
        result = await workspace.exec(["grep", *options, "--", args.path], timeout=context.timeout)
        if result.timed_out:
            return ToolResult(f"stopped after {context.timeout:g} s.", ErrorClass.TIMEOUT)
        if not result.stdout:
            return _nothing(args, result.exit_code, result.stderr.strip())
        lines = [_short(line) for line in result.stdout.splitlines()]
        more = len(lines) > _LINES or result.truncated
        tail = "\n(there are more; narrow the search)" if more else ""
        return ToolResult("\n".join(lines[:_LINES]) + tail)


def _short(line: str) -> str:
    line = line.removeprefix("./")
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]}[...]"


def _nothing(args: GrepArguments, exit_code: int, message: str) -> ToolResult:
    """grep exits with 1 when nothing matches and 2 when it could not search."""
    if exit_code == 1:
        return ToolResult(f"no match for {args.pattern!r}.")
    missing = "No such file" in message
    kind = ErrorClass.NOT_FOUND if missing else ErrorClass.INVALID_ARGUMENTS
    return ToolResult(message or f"grep failed with exit code {exit_code}.", kind)
