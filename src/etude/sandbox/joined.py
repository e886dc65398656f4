"""Commands that run inside a guest that stays (see `joiner.py` for how they get there)."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from etude.sandbox import joiner
from etude.sandbox.process import End, Input, Pipe, host_pid, readable, running, uninterrupted
from etude.sandbox.protocol import WorkspaceError


@dataclass(frozen=True)
class Request:
    """What the joiner reads: the command, its whole environment, what its mounts forbid
    (`guarded`: absolute paths that must be there and be read-only), and whether processes that it
    leaves behind go on."""

    argv: Sequence[str]
    env: dict[str, str]
    cwd: str
    readonly: bool
    guarded: Sequence[str]
    protected: Sequence[str]
    hidden: Sequence[str]
    keep: bool


class Joiner:
    """The program that brings porters into guests: one process, started when first needed and
    again should it have died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def _socket(self) -> socket.socket:
        if self._requests is not None and self._process is not None:
            if self._process.poll() is None:
                return self._requests
            self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", joiner.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._requests = ours
        return ours

    def start(self, requests: socket.socket) -> None:
        """Start a porter that listens there. Raises OSError."""
        socket.send_fds(self._socket(), [b"start"], [requests.fileno()])

    def close(self) -> None:
        """End the program; porters and commands go on. Idempotent."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Porter:
    """Who starts commands in a guest, and dies with it. Construct, `await ready(...)`, put it
    under the limits, which all commands inherit, and `await enter(...)`; in any case
    `await end(...)`. Bound to no event loop. Raises OSError."""

    def __init__(self, starter: Joiner) -> None:
        self._process: int | None = None
        self._pid = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                starter.start(theirs)
            except BaseException:
                ours.close()
                raise
        self._requests = ours

    async def ready(self, seconds: float) -> int:
        """Wait until it is there, still outside. Returns its host id. Raises WorkspaceError."""
        if not await readable(self._requests.fileno(), seconds):
            raise WorkspaceError(f"nobody could enter a guest in {seconds:.0f} s")
        message, descriptors, _, _ = socket.recv_fds(self._requests, 1 << 16, 1)
        if descriptors:
            if self._process is not None:
                os.close(self._process)
            self._process = descriptors[0]
            pid = host_pid(self._process)
            if pid is not None:
                self._pid = pid
                return pid
        why = marshal.loads(message)[1] if message and not descriptors else "it is gone"
        raise WorkspaceError(f"could not enter a guest: {why}")

    async def enter(self, entrance: tuple[int, int], seconds: float) -> None:
        """Enter the guest with these (see `joiner.ENTER_DESCRIPTORS`). Raises WorkspaceError."""
        try:
            socket.send_fds(self._requests, [b"enter"], list(entrance))
        except OSError as error:
            raise WorkspaceError(f"could not enter a guest: {error}") from error
        await self.ready(seconds)

    @property
    def pid(self) -> int:
        """Host id; the commands that it started descend from it."""
        return self._pid

    def alive(self) -> bool:
        """Whether it can start commands."""
        return self._process is not None and running(self._process)

    def send(self, descriptors: Sequence[int]) -> None:
        """Start a command with these (see `joiner.COMMAND_DESCRIPTORS`). Raises OSError."""
        socket.send_fds(self._requests, [b"run"], list(descriptors))

    def close(self) -> None:
        """Let it end, unless it does something just now. Idempotent."""
        self._requests.close()

    async def end(self, seconds: float) -> None:
        """Kill it and wait until it is dead and collected: the guest's process 1 cannot end
        before. Raises WorkspaceError when it outlives `seconds`."""
        self.close()
        if self._process is None:
            return
        process, self._process = End(self._process), None
        process.kill()
        try:
            async with asyncio.timeout(seconds):
                await process.over.wait()
        except TimeoutError:
            raise WorkspaceError(f"a killed guest was not gone after {seconds:.0f} s") from None
        finally:
            process.reap()  # It fell to us if the joiner died before it.
            process.close()


class JoinedProcess:
    """A command in a guest, from start to death, under the limits of its porter. Used like
    `GuestProcess`, though it begins at once: construct, `await finished(...)`, and in any case
    `await end()`.

    With one output for both streams, `stderr` is None. Raises OSError when it cannot be started.
    """

    def __init__(
        self,
        porter: Porter,
        request: Request,
        *,
        stdout: Callable[[bytes], None],
        stderr: Callable[[bytes], None] | None,
    ) -> None:
        self._ended = False
        self._left = False
        self._exit: int | None = None
        self._failure = ""
        self._process: End | None = None
        self._told, self._over = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            pipes: list[tuple[int, int]] = []
            for _ in range(2 if stderr is None else 3):
                read, write = os.pipe()
                pipes.append((read, write))
                mine, other = (write, read) if len(pipes) == 1 else (read, write)
                ours.callback(os.close, mine)
                theirs.callback(os.close, other)
            self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(self._control.close)
            theirs.callback(control.close)
            wanted = os.memfd_create("etude-request")
            theirs.callback(os.close, wanted)
            _write(wanted, marshal.dumps(asdict(request)))
            streams = (pipes[0][0], pipes[1][1], pipes[-1][1])
            porter.send((*streams, control.fileno(), wanted))
            ours.pop_all()
        self.stdin = Input(pipes[0][1])
        self.stdout = Pipe(pipes[1][0], stdout)
        self.stderr = None if stderr is None else Pipe(pipes[2][0], stderr)
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._heard)

    def _heard(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            message, descriptors = b"", []
        if descriptors:
            self._process = End(descriptors[0])
        elif message:
            word, detail = cast("tuple[str, object]", marshal.loads(message))
            if word == joiner.FAILED:
                self._failure = str(detail)
            else:
                self._exit, self._left = cast("int", detail), word == joiner.LEFT
        else:
            self._loop.remove_reader(self._control.fileno())
        if not message or not descriptors:
            self._over.set()
        self._told.set()

    async def ready(self, seconds: float) -> int | None:
        """Wait until it is there. Returns None, since there is nothing to limit. Raises
        WorkspaceError at the deadline."""
        try:
            async with asyncio.timeout(seconds):  # `wait_for` may swallow a cancellation.
                await self._told.wait()
        except TimeoutError:
            raise WorkspaceError(f"no command could be started in {seconds:.0f} s") from None
        return None

    def release(self) -> None:
        """It began by itself."""

    async def finished(self, seconds: float | None) -> bool:
        """Wait for the command's end. False when `seconds` passed before."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    @property
    def command_exit(self) -> int | None:
        """The command's exit status, 128 + n after signal n; None if it never ran to an end."""
        return self._exit

    @property
    def left(self) -> bool:
        """Whether the command ended and processes of it go on."""
        return self._left

    @property
    def joined(self) -> bool:
        """Whether its process 1 ever stood in the guest."""
        return self._process is not None

    @property
    def failure(self) -> str:
        """What the joiner said when it failed."""
        return self._failure

    async def gone(self) -> None:
        """Wait until nothing of it runs any more."""
        if self._process is not None:
            await self._process.over.wait()

    def kill(self) -> None:
        """Kill everything, now, without waiting."""
        if self._process is not None:
            self._process.kill()

    async def end(self, seconds: float) -> None:
        """Kill everything and wait until it is dead and its output is read. Idempotent; finishes
        its work also when cancelled. Raises WorkspaceError when something outlives `seconds`."""
        if not self._ended:
            self._ended = True
            await uninterrupted(self._finish(seconds))

    async def _finish(self, seconds: float) -> None:
        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe is not None]
        try:
            async with asyncio.timeout(seconds):
                # Before its process 1 is known there is nothing to kill; it comes, or ends.
                await self._told.wait()
                self.kill()
                await self.gone()
                for pipe in pipes:
                    pipe.resume()
                    await pipe.ended.wait()
        except TimeoutError:
            raise WorkspaceError(f"a killed command was not gone after {seconds:.0f} s") from None
        finally:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self.stdin.close()
            for pipe in pipes:
                pipe.close()
            if self._process is not None:
                self._process.close()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
