"""What a server answered, as the model is told of it: foreign text, marked as such."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from etude.agent.tools import ErrorClass, ToolResult
from etude.agent.tools.text import clean, head_and_tail

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock

_MAX_CHARS = 1 << 20


def told(server: str, result: CallToolResult) -> ToolResult:
    """A result in words. Pictures, sounds and bytes are named by type and size."""
    parts = [_block(block) for block in result.content]
    structured = result.structured_content
    if structured is not None and not any(_is_json(part, structured) for part in parts):
        parts.append(json.dumps(structured, ensure_ascii=False))
    text = "\n".join(part for part in parts if part) or "(no output)"
    return ToolResult(
        f"[data from the tool server {server}]\n{head_and_tail(clean(text), _MAX_CHARS)}",
        ErrorClass.SERVER if result.is_error else None,
    )


def _is_json(text: str, value: Any) -> bool:
    """Servers are asked to give structured content as text too; what is no object they wrap."""
    bare = value["result"] if isinstance(value, dict) and value.keys() == {"result"} else value
    if text == bare:
        return True
    try:
        return json.loads(text) in (value, bare)
    except (ValueError, RecursionError):
        return False


def _block(block: ContentBlock) -> str:
    from mcp_types import EmbeddedResource, ResourceLink, TextContent, TextResourceContents

    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ResourceLink):
        return " ".join(_link(block.uri, block.name, block.description))
    if not isinstance(block, EmbeddedResource):
        return f"[{block.type}: {block.mime_type}, {_size(block.data)} bytes, not shown]"
    resource = block.resource
    if isinstance(resource, TextResourceContents):
        return f"[resource {resource.uri}]\n{resource.text}"
    kind = resource.mime_type or "bytes"
    return f"[resource {resource.uri}: {kind}, {_size(resource.blob)} bytes, not shown]"


def _link(uri: object, name: str, description: str | None) -> Iterator[str]:
    yield f"[resource {uri}: {name}]"
    if description:
        yield description


def _size(data: str) -> int:
    try:
        return len(base64.b64decode(data))
    except (binascii.Error, ValueError):
        return len(data)
