"""Reading a file, or listing a folder."""

from __future__ import annotations

from pydantic import Field

from etude.agent.tools.files import absent, guest_path, load
from etude.agent.tools.text import decode, numbered, shown
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)

_LINE_CHARS = 2000
_PNG = b"\x89PNG\r\n\x1a\n"
_PICTURES = {b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF", b"RIFF": "WebP"}


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
    effect = Effect.READ

    async def run(self, context: ToolContext, args: ReadArguments) -> ToolResult:
        """See `Tool.run`."""
        try:
            data = await load(context, args.path)
        except IsADirectoryError:
            names = await (await context.workspace()).list(args.path)
            return ToolResult("\n".join(names) or "(empty folder)")
        if data is None:
            return await absent(context, args.path)
        if b"\0" in data:
            return ToolResult(f"{args.path} is {_kind(data)}.", ErrorClass.WRONG_KIND)
        context.seen[guest_path(args.path)] = data
        return _window(args, shown(decode(data)))


def _kind(data: bytes) -> str:
    """What a file is that cannot be shown as text."""
    if data.startswith(_PNG) and len(data) >= 24:
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        return f"a picture (PNG, {width} x {height}), and only text can be shown"
    for start, name in _PICTURES.items():
        if data.startswith(start):
            return f"a picture ({name}), and only text can be shown"
    return "a binary file"


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
