"""Reading JSON that a model wrote: what is wrong is said in words, nothing raises."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from etude.models.renderer import ToolSpec

MAX_DEPTH = 64
"""Deeper nesting is refused: whatever logs or checks it later must not run out of stack."""


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def unusable(value: object) -> str | None:
    """Why decoded JSON cannot be used all the same, or None."""
    if too_deep(value):
        return f"the call is nested more than {MAX_DEPTH} levels deep"
    if not encodable(value):
        return "the call contains half of a surrogate pair, which is no character"
    return None


def too_deep(value: object) -> bool:
    """Whether a decoded value is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast(dict[str, object], item).values()
            elif isinstance(item, list):
                inner += cast(list[object], item)
        if not inner:
            return False
        level = inner
    return True


def encodable(value: object) -> bool:
    """JSON can spell code points that no text may contain. `value` is not too deep."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_arguments(text: str) -> tuple[Mapping[str, Any], str | None]:
    """A call's arguments, or what is wrong with them."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return {}, f"the arguments are not valid JSON: {error}"
    if not isinstance(value, dict):
        return {}, "the arguments are not a JSON object"
    reason = unusable(value)
    return ({} if reason else cast(dict[str, Any], value)), reason


def write_json(value: object) -> str:
    """As chat templates write it: one line, characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def function_json(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates are given it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def plain_name(name: str) -> bool:
    """Whether a name of a tool or argument can stand in a dialect's own syntax."""
    return bool(name) and all(c.isalnum() or c in "_-." for c in name) and name.isascii()


def require_plain(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is not plain."""
    for name in names:
        if not plain_name(name):
            raise ValueError(f"the name {name!r} has other characters than letters, digits, _-.")
