"""A turn, taken apart while it is sampled: thinking, text, calls, piece by piece.

A *cutter* knows a dialect's markers and cuts the bytes of a turn into pieces, in order and without
a gap. `TurnReader` feeds it tokens. `Renderer.stream` shows what a reader gives at once,
`Renderer.parse` what it has given in the end, so the two cannot disagree.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kind = Literal["thinking", "text", "call"]


@dataclass(frozen=True)
class Delta:
    """The next piece of a turn as a person may see it."""

    kind: Kind
    text: str


class Piece(NamedTuple):
    """The next bytes of a turn. Markers and the line breaks around them belong to a kind but are
    not `shown`; in calls all is shown. `marker` is the marker that the bytes are, when a token of
    its own spelled it."""

    kind: Kind
    data: bytes
    shown: bool = True
    marker: str | None = None


class Cutter(Protocol):
    """Cuts one turn."""

    def feed(self, data: bytes, marker: str | None) -> list[Piece]:
        """The pieces that these bytes settle; `marker` as in `Piece`."""
        ...

    def end(self) -> list[Piece]:
        """What was still held back."""
        ...


class TurnReader:
    """Reads a turn token by token through a cutter. `markers` are the ids that the dialect gives
    a meaning. A stop id counts as the end of the turn only when nothing follows."""

    def __init__(
        self,
        cutter: Cutter,
        token_bytes: Callable[[int], bytes],
        markers: Mapping[int, str],
        stop_ids: Sequence[int],
    ) -> None:
        self.pieces: list[Piece] = []
        self._cutter = cutter
        self._token_bytes = token_bytes
        self._markers = markers
        self._stop_ids = frozenset(stop_ids)
        self._starts: list[int] = []
        self._size = 0
        self._stop: int | None = None
        self._kind: Kind | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> list[Delta]:
        """The deltas that this token settles."""
        deltas: list[Delta] = []
        if self._stop is not None:
            stop, self._stop = self._stop, None
            self._take(stop, deltas)
        if token in self._stop_ids:
            self._stop = token
        else:
            self._take(token, deltas)
        return _joined(deltas)

    def end(self) -> list[Delta]:
        """What was still held back. The turn is over."""
        deltas: list[Delta] = []
        self._show(self._cutter.end(), deltas)
        self._flush(deltas)
        return _joined(deltas)

    def counts(self) -> dict[Kind, int]:
        """Tokens by kind, after `end`: each counts for the piece in which its first byte stands,
        the stop id for what it ended."""
        counts: dict[Kind, int] = {"thinking": 0, "text": 0, "call": 0}
        piece = 0
        reach = len(self.pieces[0].data) if self.pieces else 0
        for start in self._starts:
            while reach <= start and piece + 1 < len(self.pieces):
                piece += 1
                reach += len(self.pieces[piece].data)
            counts[self.pieces[piece].kind if self.pieces else "text"] += 1
        if self._stop is not None:
            counts[self._last_kind()] += 1
        return counts

    def _last_kind(self) -> Kind:
        if any(piece.kind == "call" for piece in self.pieces):
            return "call"
        if any(piece.kind == "text" and piece.shown for piece in self.pieces):
            return "text"
        return "thinking" if self.pieces else "text"

    def _take(self, token: int, deltas: list[Delta]) -> None:
        data = self._token_bytes(token)
        self._starts.append(self._size)
        self._size += len(data)
        self._show(self._cutter.feed(data, self._markers.get(token)), deltas)

    def _show(self, pieces: Sequence[Piece], deltas: list[Delta]) -> None:
        for piece in pieces:
            if not piece.data:
                continue
            self.pieces.append(piece)
            if not piece.shown or piece.kind != self._kind:
                self._flush(deltas)
            if piece.shown:
                self._kind = piece.kind
                deltas.append(Delta(piece.kind, self._decoder.decode(piece.data)))

    def _flush(self, deltas: list[Delta]) -> None:
        """End a run of one kind; half a character at its end becomes U+FFFD."""
        if self._kind is not None:
            deltas.append(Delta(self._kind, self._decoder.decode(b"", final=True)))
        self._kind = None


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    joined: list[Delta] = []
    for delta in deltas:
        if joined and joined[-1].kind == delta.kind:
            joined[-1] = Delta(delta.kind, joined[-1].text + delta.text)
        elif delta.text:
            joined.append(delta)
    return joined


@dataclass(frozen=True)
class Marks:
    """Where a dialect's turn is cut: thinking between `think` at the beginning of the turn, then
    text, then calls from `call` on. A marker in `tokens` has an id of its own and is nothing but
    text when spelled in letters; the others are found in the text.

    Up to `gap` line breaks after the thinking belong to it (None: all of them), up to `before`
    ones before the first call belong to no text."""

    call: str
    think: tuple[str, str] | None = None
    tokens: frozenset[str] = frozenset()
    gap: int | None = None
    before: int = 1
    opened: bool = False
    """The prompt has opened the thinking already."""


class MarkCutter:
    """The cutter of every dialect that has these marks. Thinking that is never closed takes the
    whole turn."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._held = bytearray()
        self._state = "thinking" if marks.opened else "start"
        if marks.think is None:
            self._state = "text"

    def feed(self, data: bytes, marker: str | None) -> list[Piece]:
        """See `Cutter`."""
        pieces: list[Piece] = []
        if marker is not None and self._meant(marker):
            if self._state == "gap":
                self._end_gap(pieces)
            self._settle(pieces, final=True, until_marker=marker)
            pieces.append(self._marker(data, marker))
        elif self._state == "call":
            pieces.append(Piece("call", data, marker=marker))
        else:
            self._held += data
            self._settle(pieces)
        return pieces

    def end(self) -> list[Piece]:
        """See `Cutter`."""
        pieces: list[Piece] = []
        self._settle(pieces, final=True)
        return pieces

    def _meant(self, marker: str) -> bool:
        """Whether a marker token has a meaning where it stands."""
        think = self._marks.think
        if marker not in self._marks.tokens:
            return False
        if self._state == "start" and think is not None and marker == think[0]:
            return not self._held.strip()
        if self._state == "thinking":
            return think is not None and marker == think[1]
        return self._state != "call" and marker == self._marks.call

    def _marker(self, data: bytes, marker: str) -> Piece:
        if marker == self._marks.call:
            self._state = "call"
            return Piece("call", data, marker=marker)
        self._state = "thinking" if self._state == "start" else "gap"
        return Piece("thinking", data, shown=False, marker=marker)

    def _settle(
        self, pieces: list[Piece], *, final: bool = False, until_marker: str | None = None
    ) -> None:
        """Cut what is held as far as it is settled; all of it when `final`."""
        if self._state == "start":
            self._start(pieces, final, until_marker)
        if self._state == "thinking":
            self._thinking(pieces, final)
        if self._state == "gap":
            self._gap(pieces, final)
        if self._state == "text":
            self._text(pieces, final, until_marker)
        if self._state == "call":
            self._give(pieces, "call", len(self._held))

    def _start(self, pieces: list[Piece], final: bool, until_marker: str | None) -> None:
        assert self._marks.think is not None
        opening = self._marks.think[0]
        if until_marker == opening:
            self._give(pieces, "thinking", len(self._held), shown=False)
            return
        head = bytes(self._held.lstrip())
        if opening in self._marks.tokens:
            if head or final:
                self._state = "text"
        elif head.startswith(opening.encode()):
            blank = len(self._held) - len(head)
            self._give(pieces, "thinking", blank + len(opening.encode()), shown=False)
            self._state = "thinking"
        elif final or not opening.encode().startswith(head):
            self._state = "text"

    def _thinking(self, pieces: list[Piece], final: bool) -> None:
        assert self._marks.think is not None
        closing = self._marks.think[1]
        at, kept = self._find(closing)
        if at is not None:
            self._give(pieces, "thinking", at)
            self._give(pieces, "thinking", len(closing.encode()), shown=False)
            self._state = "gap"
        else:
            self._give(pieces, "thinking", len(self._held) - (0 if final else kept))

    def _gap(self, pieces: list[Piece], final: bool) -> None:
        """The line breaks after the thinking."""
        size = self._gap_size()
        if final or size < len(self._held) or size == self._marks.gap:
            self._end_gap(pieces)

    def _end_gap(self, pieces: list[Piece]) -> None:
        self._give(pieces, "thinking", self._gap_size(), shown=False)
        self._state = "text"

    def _gap_size(self) -> int:
        if self._marks.gap is None:
            return len(self._held) - len(self._held.lstrip(b"\r\n"))
        breaks = len(self._held) - len(self._held.lstrip(b"\n"))
        return min(breaks, self._marks.gap)

    def _text(self, pieces: list[Piece], final: bool, until_marker: str | None) -> None:
        at, kept = self._find(self._marks.call)
        if at is not None or until_marker == self._marks.call:
            end = len(self._held) if at is None else at
            said = end - self._breaks(end)
            self._give(pieces, "text", said)
            self._give(pieces, "text", end - said, shown=False)
            if at is not None:
                self._state = "call"
            return
        end = len(self._held) - kept
        self._give(pieces, "text", len(self._held) if final else end - self._breaks(end))

    def _breaks(self, end: int) -> int:
        """Line breaks just before `end` that would belong to no text if a call came."""
        count = 0
        while count < self._marks.before and self._held.endswith(b"\n", 0, end - count):
            count += 1
        return count

    def _find(self, marker: str) -> tuple[int | None, int]:
        """Where a marker begins in the held text, or how many bytes at its end may begin one."""
        if marker in self._marks.tokens:
            return None, 0
        wanted = marker.encode()
        at = self._held.find(wanted)
        if at >= 0:
            return at, 0
        for length in range(min(len(self._held), len(wanted) - 1), 0, -1):
            if self._held.endswith(wanted[:length]):
                return None, length
        return None, 0

    def _give(self, pieces: list[Piece], kind: Kind, size: int, *, shown: bool = True) -> None:
        if size > 0:
            pieces.append(Piece(kind, bytes(self._held[:size]), shown))
            del self._held[:size]
