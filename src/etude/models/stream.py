"""A turn while it is being sampled, cut into thinking, text and calls for a screen.

What counts is `Renderer.parse` of the whole turn; this only shows it early. A piece is given out
once it can no longer become a marker.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["thinking", "text", "call"]


@dataclass(frozen=True)
class Delta:
    """The next piece of a turn."""

    kind: Kind
    text: str


class MarkerStream:
    """Cuts a stream of tokens at a dialect's markers: `think` (opening, closing) at the start of
    the turn, `call` where the calls begin. `token_bytes` gives a token's bytes, b"" for one that
    is not shown."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, think: tuple[str, str] | None, call: str
    ) -> None:
        self._token_bytes = token_bytes
        self._think = think
        self._call = call
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._kind: Kind = "text"
        self._started = False

    def feed(self, token: int) -> list[Delta]:
        """The pieces that this token settles."""
        self._held += self._decoder.decode(self._token_bytes(token))
        return self._settle(final=False)

    def end(self) -> list[Delta]:
        """What was still held back."""
        self._held += self._decoder.decode(b"", final=True)
        return self._settle(final=True)

    def _settle(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._held:
            if not self._started and not self._may_open(final):
                break
            marker, following = self._next_marker()
            at = self._held.find(marker) if marker else -1
            if at >= 0 and marker:
                self._give(deltas, self._held[:at])
                self._held = self._held[at + len(marker) :]
                self._kind = following
                continue
            kept = 0 if final or not marker else _overlap(self._held, marker)
            self._give(deltas, self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            break
        return deltas

    def _may_open(self, final: bool) -> bool:
        """Whether the turn's beginning is settled; a leading opening of thinking is taken off."""
        if self._think is None:
            self._started = True
            return True
        opening = self._think[0]
        head = self._held.lstrip()
        if head.startswith(opening):
            self._held = head[len(opening) :]
            self._kind, self._started = "thinking", True
            return bool(self._held)
        if not final and opening.startswith(head):
            return False
        self._started = True
        return True

    def _next_marker(self) -> tuple[str, Kind]:
        if self._kind == "thinking" and self._think is not None:
            return self._think[1], "text"
        if self._kind == "text":
            return self._call, "call"
        return "", "call"

    def _give(self, deltas: list[Delta], text: str) -> None:
        if text:
            deltas.append(Delta(self._kind, text))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
