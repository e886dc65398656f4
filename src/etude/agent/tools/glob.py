"""Finding files by name."""

from __future__ import annotations

from etude.agent.tools.globs import regex_of_glob
from etude.agent.tools.grep import NO_RIPGREP, WALK, inside, more
from etude.agent.tools.programs import RIPGREP
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)

_NAMES = 200
_LISTED = """
rg=$1 path=$2 names=$3 walk=$4
"$rg" --files --null --sortr=modified $walk -- "$path" |
  "$rg" --no-config --null-data -e "$names" | head -z -n "$5"
"""


class GlobArguments(Arguments):
    """A glob pattern (`**/*.py`, `src/*.{c,h}`); `path` is the folder to look in."""

    pattern: Word
    path: Word = "."


class Glob(Tool[GlobArguments]):
    """Paths that match, the newest first, what `.gitignore` names left out."""

    name = "glob"
    description = "find files by a glob pattern, newest first"
    arguments = GlobArguments
    effect = Effect.READ

    async def run(self, context: ToolContext, args: GlobArguments) -> ToolResult:
        """See `Tool.run`."""
        path = inside(args.path)
        try:
            names = regex_of_glob(args.pattern, path)
        except ValueError as error:
            return ToolResult(f"pattern: {error}.", ErrorClass.INVALID_ARGUMENTS)
        argv = ["sh", "-c", _LISTED, "sh", RIPGREP, path, names, " ".join(WALK), str(_NAMES + 1)]
        workspace = await context.workspace()
        result = await workspace.exec(argv, timeout=context.timeout)
        if result.timed_out:
            return ToolResult(f"stopped after {context.timeout:g} s.", ErrorClass.TIMEOUT)
        found = [name.removeprefix("./") for name in result.stdout.split("\0")[:-1]]
        if found:
            cut = len(found) > _NAMES or result.truncated
            return ToolResult("\n".join(found[:_NAMES]) + more(cut))
        message = result.stderr.strip()
        if "rg: not found" in message:
            return NO_RIPGREP
        if "No such file" in message:
            return ToolResult(f"{args.path} does not exist.", ErrorClass.NOT_FOUND)
        return ToolResult(f"no file matches {args.pattern!r}.")
