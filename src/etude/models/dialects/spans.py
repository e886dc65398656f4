"""Finding calls among the pieces of a turn, in dialects whose markers are tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from etude.models.stream import Piece


@dataclass(frozen=True)
class Span:
    """What stands between two markers. `raw` includes them and whatever follows up to the next
    opening. `error` says what is wrong around it."""

    inner: tuple[Piece, ...]
    raw: str
    error: str | None


def text_of(pieces: Sequence[Piece]) -> str:
    """The pieces as text, markers spelled out."""
    return b"".join(piece.data for piece in pieces).decode("utf-8", "replace")


def split(pieces: Sequence[Piece], marker: str) -> tuple[list[Piece], list[Piece] | None]:
    """What stands before the first `marker`, and after it (None when there is none)."""
    for index, piece in enumerate(pieces):
        if piece.marker == marker:
            return list(pieces[:index]), list(pieces[index + 1 :])
    return list(pieces), None


class Closer(Protocol):
    """Says, piece by piece, whether a closing marker would end a span here."""

    def feed(self, piece: Piece) -> None: ...
    def ready(self) -> bool: ...


def spans(
    pieces: Sequence[Piece],
    opening: str,
    closing: str,
    *,
    ends: Sequence[str] = (),
    closer: Callable[[], Closer] | None = None,
) -> list[Span]:
    """The spans from `opening` to `closing`. Between and after them only blanks and the markers
    `ends` may stand. A `closing` for which the closer is not ready does not count, unless no other
    one comes before the next opening."""
    found: list[Span] = []
    starts = [i for i, piece in enumerate(pieces) if piece.marker == opening]
    position = 0
    for start in starts:
        if start < position:
            continue
        end = _end(pieces, start + 1, opening, closing, closer)
        next_start = bisect_left(starts, end)
        following = starts[next_start] if next_start < len(starts) else len(pieces)
        closed = end - 1 > start and pieces[end - 1].marker == closing
        inner = tuple(pieces[start + 1 : end - 1 if closed else end])
        rest = [piece for piece in pieces[end:following] if piece.marker not in ends]
        error = None if closed else f"the call is not closed by {closing}"
        if error is None and text_of(rest).strip():
            error = "there is text after the call"
        found.append(Span(inner, text_of(pieces[start:following]), error))
        position = end
    return found


def _end(
    pieces: Sequence[Piece],
    start: int,
    opening: str,
    closing: str,
    closer: Callable[[], Closer] | None,
) -> int:
    """The index after the closing marker of the span that begins at `start`; where the next one
    opens, or the end, when it is not closed."""
    judge = None if closer is None else closer()
    first: int | None = None
    for index in range(start, len(pieces)):
        marker = pieces[index].marker
        if marker == closing:
            if judge is None or judge.ready():
                return index + 1
            first = first or index + 1
        elif marker == opening and (first is not None or judge is None):
            return first or index
        if judge is not None:
            judge.feed(pieces[index])
    return first or len(pieces)
