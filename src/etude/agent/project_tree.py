"""Reading and putting back the files of a live folder that hostile code may be changing.

Everything goes by descriptors of folders, opened one name at a time without following links: a
folder that is swapped for a link meanwhile can neither bring a file from outside into a snapshot
nor let a file be written outside. Names are any bytes (`surrogateescape`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from etude.errors import EtudeError

EXCLUDED = frozenset(
    {
        "__pycache__",
        "node_modules",
        ".mypy_cache",
        ".nox",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".venv",
    }
)
"""Folders that a tool makes anew. Neither kept nor touched."""
GIT = ".git"
MAX_FILE_BYTES = 32 << 20
MAX_ENTRIES = 500_000
_DEEPEST = 100
_UNSURE_NS = 50_000_000
_ATTEMPTS = 3
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Kind(StrEnum):
    """What stands under a name."""

    FILE = "file"
    LINK = "link"
    FOLDER = "folder"


@dataclass(frozen=True)
class Entry:
    """`content` is the digest of a file's bytes, a link's target, or ''. `mode` are the permission
    bits, 0 for a link."""

    kind: Kind
    mode: int
    content: str = ""


Tree = Mapping[str, Entry]
"""By path relative to the root, without the root itself."""


@dataclass(frozen=True)
class Stamp:
    """What says that a file is still the one of this digest. Its time of change cannot be set."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    digest: str


@dataclass
class Scan:
    """`stamps` are those of the files that were found; `skipped` says why something is not kept."""

    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    stamps: dict[str, Stamp] = field(default_factory=dict[str, Stamp])
    skipped: dict[str, str] = field(default_factory=dict[str, str])


def digest_of(data: bytes) -> str:
    """The name of some bytes."""
    return hashlib.sha256(data).hexdigest()


@dataclass
class Scanner:
    """Reads a folder. `keep` takes the bytes of each file whose stamp is not in `known`."""

    root: Path
    known: Mapping[str, Stamp]
    keep: Callable[[str, bytes], object]
    without: Path | None = None
    """A folder that is left out: the one in which the snapshots are."""

    def scan(self) -> Scan:
        """Read it all. Raises EtudeError when the folder is missing or has far too many files."""
        self._found = Scan()
        self._left_out = None
        if self.without is not None and self.without.exists():
            status = self.without.stat()
            self._left_out = (status.st_dev, status.st_ino)
        try:
            root = os.open(self.root, _FOLDER)
        except OSError as error:
            raise EtudeError(f"{self.root} cannot be read ({error.strerror}).") from error
        try:
            self._folder(root, "", 0)
        finally:
            os.close(root)
        return self._found

    def _folder(self, descriptor: int, prefix: str, depth: int) -> None:
        for name in sorted(os.listdir(descriptor)):
            path = prefix + name
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if name == GIT or (name in EXCLUDED and stat.S_ISDIR(status.st_mode)):
                    continue
                self._entry(descriptor, name, path, status, depth)
            except FileNotFoundError:
                continue  # Gone meanwhile.
            except OSError as error:
                self._found.skipped[path] = f"cannot be read ({error.strerror})"

    def _entry(self, folder: int, name: str, path: str, status: os.stat_result, depth: int) -> None:
        found = self._found
        mode = stat.S_IMODE(status.st_mode)
        if len(found.entries) >= MAX_ENTRIES:
            raise EtudeError(f"{self.root} has over {MAX_ENTRIES} files; no snapshot can be taken.")
        if stat.S_ISLNK(status.st_mode):
            found.entries[path] = Entry(Kind.LINK, 0, os.readlink(name, dir_fd=folder))
        elif stat.S_ISREG(status.st_mode):
            if status.st_size > MAX_FILE_BYTES:
                found.skipped[path] = f"larger than {MAX_FILE_BYTES >> 20} MiB"
            else:
                self._file(folder, name, path, status)
        elif stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) == self._left_out:
                return
            if depth >= _DEEPEST:
                found.skipped[path] = "too deep"
                return
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                found.entries[path] = Entry(Kind.FOLDER, mode)
                self._folder(inner, f"{path}/", depth + 1)
            finally:
                os.close(inner)
        else:
            found.skipped[path] = "neither file nor folder nor link"

    def _file(self, folder: int, name: str, path: str, status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        known = self.known.get(path)
        if known is not None and _stamp(status, known.digest) == known:
            self._found.entries[path] = Entry(Kind.FILE, mode, known.digest)
            self._found.stamps[path] = known
            return
        data, status = _read(folder, name)
        if len(data) > MAX_FILE_BYTES:
            self._found.skipped[path] = f"larger than {MAX_FILE_BYTES >> 20} MiB"
            return
        digest = digest_of(data)
        self.keep(digest, data)
        self._found.entries[path] = Entry(Kind.FILE, stat.S_IMODE(status.st_mode), digest)
        if time.time_ns() - status.st_ctime_ns > _UNSURE_NS:
            self._found.stamps[path] = _stamp(status, digest)


def _stamp(status: os.stat_result, digest: str) -> Stamp:
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest)


def _read(folder: int, name: str) -> tuple[bytes, os.stat_result]:
    """A file's bytes and status; read again when it changed meanwhile, a few times."""
    data, before = b"", None
    for _ in range(_ATTEMPTS):
        with os.fdopen(os.open(name, _FILE, dir_fd=folder), "rb") as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise FileNotFoundError(name)
            data = file.read(MAX_FILE_BYTES + 1)
            after = os.fstat(file.fileno())
        if _stamp(before, "") == _stamp(after, ""):
            break
    assert before is not None
    return data, before


@dataclass
class Restored:
    """What was put back and what was removed; `left` says why something is not as it was."""

    written: list[str] = field(default_factory=list[str])
    removed: list[str] = field(default_factory=list[str])
    left: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class Restorer:
    """Makes a folder what a tree says. `present` is what stands there; what is not in it (see
    `Scan.skipped`) is not removed. `content` gives the bytes of a digest."""

    root: Path
    wanted: Tree
    present: Tree
    content: Callable[[str], bytes]

    def restore(self) -> Restored:
        """Do it. Raises EtudeError when the folder itself cannot be opened."""
        self._done = Restored()
        self._wanted_in = _by_folder(self.wanted)
        self._present_in = _by_folder(self.present)
        try:
            root = os.open(self.root, _FOLDER)
        except OSError as error:
            raise EtudeError(f"{self.root} cannot be opened ({error.strerror}).") from error
        try:
            mode = stat.S_IMODE(os.fstat(root).st_mode)
            self._folder(root, "", mode)
        finally:
            os.close(root)
        return self._done

    def _folder(self, descriptor: int, prefix: str, mode: int) -> None:
        """Make one open folder right, and give it its mode last."""
        with _Writable(descriptor, mode):
            wanted = self._wanted_in.get(prefix, {})
            for name, entry in self._present_in.get(prefix, {}).items():
                if name not in wanted or wanted[name].kind is not entry.kind:
                    self._guarded(prefix + name, self._remove, descriptor, name, prefix, entry)
            for name, entry in wanted.items():
                self._guarded(prefix + name, self._put, descriptor, name, prefix, entry)

    def _guarded(
        self,
        path: str,
        action: Callable[[int, str, str, Entry], None],
        folder: int,
        name: str,
        prefix: str,
        entry: Entry,
    ) -> None:
        """One failure must not keep the rest from being put back."""
        try:
            action(folder, name, prefix, entry)
        except OSError as error:
            self._done.left[path] = error.strerror or str(error)

    def _remove(self, folder: int, name: str, prefix: str, entry: Entry) -> None:
        path = prefix + name
        if entry.kind is not Kind.FOLDER:
            os.unlink(name, dir_fd=folder)
        else:
            inner = _opened(folder, name)
            try:
                self._folder(inner, f"{path}/", stat.S_IMODE(os.fstat(inner).st_mode))
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)
        self._done.removed.append(path)

    def _put(self, folder: int, name: str, prefix: str, entry: Entry) -> None:
        path = prefix + name
        present = self.present.get(path)
        if entry.kind is Kind.FOLDER:
            if present is None or present.kind is not Kind.FOLDER:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
                self._done.written.append(path)
            inner = _opened(folder, name)
            try:
                self._folder(inner, f"{path}/", entry.mode)
            finally:
                os.close(inner)
            return
        if present == entry:
            return
        # Under a name of its own first: what has the old name is replaced whole, not written to.
        temporary = f".etude-{secrets.token_hex(8)}"
        try:
            if entry.kind is Kind.LINK:
                os.symlink(entry.content, temporary, dir_fd=folder)
            else:
                with os.fdopen(os.open(temporary, _NEW, 0o600, dir_fd=folder), "wb") as file:
                    file.write(self.content(entry.content))
                    os.fchmod(file.fileno(), entry.mode)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
        self._done.written.append(path)


def _opened(folder: int, name: str) -> int:
    """Open an inner folder, one that somebody made unreadable too."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except PermissionError:
        bare = os.open(name, os.O_PATH | _FOLDER, dir_fd=folder)
        try:
            # By descriptor, since the name may lead elsewhere by now.
            Path(f"/proc/self/fd/{bare}").chmod(0o700)
        finally:
            os.close(bare)
        return os.open(name, _FOLDER, dir_fd=folder)


class _Writable:
    """A folder in which this person may do everything for a while; `mode` is what it gets then."""

    def __init__(self, descriptor: int, mode: int) -> None:
        self._descriptor = descriptor
        self._mode = mode

    def __enter__(self) -> None:
        now = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
        if now & 0o700 != 0o700:
            os.fchmod(self._descriptor, now | 0o700)

    def __exit__(self, *_: object) -> None:
        if stat.S_IMODE(os.fstat(self._descriptor).st_mode) != self._mode:
            os.fchmod(self._descriptor, self._mode)


def _by_folder(tree: Tree) -> dict[str, dict[str, Entry]]:
    """Entries by the folder that holds them, named with its final `/` ('' is the root)."""
    folders: dict[str, dict[str, Entry]] = {}
    for path, entry in tree.items():
        at = path.rfind("/") + 1
        folders.setdefault(path[:at], {})[path[at:]] = entry
    return folders


def differing(old: Tree, new: Tree) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """(path, before, after) of everything that is not the same, by path."""
    for path in sorted({*old, *new}):
        before, after = old.get(path), new.get(path)
        if before != after:
            yield path, before, after
