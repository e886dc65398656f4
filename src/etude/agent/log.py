"""The session log: one JSON object per line, only ever appended to.

A process that dies in the middle of a line costs that one event; it is dropped, and said.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from etude.errors import EtudeError
from etude.records import Event, EventKind

_HEADER = {"log": "etude-session", "version": 1}


@dataclass(frozen=True)
class LoggedEvents:
    """Events of a log; `dropped` says in one sentence what a crash cost, or is None."""

    events: tuple[Event, ...]
    dropped: str | None


def encode_event(event: Event) -> str:
    """An event as one line of JSON, without the line end."""
    data = {"kind": event.kind.value, "turn": event.turn, "data": dict(event.data)}
    return json.dumps(data, separators=(",", ":"))


def decode_event(line: str) -> Event:
    """Inverse of `encode_event`. Raises ValueError for anything else."""
    try:
        value = json.loads(line)
        return Event(EventKind(value["kind"]), int(value["turn"]), dict(value["data"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no event: {line[:80]}") from error


def _scan(path: Path) -> tuple[LoggedEvents, int]:
    """The events of a log and the length in bytes of its sound part."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EtudeError(f"The session log {path} cannot be read ({error.strerror}).") from error
    sound = data.rfind(b"\n") + 1
    dropped = None
    if sound < len(data):
        dropped = (
            f"The last event of {path} was only half written ({len(data) - sound} bytes) "
            "and was dropped."
        )
    lines = data[:sound].decode("utf-8", "replace").splitlines()
    if lines and lines[0] != json.dumps(_HEADER):
        raise EtudeError(f"{path} is not a session log of this version.")
    events: list[Event] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            events.append(decode_event(line))
        except ValueError as error:
            raise EtudeError(
                f"The session log {path} is damaged at line {number}; delete that line to go on."
            ) from error
    return LoggedEvents(tuple(events), dropped), sound


def read_log(path: Path) -> LoggedEvents:
    """All whole events of a log. Raises EtudeError when it is missing or damaged elsewhere than
    at its end."""
    return _scan(path)[0]


class EventLog:
    """A log open for appending; give `append` to a session as its `on_event`.

    Opening an existing log reads it (`earlier`) and cuts a half-written line off. What was
    appended survives the death of this process; with `durable` also that of the machine.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._durable = durable
        self.earlier = LoggedEvents((), None)
        path.parent.mkdir(parents=True, exist_ok=True)
        sound = 0
        if path.exists():
            self.earlier, sound = _scan(path)
            os.truncate(path, sound)
        self._file: IO[bytes] = path.open("ab", buffering=0)
        if sound == 0:
            self._write(json.dumps(_HEADER))

    def append(self, event: Event) -> None:
        """Write one event. Raises OSError, for instance when the disk is full."""
        self._write(encode_event(event))

    def _write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode())
        while data:
            data = data[self._file.write(data) :]
        if self._durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
