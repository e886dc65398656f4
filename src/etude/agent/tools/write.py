"""Writing a whole file."""

from __future__ import annotations

from etude.agent.tools import text as texts
from etude.agent.tools.files import load, store, what_changed
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)


class WriteArguments(Arguments):
    """The file's whole text."""

    path: Word
    content: str


class Write(Tool[WriteArguments]):
    """Makes a file or replaces it whole. A file that has a byte-order mark, or `\\r\\n` on every
    line, keeps them, because the model was not shown them."""

    name = "write"
    description = "make a file, or replace the whole of it"
    arguments = WriteArguments
    effect = Effect.WRITE

    async def run(self, context: ToolContext, args: WriteArguments) -> ToolResult:
        """See `Tool.run`."""
        before = await load(context, args.path)
        news = "" if before is None else what_changed(context, args.path, before)
        if news:
            return ToolResult(f"{news}Not written; read it again first.", ErrorClass.STALE)
        data = texts.encode(_in_style_of(before, args.content))
        if data == before:
            return ToolResult(f"{args.path} already has this content.", ErrorClass.NO_CHANGE)
        said = f"{'made' if before is None else 'wrote'} {args.path} ({len(data)} bytes)."
        return await store(context, args.path, before, data, said)


def _in_style_of(before: bytes | None, content: str) -> str:
    """`content` with the byte-order mark and the line endings of what it replaces."""
    if not before:
        return content
    old = texts.decode(before)
    endings = old.count("\n")
    if endings and old.count("\r\n") == endings and "\r\n" not in content:
        content = content.replace("\n", "\r\n")
    return texts.BOM + content if old[0] == texts.BOM != content[:1] else content
