"""A long-lived process in a throw-away copy of an image, spoken to over its pipes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from etude.sandbox.launcher import GUEST_OWN, Bounds, Command, Launcher, Tree
from etude.sandbox.layers import delete_tree
from etude.sandbox.limits import Group
from etude.sandbox.process import Capture, GuestProcess, uninterrupted
from etude.sandbox.protocol import Image, Limits, WorkspaceError

_LINE_BYTES = 8 << 20
_STDERR_BYTES = 64 << 10


class _Lines:
    """Output cut into lines, at most about `_LINE_BYTES` of it waiting to be read."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data
        self._changed.set()

    @property
    def full(self) -> bool:
        return len(self._buffer) >= _LINE_BYTES

    def end(self) -> None:
        self._changed.set()

    def take(self) -> bytes | None:
        """The next whole line with its newline, None if there is none yet."""
        at = self._buffer.find(b"\n", self._searched)
        if at < 0:
            self._searched = len(self._buffer)
            self._changed.clear()
            return None
        return self._cut(at + 1)

    def rest(self) -> bytes:
        return self._cut(len(self._buffer))

    def _cut(self, count: int) -> bytes:
        line = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._searched = 0
        return line

    async def changed(self) -> None:
        await self._changed.wait()


class Guest:
    """A running process that is used once and killed. Made by `BubblewrapSandbox.spawn`."""

    def __init__(
        self, launcher: Launcher, layer: Path, limits: Limits, group: Group | None
    ) -> None:
        self._launcher = launcher
        self._layer = layer
        self._limits = limits
        self._group = group
        self._lines = _Lines()
        self._stderr = Capture(_STDERR_BYTES)
        self._process: GuestProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._note = ""
        self._killed = False

    async def start(self, image: Image, command: Command) -> None:
        """Start the process. Raises WorkspaceError; the caller then kills."""
        self._process = self._launcher.construct(
            image, self._layer, command, self._feed, self._stderr.feed
        )
        await self._launcher.begin(self._process, *self._bounds(self._process))
        self._tasks = [
            asyncio.ensure_future(self._watch(self._process)),
            asyncio.ensure_future(self._end_of_output(self._process)),
        ]

    def _bounds(self, process: GuestProcess) -> tuple[Bounds, Tree]:
        bounds = Bounds(self._layer, self._limits, self._group)
        return bounds, Tree((process.monitor_pid,), GUEST_OWN)

    def _feed(self, data: bytes) -> None:
        if self._killed:
            return  # Read only to reach the end of the pipe.
        self._lines.feed(data)
        if self._lines.full and self._process is not None:
            self._process.stdout.pause()

    async def _end_of_output(self, process: GuestProcess) -> None:
        await process.stdout.ended.wait()
        self._lines.end()

    async def _watch(self, process: GuestProcess) -> None:
        try:
            self._note = await self._launcher.watch(*self._bounds(process), self._limits.disk_bytes)
        except WorkspaceError as error:
            self._note = str(error)
        process.kill()

    def _running(self) -> GuestProcess:
        if self._process is None or self._killed:
            raise WorkspaceError("the guest was killed")
        return self._process

    async def write(self, data: bytes) -> None:
        """Hand over all of `data` on standard input. Raises WorkspaceError when the process
        reads no more."""
        try:
            await self._running().stdin.write(data)
        except BrokenPipeError as error:
            raise WorkspaceError(f"the guest ended early{self._why()}") from error

    def end_input(self) -> None:
        """Close standard input: the process reads its end."""
        self._running().stdin.close()

    async def readline(self, timeout: float) -> bytes:
        """The next line of standard output with its newline; what is left, or b"", at the end.

        Raises TimeoutError after `timeout` seconds and WorkspaceError when the guest was killed,
        for a limit too, or writes a line of more than 8 MB.
        """
        process = self._running()
        async with asyncio.timeout(timeout):
            while True:
                line = self._lines.take()
                if line is not None:
                    process.stdout.resume()
                    return line
                if self._killed or self._note:
                    raise WorkspaceError(f"the guest was killed{self._why()}")
                if process.stdout.ended.is_set():
                    return self._lines.rest()
                if self._lines.full:
                    raise WorkspaceError("the guest wrote a line of more than 8 MB")
                await self._lines.changed()

    def _why(self) -> str:
        return f": {self._note}" if self._note else ""

    def stderr_tail(self) -> str:
        """Standard error so far: its first and last 32 KB."""
        return self._stderr.text()

    @property
    def exit_code(self) -> int | None:
        """The command's exit status once it ended by itself, else None."""
        return None if self._process is None else self._process.command_exit

    async def kill(self) -> None:
        """Kill everything of it and delete what it wrote. Idempotent."""
        if not self._killed:
            self._killed = True
            await uninterrupted(self._delete())

    async def _delete(self) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            if self._process is not None:
                await self._process.end(self._launcher.settings.death_seconds)
        finally:
            self._lines.end()
            if self._group is not None:
                await asyncio.to_thread(self._group.remove)
            await asyncio.to_thread(delete_tree, self._layer)
