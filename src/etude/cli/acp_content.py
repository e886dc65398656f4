"""What an editor sends as a message, as the text that the model is given."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from acp.schema import (
        AudioContentBlock,
        EmbeddedResourceContentBlock,
        ImageContentBlock,
        ResourceContentBlock,
        TextContentBlock,
    )

    Block = (
        TextContentBlock
        | ImageContentBlock
        | AudioContentBlock
        | ResourceContentBlock
        | EmbeddedResourceContentBlock
    )


def message_text(project: Path, blocks: Sequence[Block]) -> str:
    """The blocks in order. Files are named relative to the project; pictures and sounds are only
    noted, since the model is given text."""
    return "\n".join(part for part in (_part(project, block) for block in blocks) if part)


def _part(project: Path, block: Block) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return f"[file: {place(project, block.uri)}]"
    if block.type in ("image", "audio"):
        return (
            f"[{block.type}: {block.mime_type}, {_size(block.data)} bytes; left out, the model"
            " reads only text]"
        )
    resource = block.resource
    where = place(project, resource.uri)
    text = getattr(resource, "text", None)
    if text is None:
        return f"[file: {where}, {_size(resource.blob)} bytes that are no text]"
    return f"[content of {where}]\n{text}\n[end of {where}]"


def place(project: Path, uri: str) -> str:
    """A file's address as the model names it: relative to the project where it is in it."""
    parts = urlsplit(uri)
    if parts.scheme != "file":
        return uri
    path = Path(unquote(parts.path))
    try:
        shown = str(path.relative_to(project))
    except ValueError:
        shown = f"{path} (outside of the project)"
    return f"{shown} at {parts.fragment}" if parts.fragment else shown


def _size(data: str) -> int:
    try:
        return len(base64.b64decode(data))
    except (binascii.Error, ValueError):
        return len(data)
