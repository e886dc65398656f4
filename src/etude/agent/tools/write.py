"""Writing a whole file."""

from __future__ import annotations

from etude.agent.tools import text as texts
from etude.agent.tools.edit import last_seen, what_changed
from etude.agent.tools.tool import (
    Arguments,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
    guest_path,
    writable_path,
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

    async def run(self, context: ToolContext, args: WriteArguments) -> ToolResult:
        """See `Tool.run`."""
        target = await writable_path(context, args.path)
        if isinstance(target, ToolResult):
            return target
        workspace = await context.workspace()
        try:
            before = await workspace.read(target)
        except FileNotFoundError:
            before = None
        known = last_seen(context, args.path, target)
        if before is not None:
            news = what_changed(args.path, known, before)
            if news:
                return ToolResult(f"{news}Not written; read it again first.", ErrorClass.STALE)
        data = texts.encode(_in_style_of(before, args.content))
        if data == before:
            return ToolResult(f"{args.path} already has this content.", ErrorClass.NO_CHANGE)
        await workspace.write(target, data)
        context.seen[guest_path(args.path)] = context.seen[target] = data
        verb = "made" if before is None else "wrote"
        return ToolResult(f"{verb} {args.path} ({len(data)} bytes).", changed=True)


def _in_style_of(before: bytes | None, content: str) -> str:
    """`content` with the byte-order mark and the line endings of what it replaces."""
    if not before:
        return content
    old = texts.decode(before)
    endings = old.count("\n")
    if endings and old.count("\r\n") == endings and "\r\n" not in content:
        content = content.replace("\n", "\r\n")
    return texts.BOM + content if old[0] == texts.BOM != content[:1] else content
