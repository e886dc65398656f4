"""The parent of a tool server's process: no server outlives the session that started it.

Run as a program of its own, with nothing but the standard library: `guard.py PARENT COMMAND …`.
It dies with its parent, however that ends (SIGKILL too), and takes every process with it that the
server ever started, in whatever session or process group that is. Of the server's standard error
the first part is passed on, so that no server can fill the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOG_BYTES = 1 << 20
_GRACE = 1.0
"""Seconds between asking the processes to end and ending them."""
_PATIENCE = 5.0
_CANNOT_START = 127


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl was refused")


def _descendants() -> list[int]:
    """All processes below this one that are not dead yet."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  a short-lived program: no pathlib
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _collect() -> None:
    """Take every dead child away."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_all() -> None:
    """Ask all processes below to end, then end them."""
    started = time.monotonic()
    asked = False
    while living := _descendants():
        passed = time.monotonic() - started
        if passed > _PATIENCE:
            return
        if not asked or passed > _GRACE:
            asked = True
            for process in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if passed > _GRACE else signal.SIGTERM)
        time.sleep(0.01)
        _collect()


def _start(command: list[str], errors: int) -> subprocess.Popen[bytes]:
    # The pipes belong to the server alone: its end must be the end of the conversation.
    server = subprocess.Popen(
        command,
        stderr=errors,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  no threads
    )
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(errors)
    return server


def main() -> int:
    """Run the command; returns its exit code."""
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        return _CANNOT_START
    errors, server_errors = os.pipe()
    try:
        server = _start(sys.argv[2:], server_errors)
    except OSError as error:
        os.write(2, f"{sys.argv[2]} cannot be run: {error.strerror}\n".encode())
        return _CANNOT_START
    left = _LOG_BYTES
    streams = [wakeup, errors]
    while server.poll() is None and not asked:
        for ready in select.select(streams, [], [])[0]:
            data = os.read(ready, 65536)
            if ready == errors:
                if not data:
                    streams.remove(errors)
                os.write(2, data[:left])
                left -= min(left, len(data))
    code = server.poll()
    _end_all()
    return _CANNOT_START if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
