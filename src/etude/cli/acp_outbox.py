"""Updates on their way to the editor: in order, words that follow one another joined."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from etude.cli.acp_updates import Update, text_chunk

_FLUSH_SECONDS = 30.0


class Outbox:
    """`put` never waits; one task sends, once the box is open. When the editor is gone what waits
    is dropped."""

    def __init__(self, send: Callable[[Update], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: deque[Update] = deque()
        self._work: asyncio.Task[None] | None = None
        self._open = self._gone = False

    def open(self) -> None:
        """Begin to send."""
        self._open = True
        if self._waiting:
            self._work = asyncio.create_task(self._pump())

    def put(self, update: Update) -> None:
        """Send an update after all earlier ones."""
        if self._gone:
            return
        self._waiting.append(update)
        if self._open and (self._work is None or self._work.done()):
            self._work = asyncio.create_task(self._pump())

    def put_text(self, kind: str, text: str) -> None:
        """Words of the model. A slow editor gets fewer, longer pieces."""
        if self._waiting and self._waiting[-1]["sessionUpdate"] == kind:
            last = self._waiting.pop()
            text = last["content"]["text"] + text
        self.put(text_chunk(kind, text))

    async def flush(self) -> None:
        """Wait until everything so far was sent; not longer than half a minute."""
        if self._work is not None:
            await asyncio.wait([self._work], timeout=_FLUSH_SECONDS)

    async def close(self) -> None:
        """Drop what waits."""
        self._gone = True
        self._waiting.clear()
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    async def _pump(self) -> None:
        with contextlib.suppress(ConnectionError):
            while self._waiting:
                await self._send(self._waiting.popleft())
            return
        self._gone = True
        self._waiting.clear()
