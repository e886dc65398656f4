"""Tools as a TypeScript namespace, the way gpt-oss is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from etude.models.dialects.arguments import resolve
from etude.models.dialects.json_calls import write_json
from etude.models.renderer import ToolSpec

_SIMPLE = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
}
_MAX_PARTS = 500
"""Of one tool's type: a stranger's schema may unfold without end."""


def namespace(name: str, tools: Sequence[ToolSpec]) -> str:
    """One type per tool, a comment for each description."""
    lines = [f"## {name}", "", f"namespace {name} {{", ""]
    for tool in tools:
        lines += [f"// {line}" for line in tool.description.splitlines()]
        properties = tool.parameters.get("properties")
        if isinstance(properties, Mapping) and properties:
            lines.append(f"type {tool.name} = (_: {{")
            lines += _Types(tool.parameters).fields()
            lines += ["}) => any;", ""]
        else:
            lines += [f"type {tool.name} = () => any;", ""]
    return "\n".join([*lines, f"}} // namespace {name}"])


class _Types:
    """The types in one tool's schema; `any` for what it leaves open."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._parts = 0

    def fields(self) -> list[str]:
        """A line for each argument, its description above."""
        lines: list[str] = []
        for name, field in cast(Mapping[str, Any], self._root["properties"]).items():
            told = cast(Mapping[str, Any], field if isinstance(field, Mapping) else {})
            if "description" in told:
                lines += [f"// {line}" for line in str(told["description"]).splitlines()]
            default = f" // default: {write_json(told['default'])}" if "default" in told else ""
            lines.append(f"{self._field(name, field, self._root)},{default}")
        return lines

    def _field(self, name: str, schema: object, owner: Mapping[str, Any]) -> str:
        required = name in cast(Sequence[str], owner.get("required", ()))
        return f"{name}{'' if required else '?'}: {self._type(schema)}"

    def _type(self, schema: object) -> str:
        self._parts += 1
        if not isinstance(schema, Mapping) or self._parts > _MAX_PARTS:
            return "any"
        schema = cast(Mapping[str, Any], schema)
        alternatives = schema.get("anyOf", schema.get("oneOf"))
        kind = schema.get("type")
        if "$ref" in schema:
            name = self._type(resolve(self._root, schema))
        elif isinstance(alternatives, list):
            name = _union([self._type(part) for part in cast(list[object], alternatives)])
        elif isinstance(schema.get("enum"), list):
            name = _union([write_json(value) for value in schema["enum"]])
        elif isinstance(kind, list):
            each = cast(list[object], kind)
            name = _union([self._type({**schema, "type": one}) for one in each])
        elif kind == "array":
            inner = self._type(schema.get("items"))
            name = f"({inner})[]" if " | " in inner else f"{inner}[]"
        elif kind == "object":
            name = self._object(schema)
        else:
            name = _SIMPLE.get(str(kind), "any")
        return name

    def _object(self, schema: Mapping[str, Any]) -> str:
        fields = schema.get("properties")
        if not isinstance(fields, Mapping) or not fields:
            return "object"
        listed = cast(Mapping[str, object], fields).items()
        return "{" + ", ".join(self._field(name, field, schema) for name, field in listed) + "}"


def _union(types: Sequence[str]) -> str:
    return " | ".join(dict.fromkeys(types)) or "any"
