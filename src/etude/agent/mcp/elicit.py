"""A server's question to the person, asked by whatever the driver lends for questions."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from etude.agent.tools.text import clean

if TYPE_CHECKING:
    from mcp_types import ElicitRequestFormParams, ElicitResult

AskPerson = Callable[[str, Sequence[str]], Awaitable[str]]
ANSWER, DECLINE = "answer", "decline"
_MAX_FIELDS = 20


async def ask_form(server: str, params: ElicitRequestFormParams, ask: AskPerson) -> ElicitResult:
    """Ask whether the server gets an answer at all, then for each field. An empty answer is the
    field's default; one that does not fit declines."""
    from mcp_types import ElicitResult

    schema = cast("Mapping[str, Any]", params.requested_schema)
    fields = cast("Mapping[str, Mapping[str, Any]]", schema.get("properties", {}))
    question = clean(f"The tool server {server} asks: {params.message}")
    if len(fields) > _MAX_FIELDS or await ask(question, [ANSWER, DECLINE]) != ANSWER:
        return ElicitResult(action="decline")
    required = schema.get("required", ())
    content: dict[str, Any] = {}
    for name, field in fields.items():
        said = (await ask(_question(name, field), _options(field))).strip()
        if not said and "default" in field:
            content[name] = field["default"]
        elif said:
            try:
                content[name] = _value(field, said)
            except ValueError:
                return ElicitResult(action="decline")
        elif name in required:
            return ElicitResult(action="decline")
    return ElicitResult(action="accept", content=content)


def _question(name: str, field: Mapping[str, Any]) -> str:
    parts = [str(field.get("title") or name)]
    if field.get("description"):
        parts.append(f"({field['description']})")
    if "default" in field:
        parts.append(f"[empty: {json.dumps(field['default'], ensure_ascii=False)}]")
    return clean(" ".join(parts))


def _options(field: Mapping[str, Any]) -> list[str]:
    titled = field.get("oneOf", ())
    return [clean(str(option)) for option in field.get("enum", [o.get("const") for o in titled])]


def _value(field: Mapping[str, Any], said: str) -> Any:
    """The answer as the field's type. Raises ValueError when it is none."""
    kind = field.get("type", "string")
    if kind == "boolean":
        words = {"true": True, "yes": True, "y": True, "false": False, "no": False, "n": False}
        if said.lower() not in words:
            raise ValueError(said)
        return words[said.lower()]
    if kind == "integer":
        return int(said)
    if kind == "number":
        return float(said)
    if kind == "array":
        return [part.strip() for part in said.split(",")]
    options = _options(field)
    if options and said not in options:
        raise ValueError(said)
    return said
