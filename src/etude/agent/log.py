"""The session log: one JSON object per line, only ever appended to.

A line is an event, or a whole turn of the model: its events together with the tokens that were
read and sampled, so that events and ledger can never disagree. A process that dies in the middle
of a line costs that one event or turn; it is dropped, and said.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from etude.agent.policy import Exchange
from etude.errors import EtudeError
from etude.inference.protocol import Completion, Finish
from etude.records import Event, EventKind

_NAME, _VERSION = "etude-session", 2
_ARRAYS = {"ids": "<i4", "logprobs": "<f4", "policy_versions": "<i8", "experts": "<u2"}


@dataclass(frozen=True)
class Entry:
    """One line: an event, or the events of one turn with its exchange."""

    events: tuple[Event, ...]
    exchange: Exchange | None = None


@dataclass(frozen=True)
class LoggedSession:
    """What a log holds. `about` is what was known at its start; `dropped` says in one sentence
    what a crash cost, or is None."""

    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    entries: tuple[Entry, ...] = ()
    dropped: str | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """All events in order."""
        return tuple(event for entry in self.entries for event in entry.events)


def encode_entry(entry: Entry) -> str:
    """An entry as one line of JSON, without the line end."""
    events = [
        {"kind": event.kind.value, "turn": event.turn, "data": dict(event.data)}
        for event in entry.events
    ]
    if entry.exchange is None and len(events) == 1:
        return json.dumps(events[0], separators=(",", ":"))
    exchange = None if entry.exchange is None else _exchange_to_json(entry.exchange)
    return json.dumps({"events": events, "exchange": exchange}, separators=(",", ":"))


def decode_entry(line: str) -> Entry:
    """Inverse of `encode_entry`. Raises ValueError for anything else."""
    try:
        value = json.loads(line)
        if "events" not in value:
            return Entry((_event(value),))
        exchange = value["exchange"]
        return Entry(
            tuple(_event(event) for event in value["events"]),
            None if exchange is None else _exchange_from_json(exchange),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no entry: {line[:80]}") from error


def _event(value: Mapping[str, Any]) -> Event:
    return Event(EventKind(value["kind"]), int(value["turn"]), dict(value["data"]))


def _exchange_to_json(exchange: Exchange) -> dict[str, Any]:
    completion = exchange.completion
    arrays = {
        name: _array_to_json(value, dtype)
        for name, dtype in _ARRAYS.items()
        if (value := cast("NDArray[Any] | None", getattr(completion, name))) is not None
    }
    return {
        "opens": exchange.opens,
        "prompt": _array_to_json(np.array(exchange.prompt_ids, dtype=np.int32), "<i4"),
        "finish": completion.finish.value,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        **arrays,
    }


def _exchange_from_json(value: Mapping[str, Any]) -> Exchange:
    arrays = {
        name: _array_from_json(value[name], dtype)
        for name, dtype in _ARRAYS.items()
        if name in value
    }
    completion = Completion(
        finish=Finish(value["finish"]),
        prompt_tokens=int(value["prompt_tokens"]),
        cached_tokens=int(value["cached_tokens"]),
        **arrays,
    )
    prompt = _array_from_json(value["prompt"], "<i4")
    return Exchange(bool(value["opens"]), prompt.tolist(), completion)


def _array_to_json(array: NDArray[Any], dtype: str) -> dict[str, Any]:
    """Shape and little-endian bytes: exact, NaN included, and short."""
    data = np.ascontiguousarray(array, dtype=dtype)
    return {"shape": list(data.shape), "data": base64.b64encode(data.tobytes()).decode()}


def _array_from_json(value: Mapping[str, Any], dtype: str) -> NDArray[Any]:
    data = base64.b64decode(value["data"], validate=True)
    array = np.frombuffer(data, dtype=dtype).reshape(value["shape"])
    return array.astype(np.dtype(dtype).newbyteorder("="))


def _scan(path: Path) -> tuple[LoggedSession, int]:
    """What a log holds and the length in bytes of its sound part."""
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
    lines = data[:sound].decode("utf-8", "replace").split("\n")[:-1]
    about = _about(path, lines[0]) if lines else {}
    entries: list[Entry] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            entries.append(decode_entry(line))
        except ValueError as error:
            raise EtudeError(
                f"The session log {path} is damaged at line {number}; delete that line to go on."
            ) from error
    return LoggedSession(about, tuple(entries), dropped), sound


def _about(path: Path, line: str) -> Mapping[str, Any]:
    try:
        header = json.loads(line)
        known = header["log"] == _NAME and header["version"] == _VERSION
    except (ValueError, KeyError, TypeError):
        known = False
        header = {}
    if not known:
        raise EtudeError(f"{path} is not a session log of this version.")
    return dict(header["about"])


def read_log(path: Path) -> LoggedSession:
    """All whole entries of a log. Raises EtudeError when it is missing or damaged elsewhere than
    at its end."""
    return _scan(path)[0]


def read_about(path: Path) -> Mapping[str, Any]:
    """Only what the first line says. Raises EtudeError when it is no session log."""
    with path.open("rb") as file:
        return _about(path, file.readline().decode("utf-8", "replace"))


class SessionLog:
    """A log open for appending, held by one process at a time.

    Opening an existing log reads it (`earlier`) and cuts a half-written line off; `about` is
    written when the log is new. What was appended survives the death of this process; with
    `durable` also that of the machine. Raises EtudeError when another process holds it.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any] | None = None, *, durable: bool = False
    ) -> None:
        self._durable = durable
        self.earlier = LoggedSession(about or {})
        path.parent.mkdir(parents=True, exist_ok=True)
        # Sessions hold what files and people said: nobody else's business.
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "ab", buffering=0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sound = 0
            if os.fstat(descriptor).st_size:
                self.earlier, sound = _scan(path)
                os.truncate(path, sound)
        except BlockingIOError as error:
            self._file.close()
            raise EtudeError(
                f"Another process works in the session {path}; end it first."
            ) from error
        except BaseException:
            self._file.close()
            raise
        if sound == 0:
            header = {"log": _NAME, "version": _VERSION, "about": dict(about or {})}
            self._write(json.dumps(header))

    def append(self, entry: Entry) -> None:
        """Write one entry. Raises OSError, for instance when the disk is full."""
        self._write(encode_entry(entry))

    def _write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode())
        while data:
            data = data[self._file.write(data) :]
        if self._durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> SessionLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
