"""Run storage: SQLite for state, one zstd file per rollout for its tokens.

What is finished is on disk before anybody is told: a rollout file is written, flushed and renamed,
then its row is committed. A run killed at any point therefore loses only what was in flight.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import zstandard
from numpy.typing import NDArray

from etude.errors import EtudeError
from etude.records import (
    Event,
    EventKind,
    Outcome,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    Usage,
    Verdict,
)

_DATABASE = "run.db"
_MAGIC = b"ETUDE-TRAJECTORY-1\n"
_ARRAYS = {
    "prompt_ids": "<i4",
    "completion_ids": "<i4",
    "mask": "|b1",
    "logprobs": "<f4",
    "policy_versions": "<i8",
    "experts": "<u2",
}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
  key TEXT PRIMARY KEY, phase TEXT NOT NULL, step INTEGER NOT NULL, task_id TEXT NOT NULL,
  sample INTEGER NOT NULL, reward REAL, score REAL, valid_call INTEGER NOT NULL,
  stop TEXT NOT NULL, sampled INTEGER NOT NULL, seconds REAL NOT NULL, file TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (phase, step);
CREATE TABLE IF NOT EXISTS metrics (
  phase TEXT NOT NULL, step INTEGER NOT NULL, data TEXT NOT NULL, PRIMARY KEY (phase, step));
"""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """A trajectory as bytes: magic, JSON header with its length before it, raw little-endian
    arrays in the header's order, all of it one zstd frame. No pickle, stable across machines."""
    arrays: list[bytes] = []
    segments: list[dict[str, Any]] = []
    for segment in trajectory.segments:
        layout: dict[str, list[int]] = {}
        for name, dtype in _ARRAYS.items():
            value = getattr(segment, name)
            if value is not None:
                array = np.ascontiguousarray(value, dtype=dtype)
                layout[name] = list(array.shape)
                arrays.append(array.tobytes())
        turns = [[turn.start, turn.end] for turn in segment.turns]
        segments.append({"arrays": layout, "turns": turns, "temperature": segment.temperature})
    header = {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "segments": segments,
        "events": [[e.kind.value, e.turn, dict(e.data)] for e in trajectory.events],
        "usage": asdict(trajectory.usage),
        "outcome": asdict(trajectory.outcome),
    }
    text = json.dumps(header, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")
    payload = b"".join([_MAGIC, struct.pack("<I", len(text)), text, *arrays])
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(payload)


def decode_trajectory(data: bytes) -> Trajectory:
    """Inverse of `encode_trajectory`. Raises ValueError for anything else."""
    try:
        payload = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"not a trajectory file: {error}") from error
    if not payload.startswith(_MAGIC):
        raise ValueError("not a trajectory file of this version")
    offset = len(_MAGIC)
    (size,) = struct.unpack_from("<I", payload, offset)
    offset += 4
    header = json.loads(payload[offset : offset + size].decode("utf-8", "surrogatepass"))
    offset += size
    segments: list[Segment] = []
    for entry in header["segments"]:
        values: dict[str, NDArray[Any]] = {}
        for name, dtype in _ARRAYS.items():
            if name in entry["arrays"]:
                shape = entry["arrays"][name]
                count = int(np.prod(shape))
                array = np.frombuffer(payload, dtype, count, offset).reshape(shape)
                values[name] = array
                offset += array.nbytes
        turns = tuple(Turn(start, end) for start, end in entry["turns"])
        segments.append(Segment(**values, turns=turns, temperature=entry["temperature"]))
    outcome: dict[str, Any] = header["outcome"]
    verdict: dict[str, Any] | None = outcome.pop("verdict")
    stop = StopReason(outcome.pop("stop"))
    return Trajectory(
        session_id=header["session_id"],
        task_id=header["task_id"],
        segments=tuple(segments),
        events=tuple(Event(EventKind(k), turn, data) for k, turn, data in header["events"]),
        usage=Usage(**header["usage"]),
        outcome=Outcome(
            stop=stop, verdict=None if verdict is None else _verdict(verdict), **outcome
        ),
    )


def _verdict(data: dict[str, Any]) -> Verdict:
    flags = tuple(data.pop("flags"))
    return Verdict(flags=flags, **data)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it is either the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether SQLite met a file that is no database, or not whole."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


@dataclass(frozen=True)
class RolloutKey:
    """Names one rollout of a run: which phase and step asked for it, of which task, which of its
    siblings. A key is rolled once, however often the run is resumed."""

    phase: str
    step: int
    task_id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.phase}/{self.step}/{self.task_id}/{self.sample}"


@dataclass(frozen=True)
class RolloutRow:
    """The scalar columns of one stored rollout."""

    key: RolloutKey
    reward: float | None
    score: float | None
    valid_call: bool
    stop: StopReason
    sampled: int
    seconds: float


class RunStore:
    """The state of one run folder. Used from one process at a time (the run holds a lock).

    A folder that cannot be written is opened for reading with `readonly`. Raises EtudeError when
    the database is damaged.
    """

    def __init__(self, folder: Path, *, readonly: bool = False) -> None:
        self.folder = folder
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        path = folder / _DATABASE
        try:
            if readonly:
                self._db = self._open_readonly(path)
                self._db.execute("SELECT key FROM rollouts LIMIT 1")
                return
            (folder / "rollouts").mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            if readonly or is_damage(error):
                raise EtudeError(
                    f"{path} is damaged ({error}); put it back from a backup or start a new run"
                ) from error
            raise

    def _open_readonly(self, path: Path) -> sqlite3.Connection:
        """Of a database that nobody can write, SQLite need lock nothing. It could not read what
        stands only in the log beside it, so such a pair is read from a copy."""
        if path.with_name(f"{path.name}-wal").exists():
            self._copy = tempfile.TemporaryDirectory(prefix="etude-run-")
            for file in (path, path.with_name(f"{path.name}-wal")):
                shutil.copyfile(file, Path(self._copy.name, file.name))
            return sqlite3.connect(Path(self._copy.name, path.name), isolation_level=None)
        address = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
        return sqlite3.connect(address, uri=True, isolation_level=None)

    def close(self) -> None:
        """Close the database; the store is unusable afterwards."""
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()

    def get(self, key: str) -> Any:
        """A JSON value of the run's state, or None."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Set a JSON value of the run's state."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def put_metrics(self, phase: str, step: int, data: Mapping[str, Any]) -> None:
        """Record the figures of one step; a step that is done again replaces them."""
        self._db.execute(
            "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", (phase, step, json.dumps(dict(data)))
        )

    def drop_metrics(self, phase: str, step: int) -> None:
        """Forget the figures of `step` and later ones, which are going to be done again."""
        self._db.execute("DELETE FROM metrics WHERE phase = ? AND step >= ?", (phase, step))

    def metrics(self, phase: str) -> list[dict[str, Any]]:
        """Figures of a phase by step, each with its `step`."""
        rows = self._db.execute(
            "SELECT step, data FROM metrics WHERE phase = ? ORDER BY step", (phase,)
        )
        return [{**json.loads(data), "step": step} for step, data in rows]

    def put_rollout(self, key: RolloutKey, trajectory: Trajectory) -> None:
        """Store a finished rollout durably. Raises KeyError if the key is there already."""
        if self.has_rollout(key):
            raise KeyError(f"rollout {key} is stored already")
        name = f"rollouts/{key.phase}-{key.step:05d}-{key.task_id}-{key.sample}.zst"
        write_atomically(self.folder / name, encode_trajectory(trajectory))
        outcome = trajectory.outcome
        score = outcome.verdict.score if outcome.verdict else None
        sampled = sum(segment.sampled for segment in trajectory.segments)
        self._db.execute(
            "INSERT INTO rollouts VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                str(key),
                key.phase,
                key.step,
                key.task_id,
                key.sample,
                outcome.reward,
                score,
                int(outcome.valid_call),
                outcome.stop.value,
                sampled,
                trajectory.usage.seconds,
                name,
            ),
        )

    def has_rollout(self, key: RolloutKey) -> bool:
        """Whether this rollout is finished and stored."""
        row = self._db.execute("SELECT 1 FROM rollouts WHERE key = ?", (str(key),)).fetchone()
        return row is not None

    def rollout(self, key: RolloutKey) -> Trajectory:
        """Load one rollout. Raises KeyError when there is none."""
        row = self._db.execute("SELECT file FROM rollouts WHERE key = ?", (str(key),)).fetchone()
        if row is None:
            raise KeyError(str(key))
        return decode_trajectory((self.folder / row[0]).read_bytes())

    def rollouts(self, phase: str, step: int | None = None) -> list[RolloutRow]:
        """Rows of a phase (of one step), in the order of step, task and sample."""
        query = (
            "SELECT phase, step, task_id, sample, reward, score, valid_call, stop, sampled, seconds"
            " FROM rollouts WHERE phase = ? AND (? IS NULL OR step = ?)"
            " ORDER BY step, task_id, sample"
        )
        return [
            RolloutRow(
                RolloutKey(*row[:4]), row[4], row[5], bool(row[6]), StopReason(row[7]), *row[8:]
            )
            for row in self._db.execute(query, (phase, step, step))
        ]
