"""The dialects of DeepSeek-V3 and V3.1: hardly any line breaks, everything by tokens.

Example of an answer of V3.1 (all on one line)::

    I fill the gap.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{"old": "GAP"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>

V3 writes `function<｜tool▁sep｜>edit` and the arguments in a fenced block of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.models.dialects.base import Dialect, Marker, Part
from etude.models.dialects.json_calls import read_arguments, require_plain, write_json
from etude.models.dialects.spans import Span, spans, split, text_of
from etude.models.renderer import ToolCall, ToolSpec
from etude.models.stream import MarkCutter, Marks, Piece


def _token(words: str) -> str:
    return f"<｜{words.replace(' ', '▁')}｜>"


_BEGIN, _END = _token("begin of sentence"), _token("end of sentence")
_USER, _ASSISTANT = _token("User"), _token("Assistant")
_SECTION_OPEN, _SECTION_CLOSE = _token("tool calls begin"), _token("tool calls end")
_CALL_OPEN, _CALL_CLOSE = _token("tool call begin"), _token("tool call end")
_SEPARATOR = _token("tool sep")
_OUTPUT_OPEN, _OUTPUT_CLOSE = _token("tool output begin"), _token("tool output end")
_OUTPUTS_OPEN, _OUTPUTS_CLOSE = _token("tool outputs begin"), _token("tool outputs end")
_THINK = ("<think>", "</think>")
_TAGS = (_SECTION_OPEN, _SECTION_CLOSE, _CALL_OPEN, _CALL_CLOSE, _SEPARATOR)
_FENCED = re.compile(r"\s*([^\n]*?)\s*\n```json\n(.*?)\n?```\s*\Z", re.DOTALL)


class DeepSeekRenderer(Dialect):
    """`Renderer` of DeepSeek-V3.1, which calls tools without thinking: the prompt closes it. Its
    template drops thinking from earlier turns; here what was sampled stays."""

    needs = (_BEGIN, _END, _USER, _ASSISTANT, *_TAGS, _OUTPUT_OPEN, _OUTPUT_CLOSE)
    hint = "use a DeepSeek-V3 or V3.1 model"
    stops = (_END,)
    meant = (*_TAGS, *_THINK)
    header: tuple[Part, ...] = (Marker(_ASSISTANT), Marker(_THINK[1]))

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant header."""
        parts: list[Part] = [Marker(_BEGIN), system]
        if tools:
            parts += ["\n\n" if system else "", *self._tool_list(tools)]
        return self._encode([*parts, Marker(_USER), user, *self.header])

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """End of the sampled turn (if it was cut), the results, the user's message, and the next
        assistant header; after results alone there is none, the answer goes on from them."""
        parts: list[Part] = [] if self._ended(last_completion) else [Marker(_END)]
        if results:
            parts += self._outputs(results)
        if user is not None:
            parts += [Marker(_USER), user]
        if user is not None or not results:
            parts += self.header
        return self._encode(parts)

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See `Renderer.expert`. Raises ValueError for a text that would be read as thinking."""
        if text.lstrip().startswith(_THINK[0]) and _THINK[0] not in self._has_tokens(_THINK):
            raise ValueError(f"the text must not start with {_THINK[0]}")
        parts: list[Part] = [text]
        if calls:
            parts.append(Marker(_SECTION_OPEN))
            for name, arguments in calls:
                require_plain([name])
                parts += [Marker(_CALL_OPEN), *self._call(name, write_json(dict(arguments)))]
                parts.append(Marker(_CALL_CLOSE))
            parts.append(Marker(_SECTION_CLOSE))
        return self._encode([*parts, Marker(_END)])

    def _call(self, name: str, arguments: str) -> list[Part]:
        return [name, Marker(_SEPARATOR), arguments]

    def _outputs(self, results: Sequence[str]) -> list[Part]:
        parts: list[Part] = []
        for result in results:
            parts += [Marker(_OUTPUT_OPEN), result, Marker(_OUTPUT_CLOSE)]
        return parts

    def _tool_list(self, tools: Sequence[ToolSpec]) -> list[Part]:
        return [
            f"{_listed(tools)}\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n",
            *(Marker(_SECTION_OPEN), Marker(_CALL_OPEN), "tool_call_name", Marker(_SEPARATOR)),
            *("tool_call_arguments", Marker(_CALL_CLOSE), "{additional_tool_calls}"),
            Marker(_SECTION_CLOSE),
            "\n\nWhere:\n\n"
            "- `tool_call_name` must be an exact match to one of the available tools\n"
            "- `tool_call_arguments` must be valid JSON that strictly follows the tool's "
            "Parameters Schema\n"
            "- For multiple tool calls, chain them directly without separators or spaces\n",
        ]

    def _cutter(self) -> MarkCutter:
        tokens = self._has_tokens(self.meant)
        return MarkCutter(Marks(_SECTION_OPEN, _THINK, tokens, before=0))

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        found = spans(pieces, _CALL_OPEN, _CALL_CLOSE, ends=[_SECTION_CLOSE])
        return tuple(_one_call(span) for span in found)


class DeepSeekV3Renderer(DeepSeekRenderer):
    """`Renderer` of DeepSeek-V3. Its own template tells of no tools; the list is ours, in the
    manner of V3.1."""

    needs = (*DeepSeekRenderer.needs, _OUTPUTS_OPEN, _OUTPUTS_CLOSE)
    header = (Marker(_ASSISTANT),)

    def _call(self, name: str, arguments: str) -> list[Part]:
        return ["function", Marker(_SEPARATOR), f"{name}\n```json\n{arguments}\n```"]

    def _outputs(self, results: Sequence[str]) -> list[Part]:
        return [Marker(_OUTPUTS_OPEN), *super()._outputs(results), Marker(_OUTPUTS_CLOSE)]

    def _tool_list(self, tools: Sequence[ToolSpec]) -> list[Part]:
        return [
            f"{_listed(tools)}\nTo call tools, end your answer with:\n",
            *(Marker(_SECTION_OPEN), Marker(_CALL_OPEN), "function", Marker(_SEPARATOR)),
            *("TOOL\n```json\n{ARGUMENTS}\n```", Marker(_CALL_CLOSE), Marker(_SECTION_CLOSE)),
        ]


def _listed(tools: Sequence[ToolSpec]) -> str:
    return "## Tools\nYou have access to the following tools:\n" + "".join(
        f"\n### {tool.name}\nDescription: {tool.description}\n\n"
        f"Parameters: {write_json(dict(tool.parameters))}\n"
        for tool in tools
    )


def _one_call(span: Span) -> ToolCall:
    """Either way of writing a call is read, whichever the model was taught."""
    head, body = split(span.inner, _SEPARATOR)
    name, text = text_of(head).strip(), text_of(body or ())
    if name == "function" and (fenced := _FENCED.match(text)) is not None:
        name, text = fenced[1], fenced[2]
    error, arguments = span.error, {}
    if error is None and (body is None or not name):
        error = f"the call is not NAME{_SEPARATOR}ARGUMENTS"
    if error is None:
        arguments, error = read_arguments(text)
    return ToolCall(name, arguments, span.raw, error)
