"""Reading the answer of a chat service: server-sent events, joined to one reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

PieceKind = Literal["thinking", "text", "call"]
OnPiece = Callable[[PieceKind, str], None]

_LONGEST_LINE = 8 << 20
_LONGEST_REPLY = 64 << 20


class Malformed(Exception):
    """What the service sent is not what the protocol says; the text says how."""


class Refused(Exception):
    """The service sent an error in the middle of its answer."""

    def __init__(self, error: object) -> None:
        super().__init__("the service sent an error")
        self.error = error


@dataclass(frozen=True)
class ReplyCall:
    """A call as the service told it; `arguments` is text that ought to be a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ReplyUsage:
    """Tokens that the service counted; `cached` of the prompt were not read anew, `thinking` of
    the sampled ones were thought (None: the service does not say)."""

    prompt: int
    cached: int
    sampled: int
    thinking: int | None


@dataclass(frozen=True)
class Reply:
    """One answer. `finish` is the service's word for why it ended, None when it only said that it
    is done. `usage` is None when the service does not count."""

    thinking: str
    text: str
    calls: tuple[ReplyCall, ...]
    finish: str | None
    usage: ReplyUsage | None


class EventLines:
    """Server-sent events out of bytes that may be cut anywhere: gives the data of each event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[str]:
        """The events that these bytes complete. Raises Malformed when there is no end to a line
        or to the answer."""
        self._size += len(data)
        if self._size > _LONGEST_REPLY:
            raise Malformed(f"the answer is longer than {_LONGEST_REPLY >> 20} MiB")
        # A line may end in \r\n, \n or \r; a \r at the very end may still get its \n.
        lines = (self._rest + data).splitlines(keepends=True) if data else []
        self._rest = b"" if lines else self._rest
        if lines and not lines[-1].endswith(b"\n"):
            self._rest = lines.pop()
        if len(self._rest) > _LONGEST_LINE:
            raise Malformed(f"a line is longer than {_LONGEST_LINE >> 20} MiB")
        return [event for line in lines for event in self._line(line.rstrip(b"\r\n"))]

    def end(self) -> list[str]:
        """What is left when the connection ends: a last event without the empty line."""
        events = self._line(self._rest.rstrip(b"\r\n")) if self._rest else []
        self._rest = b""
        return events + self._line(b"")

    def _line(self, line: bytes) -> list[str]:
        if not line:
            data, self._data = self._data, []
            return [b"\n".join(data).decode("utf-8", "replace")] if data else []
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return []


@dataclass
class _OpenCall:
    index: int | None
    id: str
    name: str = ""
    arguments: str = ""


@dataclass
class ReplyBuilder:
    """Joins the chunks of one answer. `on_piece` is told what to show. `began` says whether
    anything of the answer itself has come."""

    on_piece: OnPiece | None = None
    began: bool = False
    done: bool = False
    _thinking: list[str] = field(default_factory=list[str])
    _text: list[str] = field(default_factory=list[str])
    _calls: list[_OpenCall] = field(default_factory=list[_OpenCall])
    _finish: str | None = None
    _usage: ReplyUsage | None = None

    def event(self, data: str) -> None:
        """Take the data of one server-sent event. Raises Malformed or Refused."""
        if self.done:
            return
        if data.strip() == "[DONE]":
            self.done = True
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"an event is no JSON: {_short(data)}") from error
        self.chunk(value)

    def chunk(self, value: object) -> None:
        """Take one chunk, or a whole answer of a service that does not stream."""
        chunk = _object(value, "an event")
        if chunk.get("error"):
            raise Refused(chunk["error"])
        usage = chunk.get("usage")
        if isinstance(usage, Mapping):
            self._usage = _usage(cast(Mapping[str, Any], usage)) or self._usage
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            if usage is None:
                raise Malformed(f"an event has no choices: {_short(json.dumps(chunk))}")
            return
        for item in cast(list[object], choices):
            choice = _object(item, "a choice")
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or choice.get("message") or {}
            self._delta(_object(delta, "a delta"))
            if isinstance(choice.get("finish_reason"), str):
                self._finish = choice["finish_reason"]

    def reply(self) -> Reply:
        """The answer. Raises Malformed when the service never said that it was over."""
        if self._finish is None and not self.done:
            raise Malformed("the connection ended in the middle of the answer")
        return Reply(
            thinking="".join(self._thinking),
            text="".join(self._text),
            calls=tuple(ReplyCall(call.name, call.arguments) for call in self._calls),
            finish=self._finish,
            usage=self._usage,
        )

    def _delta(self, delta: Mapping[str, Any]) -> None:
        thinking = delta.get("reasoning_content") or delta.get("reasoning")
        self._say("thinking", self._thinking, thinking)
        content = delta.get("content")
        if isinstance(content, list):
            self._parts(cast(list[object], content))
        else:
            self._say("text", self._text, content)
        self._say("text", self._text, delta.get("refusal"))
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            for call in cast(list[object], calls):
                self._call(_object(call, "a tool call"))

    def _parts(self, parts: list[object]) -> None:
        """Content as a list of parts, as some services give it."""
        for item in parts:
            part = _object(item, "a part of the content")
            if part.get("type") == "text":
                self._say("text", self._text, part.get("text"))
            elif isinstance(part.get("thinking"), list):
                for thought in cast(list[object], part["thinking"]):
                    text = _object(thought, "a thought").get("text")
                    self._say("thinking", self._thinking, text)

    def _say(self, kind: PieceKind, pieces: list[str], text: object) -> None:
        if not isinstance(text, str) or not text:
            return
        self.began = True
        text = encodable(text)
        pieces.append(text)
        if self.on_piece is not None:
            self.on_piece(kind, text)

    def _call(self, delta: Mapping[str, Any]) -> None:
        """A piece of a call. It belongs to the open call of its index, unless it brings another
        id: there are services that number all calls 0, and some that do not number them."""
        self.began = True
        index = delta.get("index") if isinstance(delta.get("index"), int) else None
        call_id = delta.get("id") if isinstance(delta.get("id"), str) else ""
        function = _object(delta.get("function") or {}, "a tool call")
        call = self._open_call(index, call_id or "")
        if isinstance(function.get("name"), str):
            name = encodable(function["name"])
            call.name += name
            self._show(name)
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if isinstance(arguments, str) and arguments:
            arguments = encodable(arguments)
            self._show(arguments if call.arguments else f" {arguments}")
            call.arguments += arguments

    def _open_call(self, index: int | None, call_id: str) -> _OpenCall:
        for call in reversed(self._calls):
            if index is not None and call.index != index:
                continue
            if not call_id or not call.id or call_id == call.id:
                call.id = call.id or call_id
                return call
            break
        if self._calls:
            self._show("\n")
        self._calls.append(_OpenCall(index, call_id))
        return self._calls[-1]

    def _show(self, text: str) -> None:
        if text and self.on_piece is not None:
            self.on_piece("call", text)


def encodable(text: str) -> str:
    """Without the lone surrogates that JSON can spell and that no text may hold."""
    return text.encode("utf-8", "replace").decode()


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Malformed(f"{what} is no JSON object: {_short(json.dumps(value, default=str))}")
    return cast(Mapping[str, Any], value)


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


def _usage(usage: Mapping[str, Any]) -> ReplyUsage | None:
    """The counts, or None when the two that matter are missing. Some services leave thinking out
    of `completion_tokens`; it is always in `total_tokens`, so the larger count is believed."""
    prompt, sampled = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None or sampled is None:
        return None
    total = _count(usage.get("total_tokens"))
    sampled = sampled if total is None else max(sampled, total - prompt)
    cached = _count(_details(usage, "prompt_tokens_details").get("cached_tokens"))
    if cached is None:
        cached = _count(usage.get("prompt_cache_hit_tokens"))
    thinking = _count(_details(usage, "completion_tokens_details").get("reasoning_tokens"))
    return ReplyUsage(
        prompt=prompt,
        cached=min(cached or 0, prompt),
        sampled=sampled,
        thinking=None if thinking is None else min(thinking, sampled),
    )


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = usage.get(name)
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
