"""Background jobs of a workspace: their output by offset, their end."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Coroutine
from typing import Any

from etude.sandbox.joined import JoinedProcess
from etude.sandbox.process import uninterrupted
from etude.sandbox.protocol import Job, WorkspaceError

_KILLED_EXIT = 137


class Tail:
    """The last `limit` bytes of a stream, addressed by their offset in the whole of it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._first = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._kept += data
        surplus = len(self._kept) - self._limit
        # Cut seldom, so that small pieces do not move all the rest each time.
        if surplus > self._limit:
            del self._kept[:surplus]
            self._first += surplus

    def since(self, offset: int, *, whole: bool) -> tuple[str, int]:
        """(text from `offset` on, the offset after it). Unless the stream is `whole`, a character
        whose last bytes are to come is left for the next call."""
        end = self._first + len(self._kept)
        begin = min(max(offset, end - self._limit, 0), end)
        data = bytes(self._kept[begin - self._first :])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final=whole)
        waiting = 0 if whole else len(decoder.getstate()[0])
        dropped = begin - max(offset, 0)
        note = f"[... {dropped} bytes dropped ...]\n" if dropped > 0 else ""
        return note + text, end - waiting


class BackgroundJob:
    """One job, followed until nothing of it runs any more. `watching` ends with the reason for
    which it must be killed."""

    def __init__(
        self,
        name: str,
        command: str,
        process: JoinedProcess,
        tail: Tail,
        watching: Coroutine[Any, Any, str],
        death_seconds: float,
    ) -> None:
        self._name = name
        self._command = command
        self._process = process
        self._tail = tail
        self._death_seconds = death_seconds
        self._begun = time.monotonic()
        self._seconds: float | None = None
        self._following = asyncio.ensure_future(self._follow(watching))

    async def _follow(self, watching: Coroutine[Any, Any, str]) -> None:
        watch = asyncio.ensure_future(watching)
        gone = asyncio.ensure_future(self._process.gone())
        note = ""
        try:
            await asyncio.wait((watch, gone), return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                note = watch.result()
        except WorkspaceError as error:
            note = str(error)
        finally:
            watch.cancel()
            gone.cancel()
            try:
                await self._process.end(self._death_seconds)
            finally:
                self._seconds = time.monotonic() - self._begun
                if note:
                    self._tail.feed(f"\n[{note}]\n".encode())

    def state(self) -> Job:
        """How it stands now."""
        over = self._seconds
        code = self._process.command_exit
        return Job(
            id=self._name,
            command=self._command,
            running=over is None,
            exit_code=None if over is None else _KILLED_EXIT if code is None else code,
            seconds=time.monotonic() - self._begun if over is None else over,
        )

    def output(self, since: int) -> tuple[str, int]:
        """See `Workspace.output`."""
        return self._tail.since(since, whole=self._seconds is not None)

    async def stop(self) -> None:
        """Kill it and wait until all of it is dead. Raises WorkspaceError."""
        self._process.kill()
        await uninterrupted(self._over())

    async def _over(self) -> None:
        await asyncio.wait((self._following,))
        self._following.result()
