"""Replacing one exact piece of a file."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from etude.agent.tools import text as texts
from etude.agent.tools.read import similar_names
from etude.agent.tools.tool import (
    Arguments,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
    guest_path,
    put,
)


class EditArguments(Arguments):
    """`old` stands exactly once in the file."""

    path: Word
    old: Annotated[str, StringConstraints(min_length=1)]
    new: str


class Edit(Tool[EditArguments]):
    """Exact replacement; nothing is ever accepted that is merely alike."""

    name = "edit"
    description = "replace old, which stands exactly once in the file, by new"
    arguments = EditArguments

    async def run(self, context: ToolContext, args: EditArguments) -> ToolResult:
        """See `Tool.run`."""
        workspace = await context.workspace()
        try:
            data = await workspace.read(args.path)
        except (FileNotFoundError, NotADirectoryError):
            return ToolResult(
                f"{args.path} does not exist.{await similar_names(workspace, args.path)}",
                ErrorClass.NOT_FOUND,
            )
        news = what_changed(args.path, context.seen.get(guest_path(args.path)), data)
        edited = _edited(args, texts.decode(data))
        if isinstance(edited, ToolResult):
            # The likely cause goes first when the model's picture of the file is an old one.
            stale = news and edited.error_class is ErrorClass.NO_MATCH
            return ToolResult(f"{news}{edited.text}", ErrorClass.STALE) if stale else edited
        refusal = await put(context, args.path, texts.encode(edited))
        return refusal or ToolResult(f"{news}edited {args.path}.", changed=True)


def what_changed(path: str, known: bytes | None, now: bytes) -> str:
    """A line and a diff when the file is no longer what the session last saw of it, else ''."""
    if known is None or known == now:
        return ""
    diff = texts.changes(texts.shown(texts.decode(known)), texts.shown(texts.decode(now)))
    body = diff or "(only line endings or bytes that are not shown)"
    return f"{path} has changed since you last read it:\n{body}\n"


def _edited(args: EditArguments, raw: str) -> str | ToolResult:
    """The file's new text, or why there is none."""
    old, new = texts.unix(args.old), texts.unix(args.new)
    text = texts.unix(raw)
    found = texts.occurrences(text, old)
    if not found:
        return ToolResult(_no_match(args.path, text, old), ErrorClass.NO_MATCH)
    if len(found) > 1:
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
    return texts.splice(raw, found[0], old, new)


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
