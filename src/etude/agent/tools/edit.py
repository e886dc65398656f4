"""Replacing one exact piece of a file."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from etude.agent.tools import text as texts
from etude.agent.tools.files import absent, load, store, what_changed
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)


class EditArguments(Arguments):
    """`old` stands exactly once in the file, or `replace_all` is set."""

    path: Word
    old: Annotated[str, StringConstraints(min_length=1)]
    new: str
    replace_all: bool = False


class Edit(Tool[EditArguments]):
    """Exact replacement; nothing is ever accepted that is merely alike."""

    name = "edit"
    description = "replace old, which stands exactly once in the file, by new"
    arguments = EditArguments
    effect = Effect.WRITE

    async def run(self, context: ToolContext, args: EditArguments) -> ToolResult:
        """See `Tool.run`."""
        data = await load(context, args.path)
        if data is None:
            return await absent(context, args.path)
        news = what_changed(context, args.path, data)
        edited = _edited(args, texts.decode(data))
        if isinstance(edited, ToolResult):
            # The likely cause goes first when the model's picture of the file is an old one.
            stale = news and edited.error_class is ErrorClass.NO_MATCH
            return ToolResult(f"{news}{edited.text}", ErrorClass.STALE) if stale else edited
        raw, count = edited
        said = f"{news}edited {args.path}{f' in {count} places' if args.replace_all else ''}."
        return await store(context, args.path, data, texts.encode(raw), said)


def _edited(args: EditArguments, raw: str) -> tuple[str, int] | ToolResult:
    """The file's new text and the number of places, or why there is none."""
    old, new = texts.unix(args.old), texts.unix(args.new)
    text = texts.unix(raw)
    found = texts.occurrences(text, old, overlapping=not args.replace_all)
    if not found:
        return ToolResult(_no_match(args.path, text, old), ErrorClass.NO_MATCH)
    if len(found) > 1 and not args.replace_all:
        lines = ", ".join(str(texts.line_of(text, at)) for at in found[:10])
        return ToolResult(
            f"old stands {len(found)} times in {args.path}, at lines {lines}; "
            "add lines around it until it stands only once.",
            ErrorClass.SEVERAL_MATCHES,
        )
    if old == new:
        return ToolResult(
            f"old and new are the same; {args.path} is unchanged.", ErrorClass.NO_CHANGE
        )
    return texts.splice(raw, found, old, new), len(found)


def _no_match(path: str, text: str, old: str) -> str:
    """Why `old` is not in `text`, as exactly as can be said."""
    bare = texts.without_line_numbers(old)
    if bare is not None and any(line.strip() and line in text for line in bare[1].split("\n")):
        return (
            f"old was not found in {path}: it begins with the line number prefix {bare[0]!r}, "
            "which is not in the file; leave such prefixes out."
        )
    shown = texts.shown(texts.nearest(text, old))
    if not shown:
        return f"old was not found in {path}, nor anything like it."
    stripped = [line.strip() for line in old.strip().split("\n")]
    spaces = "\n".join(stripped) in "\n".join(line.strip() for line in text.split("\n"))
    reason = "only white space differs; " if spaces else ""
    return f"old was not found in {path}; {reason}the nearest lines are:\n{shown}"
