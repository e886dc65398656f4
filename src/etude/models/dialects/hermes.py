"""The Hermes dialect: ChatML turns, tool calls as JSON between `<tool_call>` markers.

Example of an answer::

    <think>The first element is seq[0].</think>
    I fill the gap.
    <tool_call>
    {"name": "edit", "arguments": {"path": "a.py", "old": "GAP", "new": "seq[0]"}}
    </tool_call><|im_end|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from etude.models.dialects.base import Marker, Part
from etude.models.dialects.chatml import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    ChatML,
)
from etude.models.dialects.json_calls import DECODER, encodable, unusable
from etude.models.renderer import ToolCall, ToolSpec
from etude.models.stream import MarkCutter, Marks, Piece

_BLANK = " \t\r\n"


class HermesRenderer(ChatML):
    """`Renderer` of the Hermes dialect over a byte-level tokenizer with ChatML tokens.

    The markers of thinking and calls count however they were sampled, as one token or in letters:
    small models have no tokens for them. Qwen3's template forgets the thinking of earlier turns;
    here it stays, as it was sampled.
    """

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant header."""
        head: list[Part] = [system]
        if tools:
            head += ["\n\n" if system else "", *_tool_list(tools)]
        ids = self._turn("system", head) if system or tools else []
        return ids + self._turn("user", [user]) + self._begin()

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """The completion that says `text` and makes `calls`, end of turn included.

        Raises ValueError for a text that would be read back as thinking or as a call."""
        if text.lstrip().startswith(THINK_OPEN) or CALL_OPEN in text:
            raise ValueError(f"text must neither start with {THINK_OPEN} nor contain {CALL_OPEN}")
        parts: list[Part] = [text]
        for number, (name, arguments) in enumerate(calls):
            body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
            parts += ["\n"] if text or number else []
            parts += [Marker(CALL_OPEN), f"\n{body}\n", Marker(CALL_CLOSE)]
        return [*self._encode(parts), self._turn_end]

    def _cutter(self) -> MarkCutter:
        return MarkCutter(Marks(call=CALL_OPEN, think=(THINK_OPEN, THINK_CLOSE)))

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        return _calls(b"".join(piece.data for piece in pieces).decode("utf-8", "replace"))


def _tool_list(tools: Sequence[ToolSpec]) -> list[Part]:
    """One line per tool and one on how to call: on a CPU every prompt token is paid for."""
    lines = [f"{tool.name}({_signature(tool)}): {_line(tool.description)}\n" for tool in tools]
    return [
        "Tools:\n",
        *lines,
        "To call one, end your answer with:\n",
        Marker(CALL_OPEN),
        '\n{"name": TOOL, "arguments": {NAME: VALUE, ...}}\n',
        Marker(CALL_CLOSE),
    ]


def _line(text: str) -> str:
    return " ".join(text.split())


def _signature(tool: ToolSpec) -> str:
    """Argument names; `?` marks what may be left out, a type is told unless it is a string."""
    required = set(cast(Sequence[str], tool.parameters.get("required", ())))
    properties = cast(Mapping[str, Mapping[str, Any]], tool.parameters.get("properties", {}))
    names: list[str] = []
    for name, schema in properties.items():
        kind = schema.get("type", "string")
        shown = name if name in required else f"{name}?"
        names.append(shown if kind == "string" else f"{shown}: {kind}")
    return ", ".join(names)


def _calls(text: str) -> tuple[ToolCall, ...]:
    """Read calls from a text that starts with the opening marker. After a call only another one
    may follow; anything else spoils it."""
    calls: list[ToolCall] = []
    position = 0
    while position < len(text):
        call, position = _one_call(text, position)
        following = text.find(CALL_OPEN, position)
        following = len(text) if following < 0 else following
        if call.error is None and text[position:following].strip(_BLANK):
            call = ToolCall(call.name, {}, call.raw, "there is text after the call")
        calls.append(call)
        position = following
    return tuple(calls)


def _one_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call that opens at `start`, and where the text after it begins. The JSON decoder finds
    its end, so that a closing marker inside a string is only text."""
    body = start + len(CALL_OPEN)
    while body < len(text) and text[body] in _BLANK:
        body += 1
    try:
        value, end = DECODER.raw_decode(text, body)
    except (ValueError, RecursionError) as error:
        closed = text.find(CALL_CLOSE, body)
        end = len(text) if closed < 0 else closed + len(CALL_CLOSE)
        reason = f"the call is not valid JSON: {error}"
        return ToolCall("", {}, text[start:end], reason), end
    rest = text[end:].lstrip(_BLANK)
    closed = rest.startswith(CALL_CLOSE)
    if closed:
        end = len(text) - len(rest) + len(CALL_CLOSE)
    name, arguments, reason = _shape(value)
    if reason is None and not closed:
        reason = f"the call is not closed by {CALL_CLOSE}"
    return ToolCall(name, arguments if reason is None else {}, text[start:end], reason), end


def _shape(value: object) -> tuple[str, Mapping[str, Any], str | None]:
    """Name, arguments and what is wrong with the shape of a decoded call."""
    call = cast(dict[str, Any], value if isinstance(value, dict) else {})
    name, arguments = call.get("name"), call.get("arguments")
    reason = None
    if not isinstance(value, dict):
        reason = "the call is not a JSON object"
    elif not isinstance(name, str) or not name:
        reason = 'the call has no "name"'
    elif "arguments" not in call:
        reason = 'the call has no "arguments"'
    elif not isinstance(arguments, dict):
        reason = '"arguments" is not a JSON object'
    elif unknown := set(call) - {"name", "arguments"}:
        reason = f"the call has unknown keys: {', '.join(sorted(unknown))}"
    else:
        reason = unusable(value)
    if reason is None:
        return cast(str, name), cast(dict[str, Any], arguments), None
    return name if isinstance(name, str) and encodable(name) else "", {}, reason
