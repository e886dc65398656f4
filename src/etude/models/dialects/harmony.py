"""The dialect of gpt-oss (harmony): a turn is a row of messages, each on a channel.

Example of an answer (all on one line)::

    <|channel|>analysis<|message|>The first element is seq[0].<|end|><|start|>assistant
    <|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"old": "GAP"}<|call|>

Channel `analysis` is thinking, a message with a recipient is a call, the others are text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from tokenizers import Tokenizer

from etude.models.dialects.base import Dialect, Marker, Part
from etude.models.dialects.json_calls import read_arguments, require_plain, write_json
from etude.models.dialects.spans import text_of
from etude.models.dialects.typescript import namespace
from etude.models.renderer import ToolCall, ToolSpec
from etude.models.stream import Cutter, Kind, Piece

_START, _MESSAGE, _CHANNEL, _CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")
_IDENTITY = (
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
)


class HarmonyRenderer(Dialect):
    """`Renderer` of gpt-oss. Its template forgets earlier analysis and ends an answer of the past
    by `<|end|>`; here analysis and `<|return|>` stay, as they were sampled.

    A model makes one call per turn; several calls of an expert are messages of one turn. The date
    is told by a later message, so that the head stays the same.
    """

    needs = (_START, _MESSAGE, _CHANNEL, _CONSTRAIN, _END, _CALL, _RETURN)
    hint = "use a gpt-oss model"
    stops = (_RETURN, _CALL, "<|endoftext|>")
    meant = (_START, _MESSAGE, _CHANNEL, _CONSTRAIN, _END, _CALL, _RETURN)

    def __init__(
        self, tokenizer: Tokenizer, reasoning: Literal["low", "medium", "high"] = "medium"
    ) -> None:
        super().__init__(tokenizer)
        self._reasoning = reasoning
        # A session asks several times what follows the same turn.
        self._names = lru_cache(maxsize=64)(self._read_names)

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including `<|start|>assistant`."""
        head = f"{_IDENTITY}\nReasoning: {self._reasoning}\n\n# Valid channels: analysis, "
        head += "commentary, final. Channel must be included for every message."
        if tools:
            head += "\nCalls to these tools must go to the commentary channel: 'functions'."
        parts = _message("system", head)
        sections = [f"# Instructions\n\n{system}"] if system else []
        sections += [f"# Tools\n\n{namespace('functions', tools)}"] if tools else []
        if sections:
            parts += _message("developer", "\n\n".join(sections))
        return self._encode([*parts, *_message("user", user), Marker(_START), "assistant"])

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """End of the sampled message (if it was cut), a message of each called function, the
        user's, and the next `<|start|>assistant`."""
        parts = self._rest(last_completion)
        names = self._names(tuple(last_completion)) if results else ()
        for number, result in enumerate(results):
            name = names[number] if number < len(names) else ""
            parts += [Marker(_START), f"functions.{name or 'unknown'} to=assistant"]
            parts += [Marker(_CHANNEL), "commentary", Marker(_MESSAGE), result, Marker(_END)]
        if user is not None:
            parts += _message("user", user)
        return self._encode([*parts, Marker(_START), "assistant"])

    def _read_names(self, completion: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(call.name for call in self.parse(completion).calls)

    def _rest(self, completion: Sequence[int]) -> list[Part]:
        """What is missing to the end of a sampled message."""
        if self._ended(completion):
            return []
        state = _START
        for token in completion:
            marker = self._markers.get(token)
            state = marker if marker in (_START, _MESSAGE, _END) else state
        if state == _END:
            return []
        return [Marker(_END)] if state == _MESSAGE else [Marker(_MESSAGE), Marker(_END)]

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See `Renderer.expert`; without analysis. Text before calls is a preamble."""
        if not calls:
            answer = [Marker(_CHANNEL), "final", Marker(_MESSAGE), text, Marker(_RETURN)]
            return self._encode(answer)
        messages: list[list[Part]] = []
        if text:
            messages.append([Marker(_CHANNEL), "commentary", Marker(_MESSAGE), text])
        for name, arguments in calls:
            require_plain([name])
            head = [Marker(_CHANNEL), f"commentary to=functions.{name} ", Marker(_CONSTRAIN)]
            messages.append([*head, "json", Marker(_MESSAGE), write_json(dict(arguments))])
        parts = list(messages[0])
        for message in messages[1:]:
            parts += [Marker(_END), Marker(_START), "assistant", *message]
        return self._encode([*parts, Marker(_CALL)])

    def _cutter(self) -> Cutter:
        return _MessageCutter()

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        starts = [i for i, piece in enumerate(pieces) if piece.marker == _MESSAGE]
        calls: list[ToolCall] = []
        for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True):
            recipient = _RECIPIENT.search(text_of(pieces[start : start + 1]))
            name = "" if recipient is None else recipient[1].removeprefix("functions.")
            body = [piece for piece in pieces[start + 1 : end] if piece.marker is None]
            arguments, error = read_arguments(text_of(body))
            calls.append(ToolCall(name, arguments, text_of(pieces[start:end]), error))
        return tuple(calls)


class _MessageCutter:
    """A message's header decides what the message is; a turn begins in the header that the prompt
    opened. A whole header is one piece, whose marker is `<|message|>`."""

    def __init__(self) -> None:
        self._header: bytearray | None = bytearray()
        self._is_header = False
        """Whether the header began as one."""
        self._kind: Kind = "text"

    def feed(self, data: bytes, marker: str | None) -> list[Piece]:
        """See `Cutter`."""
        if self._header is not None:
            if not self._header:
                self._is_header = marker in (_START, _CHANNEL)
            self._header += data
            return [self._settled()] if marker == _MESSAGE else []
        if marker == _START:
            self._header, self._is_header = bytearray(data), True
            return []
        if marker in (_END, _CALL, _RETURN):
            self._header = bytearray()
            return [Piece(self._kind, data, self._kind == "call", marker)]
        return [Piece(self._kind, data)]

    def _settled(self) -> Piece:
        header, self._header = bytes(self._header or b""), None
        text = header.decode("utf-8", "replace")
        if _RECIPIENT.search(text) is not None:
            self._kind = "call"
        else:
            self._kind = "thinking" if _ANALYSIS.search(text) is not None else "text"
        return Piece(self._kind, header, self._kind == "call", _MESSAGE)

    def end(self) -> list[Piece]:
        """See `Cutter`. What never became a message is shown as text, unless it began as the
        header of one."""
        return [Piece("text", bytes(self._header or b""), not self._is_header)]


def _message(role: str, body: str) -> list[Part]:
    return [Marker(_START), role, Marker(_MESSAGE), body, Marker(_END)]
