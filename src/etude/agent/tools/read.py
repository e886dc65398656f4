"""Reading a file, or listing a folder."""

from __future__ import annotations

import difflib
import posixpath

from pydantic import Field

from etude.agent.tools.text import decode, numbered, shown
from etude.agent.tools.tool import (
    Arguments,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
    guest_path,
)
from etude.sandbox.protocol import Workspace

_LINE_CHARS = 2000


class ReadArguments(Arguments):
    """`lines` lines from line `start` (from 1) on."""

    path: Word
    start: int = Field(default=1, ge=1)
    lines: int = Field(default=200, ge=1, le=2000)


class Read(Tool[ReadArguments]):
    """Shows a window of a text file with line numbers, or the names in a folder."""

    name = "read"
    description = "show lines of a file, numbered, or the names in a folder"
    arguments = ReadArguments

    async def run(self, context: ToolContext, args: ReadArguments) -> ToolResult:
        """See `Tool.run`."""
        workspace = await context.workspace()
        try:
            data = await workspace.read(args.path)
        except IsADirectoryError:
            names = await workspace.list(args.path)
            return ToolResult("\n".join(names) or "(empty folder)")
        except (FileNotFoundError, NotADirectoryError):
            return ToolResult(
                f"{args.path} does not exist.{await similar_names(workspace, args.path)}",
                ErrorClass.NOT_FOUND,
            )
        if b"\0" in data:
            return ToolResult(f"{args.path} is a binary file.", ErrorClass.WRONG_KIND)
        context.seen[guest_path(args.path)] = data
        return _window(args, shown(decode(data)))


def _window(args: ReadArguments, text: str) -> ToolResult:
    """The lines that were asked for."""
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        return ToolResult(f"{args.path} is empty.")
    if args.start > len(lines):
        return ToolResult(f"{args.path} has only {len(lines)} lines.", ErrorClass.INVALID_ARGUMENTS)
    window = [
        line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]}[... line cut]"
        for line in lines[args.start - 1 : args.start - 1 + args.lines]
    ]
    last = args.start - 1 + len(window)
    whole = args.start == 1 and last == len(lines)
    note = "" if whole else f"\n(lines {args.start}-{last} of {len(lines)})"
    return ToolResult(numbered(window, args.start) + note)


async def similar_names(workspace: Workspace, path: str) -> str:
    """A sentence with names in the same folder that are like the last part of `path`, or ''."""
    folder, name = posixpath.split(path.rstrip("/"))
    try:
        names = await workspace.list(folder or ".")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return f" There is no folder {folder} either." if folder else ""
    like = difflib.get_close_matches(name, [entry.rstrip("/") for entry in names], n=3)
    return (
        f" Similar: {', '.join(posixpath.join(folder, entry) for entry in like)}." if like else ""
    )
