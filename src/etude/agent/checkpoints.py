"""Snapshots of a live project, and going back to one.

They are kept in one SQLite file of the state folder, by content, and know nothing of git: neither
the index, refs and configuration of the project's own repository nor filters, attributes or hooks
can change what is kept, or be changed. Kept are files (exact bytes), links, empty folders, any
names, and permission bits. Not kept, and not touched by `undo` either: `.git` wherever it stands,
folders that tools make anew (`project_tree.EXCLUDED`), files over 32 MiB, sockets and devices.
Files that git ignores are kept like all others. Times, owners and extended attributes are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zstandard

from etude.agent.permissions.reading import reads_only
from etude.agent.project_diff import tree_diff
from etude.agent.project_tree import (
    Entry,
    Kind,
    Restored,
    Restorer,
    Scan,
    Scanner,
    Stamp,
    Tree,
    digest_of,
)
from etude.errors import EtudeError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs (digest TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (
  id INTEGER PRIMARY KEY AUTOINCREMENT, label TEXT NOT NULL, made REAL NOT NULL,
  tree TEXT NOT NULL, skipped TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS stamps (
  path BLOB PRIMARY KEY, inode TEXT NOT NULL, size INTEGER NOT NULL, modified INTEGER NOT NULL,
  changed INTEGER NOT NULL, digest TEXT NOT NULL);
"""
_PATIENCE = 60.0
_LEVEL = 1
_LABEL_CHARS = 200


@dataclass(frozen=True)
class Checkpoint:
    """`made` in seconds of the epoch; `skipped` says of each path why it is not kept."""

    id: str
    label: str
    made: float
    skipped: dict[str, str]


def dangerous(command: str) -> bool:
    """Whether a snapshot is to be taken before a shell command: it may do more than read."""
    return not reads_only(command)


class Checkpoints:
    """The snapshots of one project. Every method may be called from any thread; several
    processes may use one project. All raise EtudeError when the store or the project cannot be
    used.

    `keep` is how many are kept, `max_bytes` how large the store may grow before only the newest
    are.
    """

    def __init__(
        self, project: Path, folder: Path, *, keep: int = 200, max_bytes: int = 4 << 30
    ) -> None:
        self._project = project.resolve()
        name = hashlib.sha256(os.fsencode(self._project)).hexdigest()[:24]
        self._folder = folder
        self._path = folder / f"{name}.db"
        self._keep = keep
        self._max_bytes = max_bytes

    def save(self, label: str) -> str:
        """Keep the present state; returns its id."""
        with self._store() as store:
            scan = self._scan(store)
            tree = _put(store, _tree_bytes(scan.entries))
            text = label.encode("utf-8", "replace").decode()[:_LABEL_CHARS]
            row = store.execute(
                "INSERT INTO snapshots (label, made, tree, skipped) VALUES (?, ?, ?, ?)",
                (text, time.time(), tree, json.dumps(scan.skipped)),
            )
            kept = str(row.lastrowid)
            self._prune_when_full(store)
        return kept

    def undo(self, to: str) -> Restored:
        """Make the project what it was at a checkpoint. What stands there now is not kept by
        this: save it before. The result says what could not be put back."""
        with self._store() as store:
            wanted = self._tree(store, to)
            present = self._scan(store)
            restorer = Restorer(
                self._project, wanted, present.entries, lambda digest: _get(store, digest)
            )
            return restorer.restore()

    def diff(self, old: str, new: str | None = None) -> str:
        """What differs between two checkpoints (None: the present state), as unified text that
        `git apply` takes."""
        with self._store() as store:
            before = self._tree(store, old)
            after = self._scan(store).entries if new is None else self._tree(store, new)
            return tree_diff(before, after, lambda digest: _get(store, digest))

    def list(self) -> list[Checkpoint]:
        """All that are kept, the newest first."""
        with self._store() as store:
            rows = store.execute("SELECT id, label, made, skipped FROM snapshots ORDER BY id DESC")
            return [
                Checkpoint(str(number), label, made, json.loads(skipped))
                for number, label, made, skipped in rows
            ]

    def prune(self, keep: int) -> int:
        """Forget all but the newest `keep`; returns how many went."""
        with self._store() as store:
            return _prune(store, keep)

    @contextmanager
    def _store(self) -> Generator[sqlite3.Connection]:
        """The store in one transaction: all of an operation or nothing of it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # It holds what the project's files hold: nobody else's business.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            store = sqlite3.connect(self._path, timeout=_PATIENCE, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        try:
            store.execute("PRAGMA auto_vacuum=INCREMENTAL")
            store.execute("PRAGMA journal_mode=WAL")
            store.execute("PRAGMA synchronous=NORMAL")
            store.executescript(_SCHEMA)
            store.execute("BEGIN IMMEDIATE")
            yield store
            store.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        finally:
            store.close()  # Rolls back what was not committed.

    def _unusable(self, error: Exception) -> EtudeError:
        return EtudeError(f"The checkpoints in {self._path} cannot be used ({error}).")

    def _scan(self, store: sqlite3.Connection) -> Scan:
        """The present state, with the bytes of all files kept."""
        rows = store.execute("SELECT path, inode, size, modified, changed, digest FROM stamps")
        known = {os.fsdecode(path): Stamp(int(inode), *rest) for path, inode, *rest in rows}
        scanner = Scanner(
            self._project, known, lambda digest, data: _put(store, data, digest), self._folder
        )
        scan = scanner.scan()
        new = {path: stamp for path, stamp in scan.stamps.items() if known.get(path) != stamp}
        gone = known.keys() - scan.stamps.keys()
        store.executemany(
            "DELETE FROM stamps WHERE path = ?", [(os.fsencode(path),) for path in gone]
        )
        store.executemany(
            "INSERT OR REPLACE INTO stamps VALUES (?, ?, ?, ?, ?, ?)",
            [
                (os.fsencode(path), str(s.inode), s.size, s.modified_ns, s.changed_ns, s.digest)
                for path, s in new.items()
            ],
        )
        return scan

    def _tree(self, store: sqlite3.Connection, checkpoint: str) -> Tree:
        row = None
        if checkpoint.isascii() and checkpoint.isdigit():
            row = store.execute(
                "SELECT tree FROM snapshots WHERE id = ?", (int(checkpoint),)
            ).fetchone()
        if row is None:
            raise EtudeError(
                f"There is no checkpoint {checkpoint!r} of {self._project} (any more)."
            )
        return _tree_of(_get(store, row[0]))

    def _prune_when_full(self, store: sqlite3.Connection) -> None:
        (count,) = store.execute("SELECT count(*) FROM snapshots").fetchone()
        if count > self._keep + self._keep // 4:
            _prune(store, self._keep)
        elif self._bytes(store) > self._max_bytes and count > 1:
            _prune(store, max(1, count // 2))

    @staticmethod
    def _bytes(store: sqlite3.Connection) -> int:
        (pages,) = store.execute("PRAGMA page_count").fetchone()
        (free,) = store.execute("PRAGMA freelist_count").fetchone()
        (size,) = store.execute("PRAGMA page_size").fetchone()
        return (pages - free) * size


def _put(store: sqlite3.Connection, data: bytes, digest: str | None = None) -> str:
    digest = digest or digest_of(data)
    if store.execute("SELECT 1 FROM blobs WHERE digest = ?", (digest,)).fetchone() is None:
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
        store.execute("INSERT INTO blobs VALUES (?, ?)", (digest, packed))
    return digest


def _get(store: sqlite3.Connection, digest: str) -> bytes:
    row = store.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
    try:
        data = zstandard.ZstdDecompressor().decompress(row[0]) if row is not None else b""
    except zstandard.ZstdError as error:
        raise EtudeError(f"The checkpoints are damaged at {digest} ({error}).") from error
    if digest_of(data) != digest:
        raise EtudeError(f"The checkpoints are damaged: {digest} is not what was kept.")
    return data


def _tree_bytes(tree: Tree) -> bytes:
    rows = [[path, entry.kind.value, entry.mode, entry.content] for path, entry in tree.items()]
    return json.dumps(sorted(rows), separators=(",", ":")).encode()


def _tree_of(data: bytes) -> dict[str, Entry]:
    return {
        path: Entry(Kind(kind), mode, content) for path, kind, mode, content in json.loads(data)
    }


def _prune(store: sqlite3.Connection, keep: int) -> int:
    """Forget old snapshots and the bytes that no other needs."""
    gone = store.execute(
        "DELETE FROM snapshots WHERE id NOT IN (SELECT id FROM snapshots ORDER BY id DESC LIMIT ?)",
        (keep,),
    ).rowcount
    needed: set[str] = {digest for (digest,) in store.execute("SELECT digest FROM stamps")}
    for (tree,) in store.execute("SELECT DISTINCT tree FROM snapshots").fetchall():
        needed.add(tree)
        entries = _tree_of(_get(store, tree)).values()
        needed.update(entry.content for entry in entries if entry.kind is Kind.FILE)
    have = {digest for (digest,) in store.execute("SELECT digest FROM blobs")}
    store.executemany("DELETE FROM blobs WHERE digest = ?", [(d,) for d in have - needed])
    store.execute("PRAGMA incremental_vacuum").fetchall()
    return gone
