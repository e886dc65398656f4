"""One running guest: bubblewrap outside, its init as process 1 of an own PID namespace, and the
command below that. Killing the init kills everything, whatever the command did with its children.

Pipes and process ends are watched by the event loop itself. A guest dies with the thread that
started it, so the loop must run for as long as its guests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from etude.sandbox.protocol import WorkspaceError

T = TypeVar("T")
_CHUNK = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


class Capture:
    """Keeps the first and the last half of `limit` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_bytes += len(data)
            while self._tail_bytes - len(self._tail[0]) >= self._half:
                self._tail_bytes -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        """Whether bytes are missing in the middle."""
        return self.total > 2 * self._half

    def bytes(self) -> bytes:
        """What was kept, with a marker where something is missing."""
        tail = b"".join(self._tail)[-self._half :]
        cut = self.total - len(self._head) - len(tail)
        marker = f"\n[... {cut} bytes cut ...]\n".encode() if cut else b""
        return bytes(self._head) + marker + tail

    def text(self) -> str:
        """`bytes` as UTF-8, undecodable parts replaced."""
        return self.bytes().decode(errors="replace")


class Pipe:
    """The reading end of a guest's output; hands each chunk to `sink` until the end."""

    def __init__(self, descriptor: int, sink: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self.sink = sink
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self._loop.add_reader(descriptor, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self.sink(data)
        else:
            self.close()

    def drain(self) -> None:
        """Hand on what has been written so far."""
        while not self.ended.is_set() and select.select((self._descriptor,), (), (), 0)[0]:
            self._readable()

    def pause(self) -> None:
        """Stop reading; the guest blocks once the pipe is full."""
        if not self.ended.is_set():
            self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        """Read again."""
        if not self.ended.is_set():
            self._loop.add_reader(self._descriptor, self._readable)

    def close(self) -> None:
        """Stop for good. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)


class Input:
    """The writing end of a guest's standard input."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._open = True
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def write(self, data: bytes) -> None:
        """Hand over all of `data`. Raises BrokenPipeError when the guest reads no more."""
        view = memoryview(data)
        while view:
            if not self._open:
                raise BrokenPipeError("the guest's standard input is closed")
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        self._ready.clear()
        self._loop.add_writer(self._descriptor, self._ready.set)
        try:
            await self._ready.wait()
        finally:
            if self._open:
                self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        """The guest reads the end of the stream. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_writer(self._descriptor)
            self._ready.set()
            os.close(self._descriptor)


async def readable(descriptor: int, seconds: float) -> bool:
    """Wait until there is something to read, or the end; False after `seconds`."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True


def running(descriptor: int) -> bool:
    """Whether a process known by descriptor lives."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)


def host_pid(descriptor: int) -> int | None:
    """The number, as this process sees it, of a process known by descriptor; None once it is
    gone."""
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "Pid" and int(value) > 0:
            return int(value)
    return None


class End:
    """A process whose end the event loop waits for, by descriptor, so by no reusable number.
    Owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        self._loop.add_reader(self._descriptor, self._ended)

    def _ended(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self.over.set()

    def kill(self) -> None:
        if not self.over.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def reap(self) -> None:
        """Collect the dead process, which fell to us if its parent ended first."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


class GuestProcess:
    """A guest from start to death. Use: construct, `await ready()`, set limits on `init_pid`,
    `release()`, `await finished(...)`, and in any case `await end()`.

    `arguments` are bubblewrap's own, `command` what runs inside. The environment of bubblewrap
    is empty, since a guest can read that of its init.
    """

    def __init__(
        self,
        bwrap: Path,
        arguments: Sequence[str],
        command: Sequence[str],
        *,
        stdout: Callable[[bytes], None],
        stderr: Callable[[bytes], None],
    ) -> None:
        with contextlib.ExitStack() as stack:
            pipes: list[tuple[int, int]] = []
            for _ in range(5):
                read, write = os.pipe()
                stack.callback(_close, read)
                stack.callback(_close, write)
                pipes.append((read, write))
            inp, out, err, status, block = pipes
            self._monitor = subprocess.Popen(
                [
                    str(bwrap),
                    "--json-status-fd",
                    str(status[1]),
                    "--block-fd",
                    str(block[0]),
                    *arguments,
                    "--",
                    *command,
                ],
                stdin=inp[0],
                stdout=out[1],
                stderr=err[1],
                env={},
                pass_fds=(status[1], block[0]),
                start_new_session=True,
            )
            stack.pop_all()
        for descriptor in (inp[0], out[1], err[1], status[1], block[0]):
            os.close(descriptor)
        self._end = End(os.pidfd_open(self._monitor.pid))
        self._init: End | None = None
        self._init_pid = 0
        self._release = block[1]
        self._released = False
        self._ended = False
        self._status = bytearray()
        self._told = asyncio.Event()
        self.stdin = Input(inp[1])
        self.stdout = Pipe(out[0], stdout)
        self.stderr = Pipe(err[0], stderr)
        self._status_pipe = Pipe(status[0], self._on_status)

    def _on_status(self, data: bytes) -> None:
        self._status += data
        if self._init is None:
            number = self._document("child-pid")
            if number is not None:
                self._adopt(number)

    def _adopt(self, pid: int) -> None:
        try:
            init = End(os.pidfd_open(pid))
        except ProcessLookupError:
            return  # It failed while being set up; the monitor tells.
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (ProcessLookupError, FileNotFoundError):
            init.close()
            return
        if int(stat.rpartition(")")[2].split()[1]) == self._monitor.pid:
            self._init, self._init_pid = init, pid
            self._told.set()
        else:
            init.close()

    def _document(self, key: str) -> int | None:
        for line in bytes(self._status).splitlines():
            try:
                document = cast("dict[str, Any]", json.loads(line))
            except json.JSONDecodeError:
                continue  # Its rest has not arrived.
            if key in document:
                return int(document[key])
        return None

    @property
    def left(self) -> bool:
        """Whether processes go on after the command's end: never."""
        return False

    @property
    def monitor_pid(self) -> int:
        """Host id of bubblewrap; all of the guest descends from it."""
        return self._monitor.pid

    async def ready(self, seconds: float) -> int | None:
        """Wait until the namespaces exist. Returns the host id of the guest's init, which waits
        for `release`; None when bubblewrap failed before. Raises WorkspaceError at the deadline."""
        try:
            async with asyncio.timeout(seconds):
                await self._either(self._told.wait(), self._status_pipe.ended.wait())
        except TimeoutError:
            raise WorkspaceError(f"bubblewrap set up no guest in {seconds:.0f} s") from None
        return None if self._init is None else self._init_pid

    def release(self) -> None:
        """Let the command begin."""
        if not self._released:
            self._released = True
            with contextlib.suppress(BrokenPipeError):
                os.write(self._release, b"1")
            os.close(self._release)

    async def finished(self, seconds: float | None) -> bool:
        """Wait for the command's end. False when `seconds` passed before."""
        try:
            async with asyncio.timeout(seconds):
                await self._end.over.wait()
        except TimeoutError:
            return False
        return True

    @property
    def command_exit(self) -> int | None:
        """The command's exit status, 128 + n after signal n; None if it never ran to an end."""
        return self._document("exit-code")

    @property
    def monitor_exit(self) -> int | None:
        """Bubblewrap's own exit status, 128 + n after signal n; None while it lives."""
        code = self._monitor.poll()
        return code if code is None or code >= 0 else 128 - code

    def kill(self) -> None:
        """Kill everything, now, without waiting."""
        if self._init is not None:
            self._init.kill()
        self._end.kill()

    async def end(self, seconds: float) -> None:
        """Kill everything and wait until it is dead and its output is read. Idempotent; finishes
        its work also when cancelled. Raises WorkspaceError when something outlives `seconds`."""
        if not self._ended:
            self._ended = True
            await uninterrupted(self._finish(seconds))

    async def _finish(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                # Before the init is known, killing the monitor could leave it behind, waiting.
                await self._either(self._told.wait(), self._status_pipe.ended.wait())
                self.kill()
                await self._end.over.wait()
                if self._init is not None:
                    await self._init.over.wait()
                for pipe in (self.stdout, self.stderr, self._status_pipe):
                    pipe.resume()
                    await pipe.ended.wait()
        except TimeoutError:
            raise WorkspaceError(f"a killed guest was not gone after {seconds:.0f} s") from None
        finally:
            self._close()

    @staticmethod
    async def _either(*waits: Coroutine[Any, Any, Any]) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _close(self) -> None:
        self.release()
        self.stdin.close()
        for pipe in (self.stdout, self.stderr, self._status_pipe):
            pipe.close()
        self._monitor.poll()
        self._end.close()
        if self._init is not None:
            self._init.reap()
            self._init.close()


def adopt_orphans() -> None:
    """Make this process the parent of guests' inits whose bubblewrap ended first, so that they
    can be collected: in a container whose process 1 collects nobody they would pile up as
    zombies, one per command, until the container's process limit. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:  # noqa: BLE001  the task keeps it; `result` below raises it
            break
    if cancelled is not None:
        raise cancelled
    return task.result()
