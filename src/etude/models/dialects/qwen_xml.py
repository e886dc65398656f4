"""The dialects of Qwen3-Coder and Qwen3.5: ChatML turns, calls as nested tags.

Example of an answer::

    I fill the gap.

    <tool_call>
    <function=edit>
    <parameter=old>
    GAP
    </parameter>
    </function>
    </tool_call><|im_end|>

`<tool_call>` and `</tool_call>` are tokens. The inner tags are only text, so an argument ends at
the first `</parameter>` after which the call goes on as it must.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from etude.models.dialects.arguments import ArgumentText
from etude.models.dialects.base import Marker, Part
from etude.models.dialects.chatml import (
    CALL_CLOSE,
    CALL_OPEN,
    RESULT_CLOSE,
    RESULT_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    TURN_END,
    TURN_START,
    ChatML,
)
from etude.models.dialects.json_calls import function_json, require_plain, write_json
from etude.models.dialects.spans import Span, spans, text_of
from etude.models.renderer import ToolCall, ToolSpec
from etude.models.stream import MarkCutter, Marks, Piece

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>\s*(?=<parameter=[^<>\n]+>|</function>\s*\Z)")
_END = re.compile(r"</function>\s*\Z")
_PARAMETER_CLOSE = "</parameter>"
_HOW_TO_CALL: tuple[Part, ...] = (
    "\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n",
    Marker(CALL_OPEN),
    "\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\n"
    "that can span\nmultiple lines\n</parameter>\n</function>\n",
    Marker(CALL_CLOSE),
    "\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block "
    "must be nested within ",
    Marker(CALL_OPEN),
    Marker(CALL_CLOSE),
    " XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the "
    "function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n</IMPORTANT>",
)


class QwenCoderRenderer(ChatML):
    """`Renderer` of Qwen3-Coder."""

    needs = (TURN_START, TURN_END, CALL_OPEN, CALL_CLOSE)
    hint = "use a Qwen3-Coder model, or choose the dialect hermes"
    meant = (CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE)
    opened = ""
    """What stands before the answer when there is no thinking."""

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant header."""
        ids = self._turn("system", self._system(system, tools)) if system or tools else []
        return ids + self._turn("user", [user]) + self._begin()

    def _system(self, system: str, tools: Sequence[ToolSpec]) -> list[Part]:
        default = "You are Qwen, a helpful AI assistant that can interact with a computer to solve "
        head: list[Part] = [system or f"{default}tasks."]
        if not tools:
            return head
        head.append("\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>")
        head += [_function_tags(tool) for tool in tools]
        return [*head, "\n</tools>", *_HOW_TO_CALL]

    def _results(self, results: Sequence[str]) -> list[Part]:
        parts: list[Part] = []
        for result in results:
            parts += [Marker(RESULT_OPEN), f"\n{result}\n", Marker(RESULT_CLOSE), "\n"]
        return parts

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See `Renderer.expert`."""
        parts: list[Part] = [self.opened, Marker(THINK_CLOSE), "\n\n"] if self.opened else []
        parts.append(text)
        for number, (name, arguments) in enumerate(calls):
            require_plain([name, *arguments])
            spelling = self._spelling(name, tools)
            parts += ["\n"] if number else ["\n\n"] if text else []
            parts += [Marker(CALL_OPEN), f"\n<function={name}>\n"]
            for key, value in arguments.items():
                parts.append(f"<parameter={key}>\n{spelling.write(key, value)}\n</parameter>\n")
            parts += ["</function>\n", Marker(CALL_CLOSE)]
        return [*self._encode(parts), self._turn_end]

    def _spelling(self, name: str, tools: Sequence[ToolSpec]) -> ArgumentText:
        tool = next((tool for tool in tools if tool.name == name), None)
        return ArgumentText(tool, python=True, forbidden=[_PARAMETER_CLOSE])

    def _cutter(self) -> MarkCutter:
        think = (THINK_OPEN, THINK_CLOSE)
        tokens = self._has_tokens(self.meant)
        opened = bool(self.opened)
        return MarkCutter(Marks(CALL_OPEN, think, tokens, gap=2, before=2, opened=opened))

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        found = spans(pieces, CALL_OPEN, CALL_CLOSE, closer=_AfterFunction)
        return tuple(self._one_call(span, tools) for span in found)

    def _one_call(self, span: Span, tools: Sequence[ToolSpec]) -> ToolCall:
        body = text_of(span.inner)
        opening = _FUNCTION.match(body)
        if opening is None:
            return ToolCall("", {}, span.raw, "the call does not begin with <function=NAME>")
        name = opening[1].strip()
        spelling = self._spelling(name, tools)
        arguments: dict[str, Any] = {}
        error, position = span.error, opening.end()
        while error is None and (parameter := _PARAMETER.match(body, position)) is not None:
            end = _VALUE_END.search(body, parameter.end())
            if end is None:
                error = f"the parameter {parameter[1]} is not closed by {_PARAMETER_CLOSE}"
            else:
                arguments[parameter[1]] = spelling.read(
                    parameter[1], body[parameter.end() : end.start()]
                )
                position = end.end()
        if error is None and _END.match(body, position) is None:
            error = "the call does not end with </function>"
        return ToolCall(name, {} if error else arguments, span.raw, error)


class Qwen35Renderer(QwenCoderRenderer):
    """`Renderer` of Qwen3.5 and 3.6 with thinking on: the prompt opens it. Their template forgets
    the thinking of earlier turns; here it stays, as it was sampled."""

    needs = (*QwenCoderRenderer.needs, THINK_OPEN, THINK_CLOSE)
    hint = "use a Qwen3.5 model, or choose another dialect"
    opened = "\n"

    def _system(self, system: str, tools: Sequence[ToolSpec]) -> list[Part]:
        if not tools:
            return [system]
        head = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
        lines = "\n".join(write_json(function_json(tool)) for tool in tools)
        tail: list[Part] = [f"\n\n{system}"] if system else []
        return [f"{head}{lines}\n</tools>", *_HOW_TO_CALL, *tail]

    def _begin(self) -> list[int]:
        return self._encode([Marker(TURN_START), self.header, Marker(THINK_OPEN), "\n"])

    def _results(self, results: Sequence[str]) -> list[Part]:
        return ChatML._results(self, results)


class _AfterFunction:
    """A call may end where its function does: an argument may hold any tag."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: Piece) -> None:
        self._tail = (self._tail + piece.data).rstrip()[-len("</function>") :]

    def ready(self) -> bool:
        return self._tail == b"</function>"


def _function_tags(tool: ToolSpec) -> str:
    """A tool as Qwen3-Coder's template tells of it."""
    lines = ["", "<function>", f"<name>{tool.name}</name>"]
    lines += [f"<description>{tool.description.strip()}</description>", "<parameters>"]
    parameters = tool.parameters
    properties = cast(Mapping[str, Mapping[str, Any]], parameters.get("properties", {}))
    for name, schema in properties.items():
        lines += ["<parameter>", f"<name>{name}</name>"]
        if "type" in schema:
            lines.append(f"<type>{schema['type']}</type>")
        if "description" in schema:
            lines.append(f"<description>{str(schema['description']).strip()}</description>")
        lines += [*_other_tags(schema, ("name", "type", "description")), "</parameter>"]
    lines += [*_other_tags(parameters, ("type", "properties")), "</parameters>", "</function>"]
    return "\n".join(lines)


def _other_tags(schema: Mapping[str, Any], told: Sequence[str]) -> list[str]:
    rest = {key: value for key, value in schema.items() if key not in told}
    return [
        f"<{key}>{write_json(value) if isinstance(value, dict | list) else value}</{key}>"
        for key, value in rest.items()
    ]
