"""The guest that stays: bubblewrap around a command that only waits, so that one mount of the
files, one loopback network and one set of namespaces last as long as a workspace. It is bound to
no event loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from etude.sandbox.process import End, readable, running
from etude.sandbox.protocol import WorkspaceError

_WAITING = "/bin/cat"
"""It echoes a line once it runs, and ends when our end of its input is closed."""
_NS_GET_USERNS = 0xB701
_ERROR_BYTES = 4096
_ERROR_SECONDS = 10.0


class Holder:
    """Construct, then `await ready(...)`; in any case `await end(...)`. Raises OSError when
    bubblewrap cannot be started."""

    def __init__(self, bwrap: Path, arguments: Sequence[str]) -> None:
        status, write = os.pipe()
        try:
            self._monitor = subprocess.Popen(
                [str(bwrap), "--json-status-fd", str(write), *arguments, "--", _WAITING],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=(write,),
                start_new_session=True,
            )
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(write)
        self._status: int | None = status
        self._init: int | None = None
        self._told = b""
        self._owner: int | None = None

    @property
    def entrance(self) -> tuple[int, int]:
        """Descriptors of the user namespace that owns the guest and of its process 1."""
        assert self._owner is not None
        assert self._init is not None
        return self._owner, self._init

    @property
    def monitor_pid(self) -> int:
        """Host id of bubblewrap; whatever runs in the guest descends from it."""
        return self._monitor.pid

    async def ready(self, seconds: float) -> None:
        """Wait until commands can join. Raises WorkspaceError."""
        assert self._monitor.stdin is not None
        assert self._monitor.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._monitor.stdin.fileno(), b"\n")
            if not await readable(self._monitor.stdout.fileno(), seconds):
                raise WorkspaceError(f"bubblewrap set up no guest in {seconds:.0f} s")
            if os.read(self._monitor.stdout.fileno(), 1) == b"\n":
                pid = await self._meet_init(seconds)
                if pid is None:
                    raise WorkspaceError("a guest ended as soon as it was set up")
                self._open_owner(pid)
                self._close_outputs()
                return
        except OSError as error:
            raise WorkspaceError(f"could not enter a guest: {error}") from error
        raise WorkspaceError(f"bubblewrap failed: {await self._words()}")

    async def _words(self) -> str:
        try:
            _, words = await asyncio.to_thread(self._monitor.communicate, timeout=_ERROR_SECONDS)
        except subprocess.TimeoutExpired:
            words = b""
        return words.decode(errors="replace").strip()[-_ERROR_BYTES:] or "without a message"

    def _open_owner(self, pid: int) -> None:
        mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The mounts belong to the outer of bubblewrap's two user namespaces: rights there are
            # what it takes to enter; the command runs in the inner one.
            self._owner = fcntl.ioctl(mounts, _NS_GET_USERNS)
        finally:
            os.close(mounts)
        # Had it died before, the number might have led to another process's namespaces.
        if not self.alive():
            raise WorkspaceError("a guest ended as soon as it was set up")

    async def _meet_init(self, seconds: float) -> int | None:
        """Wait for the host id of the guest's process 1, known by descriptor from now on. None if
        there is none."""
        while b"\n" not in self._told:
            assert self._status is not None
            if not await readable(self._status, seconds):
                return None
            piece = os.read(self._status, 1 << 16)
            if not piece:
                return None
            self._told += piece
        pid = int(cast("dict[str, Any]", json.loads(self._told.splitlines()[0]))["child-pid"])
        try:
            init = os.pidfd_open(pid)
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (ProcessLookupError, FileNotFoundError):
            return None
        if int(stat.rpartition(")")[2].split()[1]) != self._monitor.pid:
            os.close(init)
            return None
        self._init = init
        return pid

    def alive(self) -> bool:
        """Whether commands can join."""
        return self._init is not None and running(self._init)

    def kill(self) -> None:
        """Kill everything in the guest, if it stands, without waiting."""
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        """Kill everything in the guest and wait until it is dead. Must be called once, and run to
        its end. Raises WorkspaceError when something outlives `seconds`."""
        # Before process 1 is known, killing bubblewrap could leave it behind, waiting.
        if self._init is None and self._status is not None:
            await self._meet_init(seconds)
        ends: list[End] = []
        if self._monitor.poll() is None:
            ends.append(End(os.pidfd_open(self._monitor.pid)))
        self.kill()
        self._monitor.kill()
        init = None if self._init is None else End(self._init)
        if init is not None:
            ends.append(init)
        self._init = None
        try:
            async with asyncio.timeout(seconds):
                for end in ends:
                    await end.over.wait()
        except TimeoutError:
            raise WorkspaceError(f"a killed guest was not gone after {seconds:.0f} s") from None
        finally:
            self._monitor.poll()
            if init is not None:
                init.reap()
            for end in ends:
                end.close()
            self._close()

    def _close_outputs(self) -> None:
        for stream in (self._monitor.stdout, self._monitor.stderr):
            if stream is not None:
                stream.close()
        if self._status is not None:
            os.close(self._status)
            self._status = None

    def _close(self) -> None:
        self._close_outputs()
        assert self._monitor.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._monitor.stdin.close()
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None
