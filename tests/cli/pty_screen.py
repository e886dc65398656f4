"""A program on a real pseudo-terminal, seen through a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

DEADLINE = 30.0


class PtyScreen:
    """Runs `argv` in a terminal of some size; `raw` is every byte that it wrote."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.raw = b""
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self._master, slave = pty.openpty()
        self._set_size(columns, rows)
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "", **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (no threads)
        )
        os.close(slave)
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> PtyScreen:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._closing = True
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        while not self._closing:
            ready, _, _ = select.select([self._master], [], [], 0.1)
            if not ready:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # The program is gone.
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """As a window does: the emulator first, then the program is told."""
        with self._lock:
            self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def lines(self) -> list[str]:
        """What is visible, without blanks at the ends of lines."""
        with self._lock:
            return [text.rstrip() for text in self.screen.display]

    def text(self) -> str:
        return "\n".join(self.lines())

    def colour_of(self, text: str) -> str:
        """Of the first letter of some visible text."""
        row = next(n for n, shown in enumerate(self.lines()) if text in shown)
        with self._lock:
            return self.screen.buffer[row][self.screen.display[row].index(text)].fg

    def wait(self, what: str | Callable[[str], bool], seconds: float = DEADLINE) -> str:
        """Until the visible text holds `what` (a pattern). Fails with the screen."""
        end = time.monotonic() + seconds
        check = what if callable(what) else lambda text: re.search(what, text) is not None
        while time.monotonic() < end:
            text = self.text()
            if check(text):
                return text
            if self.process.poll() is not None:
                time.sleep(0.3)
                if check(self.text()):
                    return self.text()
                break
            time.sleep(0.02)
        raise AssertionError(f"not on the screen: {what}\n{self.text()}")

    def still(self, seconds: float = 0.5) -> list[str]:
        """The screen once nothing was written for so long."""
        end = time.monotonic() + DEADLINE
        size, since = -1, time.monotonic()
        while time.monotonic() < end:
            if len(self.raw) != size:
                size, since = len(self.raw), time.monotonic()
            elif time.monotonic() - since > seconds:
                return self.lines()
            time.sleep(0.02)
        raise AssertionError(f"the screen does not come to rest\n{self.text()}")

    def processor_seconds(self) -> float:
        """What the program has used so far, its own threads included."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def ends(self, seconds: float = DEADLINE) -> int:
        """The exit code."""
        return self.process.wait(seconds)
