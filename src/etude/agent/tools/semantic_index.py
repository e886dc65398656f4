"""The index of semantic search: vectors by the hash of what they stand for.

The file in Etude's cache holds hashes and vectors, no text, and serves all projects: what is the
same in two of them, or in two states of one, is embedded once.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from etude.agent.tools.chunks import Chunk, chunks
from etude.agent.tools.embedding import MODEL_NAME, WIDTH
from etude.records import Float32

Embed = Callable[[Sequence[str]], Float32]
_ROWS = 400_000
"""The oldest go beyond so many: about 300 MB."""
_AT_ONCE = 64
_TIMEOUT = 10.0
_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]+(?![a-z])|\d+")


@dataclass(frozen=True)
class Hit:
    """A chunk that was found; `score` is the cosine with the query."""

    chunk: Chunk
    score: float


@dataclass
class Files:
    """The chunks of a workspace's files as they were last seen."""

    stamps: dict[str, str] = field(default_factory=dict[str, str])
    chunks: dict[str, list[Chunk]] = field(default_factory=dict[str, list[Chunk]])

    def changed(self, stamps: Mapping[str, str]) -> list[str]:
        """Drop what is gone; the files that must be read anew."""
        for path in [path for path in self.stamps if path not in stamps]:
            del self.stamps[path]
            self.chunks.pop(path, None)
        return [path for path, stamp in stamps.items() if self.stamps.get(path) != stamp]

    def update(
        self, stamps: Mapping[str, str], wanted: Sequence[str], texts: Mapping[str, str]
    ) -> None:
        """Take files over that were read; one that has no text has no chunks."""
        for path in wanted:
            self.stamps[path] = stamps[path]
            self.chunks[path] = chunks(path, texts[path]) if path in texts else []


class VectorStore:
    """Vectors on disk, for any number of processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{MODEL_NAME}.sqlite"
        with closing(self._open()) as connection, connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS vectors"
                " (hash BLOB PRIMARY KEY, vector BLOB NOT NULL, used INTEGER NOT NULL)"
                " WITHOUT ROWID"
            )

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_TIMEOUT)
        connection.execute("PRAGMA journal_mode=WAL")
        return connection

    def get(self, hashes: Sequence[bytes]) -> dict[bytes, Float32]:
        """The vectors that are known."""
        found: dict[bytes, Float32] = {}
        with closing(self._open()) as connection:
            for first in range(0, len(hashes), 500):
                some = hashes[first : first + 500]
                marks = ",".join("?" * len(some))
                query = f"SELECT hash, vector FROM vectors WHERE hash IN ({marks})"
                for key, vector in connection.execute(query, some):
                    found[key] = np.frombuffer(vector, np.float16).astype(np.float32)
        return found

    def put(self, vectors: Mapping[bytes, Float32]) -> None:
        """Keep new ones; the oldest go when there are too many."""
        now = int(time.time())
        rows = [(key, row.astype(np.float16).tobytes(), now) for key, row in vectors.items()]
        with closing(self._open()) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)
            (count,) = connection.execute("SELECT count(*) FROM vectors").fetchone()
            if count > _ROWS:
                connection.execute(
                    "DELETE FROM vectors WHERE hash IN"
                    " (SELECT hash FROM vectors ORDER BY used LIMIT ?)",
                    (count - _ROWS * 9 // 10,),
                )


@dataclass(frozen=True)
class Found:
    """The best chunks, and how many of all were compared with the query."""

    hits: list[Hit]
    compared: int
    chunks: int


def search(
    query: str,
    candidates: Sequence[Chunk],
    embed: Embed,
    store: VectorStore,
    *,
    count: int,
    seconds: float,
    stop: threading.Event,
) -> Found:
    """The chunks most like the query. New ones are embedded, those that share words with the
    query first, until `seconds` are over or `stop` is set; what was done stays."""
    deadline = time.monotonic() + seconds
    keys = [
        hashlib.sha256(chunk.embedded.encode("utf-8", "replace")).digest() for chunk in candidates
    ]
    (wanted,) = embed([query])
    known = store.get(list(dict.fromkeys(keys)))
    missing = {key: chunk for key, chunk in zip(keys, candidates, strict=True) if key not in known}
    order = _likely_first(query, missing)
    for first in range(0, len(order), _AT_ONCE):
        if stop.is_set() or time.monotonic() > deadline:
            break
        some = order[first : first + _AT_ONCE]
        rows = embed([missing[key].embedded for key in some])
        new = dict(zip(some, rows, strict=True))
        store.put(new)
        known.update(new)
    have = [index for index, key in enumerate(keys) if key in known]
    if not have:
        return Found([], 0, len(candidates))
    matrix = np.stack([known[keys[index]] for index in have]).reshape(len(have), WIDTH)
    scores = matrix @ wanted
    best = np.argsort(-scores, kind="stable")[:count]
    hits = [Hit(candidates[have[int(place)]], float(scores[place])) for place in best]
    return Found(hits, len(have), len(candidates))


def _likely_first(query: str, missing: Mapping[bytes, Chunk]) -> list[bytes]:
    wanted = _words(query)
    shared = {
        key: sum(min(count, wanted[word]) for word, count in _words(chunk.embedded).items())
        for key, chunk in missing.items()
    }
    return sorted(missing, key=lambda key: -shared[key])


def _words(text: str) -> Counter[str]:
    return Counter(word.lower() for word in _WORD.findall(text) if len(word) > 2)
