"""The dialect of Llama 3.1 to 3.3: headers with a role, a call is a bare JSON object.

Example of an answer::

    {"name": "edit", "parameters": {"old": "GAP", "new": "seq[0]"}}<|eot_id|>

A bare object is a call only when it is the whole turn; after text, and where there are several,
calls stand behind `<|python_tag|>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from etude.models.dialects.base import Dialect, Marker, Part
from etude.models.dialects.json_calls import (
    DECODER,
    encodable,
    function_json,
    too_deep,
    unusable,
    write_json,
)
from etude.models.dialects.spans import text_of
from etude.models.renderer import ToolCall, ToolSpec
from etude.models.stream import Cutter, Piece

_BEGIN, _END, _MESSAGE_END = "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"
_HEADER_OPEN, _HEADER_CLOSE = "<|start_header_id|>", "<|end_header_id|>"
_CALLS = "<|python_tag|>"
_BARE_CALL = re.compile(r'\s*\{\s*"(?:name|type)"\s*:')
_UNDECIDED = re.compile(r'\s*(\{\s*("(n(a(m(e("\s*)?)?)?)?|t(y(p(e("\s*)?)?)?)?)?)?)?')
_LONGEST_START = 1000
"""Characters after which a turn that only might begin like a call is text."""
_HOW_TO_CALL = (
    "You have access to the following functions. To call a function, please respond with JSON for "
    'a function call.Respond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}.Do not use variables.\n\n"
)
_NO_DATE = "26 Jul 2024"
"""What the template says where no date is known; ours comes in a later message."""


class LlamaRenderer(Dialect):
    """`Renderer` of Llama 3.1 to 3.3. Tools stand in the system message, so that the head is the
    same in every segment; results are JSON strings, as in the template."""

    needs = (_BEGIN, _HEADER_OPEN, _HEADER_CLOSE, _END, _CALLS)
    hint = "use a Llama 3.1, 3.2 or 3.3 model"
    stops = (_END, _MESSAGE_END, "<|end_of_text|>")
    meant = (_CALLS,)

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant header."""
        head = "Environment: ipython\n" if tools else ""
        head += f"Cutting Knowledge Date: December 2023\nToday Date: {_NO_DATE}\n\n"
        if tools:
            head += _HOW_TO_CALL
            for tool in tools:
                head += json.dumps(function_json(tool), indent=4, ensure_ascii=False) + "\n\n"
        parts = [Marker(_BEGIN), *_message("system", head + system), *_message("user", user)]
        return self._encode([*parts, *_header("assistant")])

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """End of the sampled turn (if it was cut), a message for each result, the user's, and the
        next assistant header."""
        parts: list[Part] = [] if self._ended(last_completion) else [Marker(_END)]
        for result in results:
            parts += _message("ipython", write_json(result))
        if user is not None:
            parts += _message("user", user)
        return self._encode([*parts, *_header("assistant")])

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See `Renderer.expert`. Raises ValueError for a text that would be read as a call."""
        if _is_call(text):
            raise ValueError("the text would be read as a call")
        if any(not name for name, _ in calls):
            raise ValueError("a call needs a name")
        bodies = [write_json({"name": name, "parameters": dict(args)}) for name, args in calls]
        parts: list[Part] = [text]
        if len(bodies) > 1 or (text and bodies):
            parts.append(Marker(_CALLS))
        return self._encode([*parts, "; ".join(bodies), Marker(_END)])

    def _cutter(self) -> Cutter:
        return _BareCutter()

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        text = text_of(pieces)
        calls: list[ToolCall] = []
        position = 0
        while (position := _after(text, position, " \t\r\n;")) < len(text):
            if text.startswith(_CALLS, position):
                position += len(_CALLS)
            else:
                call, position = _one_call(text, position)
                calls.append(call)
        return tuple(calls)


class _BareCutter:
    """A turn that begins like a call is held back until it is known to be one."""

    def __init__(self) -> None:
        self._held = b""
        self._state = "start"

    def feed(self, data: bytes, marker: str | None) -> list[Piece]:
        """See `Cutter`."""
        if marker == _CALLS and self._state != "call":
            pieces = [Piece("text", self._held), Piece("call", data, marker=marker)]
            self._held, self._state = b"", "call"
            return pieces
        if self._state == "call":
            return [Piece("call", data, marker=marker)]
        self._held += data
        if self._state == "start":
            head = self._held.decode("utf-8", "replace")
            if _BARE_CALL.match(head) is not None:
                self._state = "bare"
            elif len(head) > _LONGEST_START or _UNDECIDED.fullmatch(head) is None:
                self._state = "text"
        return self._all("text") if self._state == "text" else []

    def end(self) -> list[Piece]:
        """See `Cutter`."""
        return self._all("call" if _is_call(self._held.decode("utf-8", "replace")) else "text")

    def _all(self, kind: Literal["text", "call"]) -> list[Piece]:
        held, self._held = self._held, b""
        return [Piece(kind, held)]


def _is_call(text: str) -> bool:
    """Whether a whole turn is a call or a call that was cut: an object with a name and arguments,
    or the beginning of one."""
    if _BARE_CALL.match(text) is None:
        return False
    try:
        value, end = DECODER.raw_decode(text, _after(text, 0, " \t\r\n"))
    except (ValueError, RecursionError):
        return True
    named = isinstance(value, dict) and "name" in value
    complete = "parameters" in value or "arguments" in value if named else False
    return complete and _may_follow(text, end)


def _after(text: str, position: int, blanks: str) -> int:
    """The first position from `position` on at which none of `blanks` stands."""
    while position < len(text) and text[position] in blanks:
        position += 1
    return position


def _may_follow(text: str, position: int) -> bool:
    """Whether a call may end at `position`: there the turn ends or another call is announced."""
    position = _after(text, position, " \t\r\n")
    return position == len(text) or text.startswith((";", _CALLS), position)


def _one_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call at `start` and the position after it; what cannot be read takes the rest."""
    try:
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, text[start:], f"the call is not valid JSON: {error}"), len(text)
    call = cast(dict[str, Any], value if isinstance(value, dict) else {})
    name = call.get("name")
    arguments = call.get("parameters", call.get("arguments"))
    error = unusable(value)
    if error is None and (not isinstance(name, str) or not name):
        error = 'the call is not an object with a "name"'
    elif error is None and not isinstance(arguments, dict):
        error = 'the call has no "parameters" that are a JSON object'
    elif error is None and not _may_follow(text, end):
        error, end = "there is text after the call", len(text)
    sound = isinstance(name, str) and not too_deep(name) and encodable(name)
    known = cast(dict[str, Any], arguments) if error is None else {}
    return ToolCall(str(name) if sound else "", known, text[start:end], error), end


def _message(role: str, body: str) -> list[Part]:
    return [*_header(role), body, Marker(_END)]


def _header(role: str) -> list[Part]:
    return [Marker(_HEADER_OPEN), role, Marker(_HEADER_CLOSE), "\n\n"]
