"""The dialect of Kimi-K2: every message has a role token, a name and `<|im_middle|>`.

Example of an answer (all on one line)::

    I fill the gap.<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0
    <|tool_call_argument_begin|>{"old": "GAP"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>

The id of a call, `functions.NAME:NUMBER`, comes back with its result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from etude.models.dialects.base import Dialect, Marker, Part
from etude.models.dialects.json_calls import (
    function_json,
    read_arguments,
    require_plain,
    write_json,
)
from etude.models.dialects.spans import spans, split, text_of
from etude.models.renderer import ToolCall, ToolSpec
from etude.models.stream import MarkCutter, Marks, Piece

_SYSTEM, _USER, _ASSISTANT = "<|im_system|>", "<|im_user|>", "<|im_assistant|>"
_MIDDLE, _END = "<|im_middle|>", "<|im_end|>"
_SECTION_OPEN, _SECTION_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_OPEN, _CALL_CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_THINK = ("<think>", "</think>")
_TAGS = (_SECTION_OPEN, _SECTION_CLOSE, _CALL_OPEN, _CALL_CLOSE, _ARGUMENTS)
_DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."


class KimiRenderer(Dialect):
    """`Renderer` of Kimi-K2. The thinking model's template forgets the thinking of earlier turns;
    here it stays, as it was sampled."""

    needs = (_SYSTEM, _USER, _ASSISTANT, _MIDDLE, _END, *_TAGS)
    hint = "use a Kimi-K2 model"
    stops = (_END, "[EOS]")
    meant = (*_TAGS, *_THINK)

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        # A session asks several times what follows the same turn.
        self._ids = lru_cache(maxsize=64)(self._read_ids)

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant header."""
        parts: list[Part] = []
        if tools:
            listed = [function_json(tool) for tool in tools]
            body = json.dumps(listed, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            parts += _message(_SYSTEM, "tool_declare", body)
        parts += _message(_SYSTEM, "system", system or _DEFAULT_SYSTEM)
        # The template breaks the line after the system text that is its own.
        parts += [] if system else ["\n"]
        parts += _message(_USER, "user", user)
        return self._encode([*parts, *_header()])

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """End of the sampled turn (if it was cut), each result under its call's name and id, the
        user's message, and the next assistant header."""
        parts: list[Part] = [] if self._ended(last_completion) else [Marker(_END)]
        ids = self._ids(tuple(last_completion)) if results else ()
        for number, result in enumerate(results):
            call_id = ids[number] if number < len(ids) else ""
            name = _name(call_id) or "tool"
            parts += _message(_SYSTEM, name, f"## Return of {call_id}\n{result}")
        if user is not None:
            parts += _message(_USER, "user", user)
        return self._encode([*parts, *_header()])

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See `Renderer.expert`. Calls are numbered from 0 in each turn: what was numbered before
        is not known here.

        Raises ValueError for a text that would be read back as thinking."""
        if text.lstrip().startswith(_THINK[0]) and _THINK[0] not in self._has_tokens(_THINK):
            raise ValueError(f"the text must not start with {_THINK[0]}")
        parts: list[Part] = [text]
        if calls:
            parts.append(Marker(_SECTION_OPEN))
            for number, (name, arguments) in enumerate(calls):
                require_plain([name])
                parts += [Marker(_CALL_OPEN), f"functions.{name}:{number}", Marker(_ARGUMENTS)]
                parts += [write_json(dict(arguments)), Marker(_CALL_CLOSE)]
            parts.append(Marker(_SECTION_CLOSE))
        return self._encode([*parts, Marker(_END)])

    def _cutter(self) -> MarkCutter:
        tokens = self._has_tokens(self.meant)
        return MarkCutter(Marks(_SECTION_OPEN, _THINK, tokens, gap=0, before=0))

    def _read_ids(self, completion: tuple[int, ...]) -> tuple[str, ...]:
        """The ids of a turn's calls, as they were sampled."""
        reader = self.stream()
        for token in completion:
            reader.feed(token)
        reader.end()
        pieces = [piece for piece in reader.pieces if piece.kind == "call"]
        found = spans(pieces, _CALL_OPEN, _CALL_CLOSE)
        return tuple(text_of(split(span.inner, _ARGUMENTS)[0]).strip() for span in found)

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        for span in spans(pieces, _CALL_OPEN, _CALL_CLOSE, ends=[_SECTION_CLOSE]):
            head, body = split(span.inner, _ARGUMENTS)
            name = _name(text_of(head))
            error, arguments = span.error, {}
            if error is None and (body is None or not name):
                error = f"the call is not functions.NAME:NUMBER{_ARGUMENTS}ARGUMENTS"
            if error is None:
                arguments, error = read_arguments(text_of(body or ()))
            calls.append(ToolCall(name, arguments, span.raw, error))
        return tuple(calls)


def _name(call_id: str) -> str:
    """The tool's name in `functions.NAME:NUMBER`; "" when there is none."""
    name, colon, number = call_id.strip().rpartition(":")
    return name.removeprefix("functions.") if colon and number.isdecimal() else ""


def _message(role: str, name: str, body: str) -> list[Part]:
    return [Marker(role), name, Marker(_MIDDLE), body, Marker(_END)]


def _header() -> list[Part]:
    return [Marker(_ASSISTANT), "assistant", Marker(_MIDDLE)]
