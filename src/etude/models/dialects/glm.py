"""The dialect of GLM-4.5 and 4.6: a role token begins each message and ends the one before.

Example of an answer::

    <think>The first element is seq[0].</think>
    I fill the gap.
    <tool_call>edit
    <arg_key>old</arg_key>
    <arg_value>GAP</arg_value>
    </tool_call><|observation|>

All these tags are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.models.dialects.arguments import ArgumentText
from etude.models.dialects.base import Dialect, Marker, Part
from etude.models.dialects.json_calls import function_json, require_plain, write_json
from etude.models.dialects.spans import Span, spans, split, text_of
from etude.models.renderer import ToolCall, ToolSpec
from etude.models.stream import MarkCutter, Marks, Piece

_SYSTEM, _USER, _ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
_OBSERVATION, _DOCUMENT_END = "<|observation|>", "<|endoftext|>"
_THINK = ("<think>", "</think>")
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_KEY_OPEN, _KEY_CLOSE = "<arg_key>", "</arg_key>"
_VALUE_OPEN, _VALUE_CLOSE = "<arg_value>", "</arg_value>"
_TAGS = (_CALL_OPEN, _CALL_CLOSE, _KEY_OPEN, _KEY_CLOSE, _VALUE_OPEN, _VALUE_CLOSE)


class GlmRenderer(Dialect):
    """`Renderer` of GLM-4.5 and 4.6 with thinking on. Their template forgets the thinking of
    earlier turns; here it stays, as it was sampled."""

    needs = ("[gMASK]", "<sop>", _SYSTEM, _USER, _ASSISTANT, _OBSERVATION, *_THINK, *_TAGS)
    hint = "use a GLM-4.5 or 4.6 model"
    stops = (_USER, _OBSERVATION, _DOCUMENT_END)
    meant = (*_THINK, *_TAGS)

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant token."""
        parts: list[Part] = [Marker("[gMASK]"), Marker("<sop>")]
        if tools:
            parts += [Marker(_SYSTEM), *_tool_list(tools)]
        if system:
            parts += [Marker(_SYSTEM), f"\n{system}"]
        return self._encode([*parts, Marker(_USER), f"\n{user}", Marker(_ASSISTANT)])

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """Results, the user's message and the next assistant token. The role token that ended the
        sampled turn opens the next message, unless the model was wrong about its role."""
        last = last_completion[-1] if last_completion else None
        parts: list[Part] = []
        if results:
            if last != self._tokens.special(_OBSERVATION):
                parts.append(Marker(_OBSERVATION))
            for result in results:
                parts += ["\n", Marker("<tool_response>"), f"\n{result}\n"]
                parts.append(Marker("</tool_response>"))
        if user is not None:
            if results or last != self._tokens.special(_USER):
                parts.append(Marker(_USER))
            parts.append(f"\n{user}")
        return self._encode([*parts, Marker(_ASSISTANT)])

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See `Renderer.expert`; without thinking, as the template writes it."""
        parts: list[Part] = ["\n", Marker(_THINK[0]), Marker(_THINK[1])]
        parts += [f"\n{text}"] if text else []
        for name, arguments in calls:
            require_plain([name, *arguments])
            spelling = _spelling(name, tools)
            parts += ["\n", Marker(_CALL_OPEN), f"{name}\n"]
            for key, value in arguments.items():
                parts += [Marker(_KEY_OPEN), key, Marker(_KEY_CLOSE), "\n", Marker(_VALUE_OPEN)]
                parts += [spelling.write(key, value), Marker(_VALUE_CLOSE), "\n"]
            parts.append(Marker(_CALL_CLOSE))
        return self._encode([*parts, Marker(_OBSERVATION if calls else _USER)])

    def _cutter(self) -> MarkCutter:
        return MarkCutter(Marks(_CALL_OPEN, _THINK, frozenset(self.meant), gap=1))

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        found = spans(pieces, _CALL_OPEN, _CALL_CLOSE, closer=_OutsideValue)
        return tuple(_one_call(span, tools) for span in found)


class _OutsideValue:
    """A call may end where no value is open: a value may hold any other tag."""

    def __init__(self) -> None:
        self._inside = False

    def feed(self, piece: Piece) -> None:
        if piece.marker in (_VALUE_OPEN, _VALUE_CLOSE):
            self._inside = piece.marker == _VALUE_OPEN

    def ready(self) -> bool:
        return not self._inside


def _one_call(span: Span, tools: Sequence[ToolSpec]) -> ToolCall:
    head, rest = split(span.inner, _KEY_OPEN)
    name = text_of(head).strip()
    error = span.error or (None if name else "the call has no name")
    spelling = _spelling(name, tools)
    arguments: dict[str, Any] = {}
    while error is None and rest is not None:
        key, after_key = split(rest, _KEY_CLOSE)
        between, after_open = split(after_key or (), _VALUE_OPEN)
        value, after_value = split(after_open or (), _VALUE_CLOSE)
        blank, rest = split(after_value or (), _KEY_OPEN)
        if after_value is None or text_of([*between, *blank]).strip():
            error = f"the argument {text_of(key).strip()} is not a pair of {_KEY_OPEN} and "
            error += f"{_VALUE_OPEN}"
        arguments[text_of(key).strip()] = spelling.read(text_of(key).strip(), text_of(value))
    return ToolCall(name, {} if error else arguments, span.raw, error)


def _spelling(name: str, tools: Sequence[ToolSpec]) -> ArgumentText:
    return ArgumentText(next((tool for tool in tools if tool.name == name), None))


def _tool_list(tools: Sequence[ToolSpec]) -> list[Part]:
    lines = "".join(f"{write_json(function_json(tool))}\n" for tool in tools)
    parts: list[Part] = [
        "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{lines}</tools>\n\nFor each function call, output the function name and arguments "
        "within the following XML format:\n",
        Marker(_CALL_OPEN),
        "{function-name}\n",
    ]
    for number in (1, 2):
        parts += [Marker(_KEY_OPEN), f"{{arg-key-{number}}}", Marker(_KEY_CLOSE), "\n"]
        parts += [Marker(_VALUE_OPEN), f"{{arg-value-{number}}}", Marker(_VALUE_CLOSE), "\n"]
    return [*parts, "...\n", Marker(_CALL_CLOSE)]
