"""Arguments that stand as bare text between tags, as GLM and Qwen3-Coder write them.

A string is written as it is, anything else as JSON, so `1` may be a number or a string: the tool's
schema tells. Where the schema allows both, a string that would be read as something else is written
in JSON quotes. `write` and `read` are inverse to one another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from etude.models.dialects.json_calls import DECODER, unusable, write_json
from etude.models.renderer import ToolSpec

_ALL = frozenset({"string", "number", "boolean", "null", "array", "object"})
_PYTHON = {"True": True, "False": False, "None": None}


class ArgumentText:
    """How the arguments of one tool are spelled. `python` writes true, false and null as Python
    does; they are read either way. A string with one of `forbidden` inside is written in JSON
    quotes with `<` as an escape, for it would end the argument."""

    def __init__(
        self, tool: ToolSpec | None, *, python: bool = False, forbidden: Sequence[str] = ()
    ) -> None:
        self._schema = {} if tool is None else tool.parameters
        self._python = python
        self._forbidden = tuple(forbidden)

    def write(self, name: str, value: object) -> str:
        """The text of an argument. Raises ValueError for a value that would be read back as
        another one, such as a number where the schema wants a string."""
        text = self._text(name, value)
        if write_json(self.read(name, text)) != write_json(value):
            raise ValueError(f"the argument {name} cannot be {value!r}")
        return text

    def _text(self, name: str, value: object) -> str:
        types = self._types(name)
        if isinstance(value, str):
            return self._quoted(value) if self._needs_quotes(value, types) else value
        if self._python and (value is None or isinstance(value, bool)):
            return str(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if self._is_speakable(text) else text.replace("<", "\\u003c")

    def read(self, name: str, text: str) -> object:
        """The value of an argument's text; the text itself when it cannot be what the schema
        wants, so that whoever checks the arguments can say so."""
        types = self._types(name)
        inner = self._unquoted(text)
        if inner is not None and self._needs_quotes(inner, types):
            return inner
        found, value = _literal(text, types - {"string"})
        return value if found else text

    def _needs_quotes(self, text: str, types: frozenset[str]) -> bool:
        if not self._is_speakable(text) or _literal(text, types - {"string"})[0]:
            return True
        inner = self._unquoted(text)
        return inner is not None and self._needs_quotes(inner, types)

    def _is_speakable(self, text: str) -> bool:
        return not any(part in text for part in self._forbidden)

    def _quoted(self, text: str) -> str:
        return write_json(text).replace("<", "\\u003c")

    def _unquoted(self, text: str) -> str | None:
        """The string that is quoted as exactly this text."""
        if len(text) < 2 or text[0] != '"' or text[-1] != '"':
            return None
        try:
            value = DECODER.decode(text)
        except ValueError:
            return None
        return value if isinstance(value, str) and self._quoted(value) == text else None

    def _types(self, name: str) -> frozenset[str]:
        """The JSON types that the schema lets through; all where it does not say. Schemas may be
        a stranger's, so each reference is followed once."""
        properties = self._schema.get("properties")
        if not isinstance(properties, Mapping) or name not in properties:
            return _ALL
        found: set[str] = set()
        followed: set[str] = set()
        waiting: list[object] = [cast(Mapping[str, Any], properties)[name]]
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping):
                return _ALL
            schema = cast(Mapping[str, Any], schema)
            parts = schema.get("anyOf", schema.get("oneOf"))
            if "$ref" in schema:
                if str(schema["$ref"]) not in followed:
                    followed.add(str(schema["$ref"]))
                    waiting.append(resolve(self._schema, schema))
            elif isinstance(parts, list):
                waiting += cast(list[object], parts)
            else:
                found |= _own_types(schema)
        return frozenset(found) or _ALL


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    kind = schema.get("type")
    kinds = cast(list[object], kind if isinstance(kind, list) else [kind])
    known = frozenset("number" if name == "integer" else str(name) for name in kinds)
    return known if known <= _ALL else _ALL


def resolve(root: Mapping[str, Any], schema: Mapping[str, Any]) -> object:
    """What a `$ref` into `$defs` of the same schema points to; None when to nothing."""
    reference, definitions = schema.get("$ref"), root.get("$defs")
    if not isinstance(reference, str) or not isinstance(definitions, Mapping):
        return None
    return cast(Mapping[str, object], definitions).get(reference.removeprefix("#/$defs/"))


def _literal(text: str, types: frozenset[str]) -> tuple[bool, object]:
    """Whether `text` spells a value of one of `types` (never a string), and the value."""
    if not types:
        return False, None
    word = text.strip()
    if word in _PYTHON:
        value: object = _PYTHON[word]
        return _type_of(value) in types, value
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return False, None
    return _type_of(value) in types and unusable(value) is None, value


def _type_of(value: object) -> str:
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "array" if isinstance(value, list | tuple) else "object"
