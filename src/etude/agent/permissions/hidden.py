"""Which files of a project a `deny read` rule names at this moment, for the mounts that hide them.

The project is walked without following links. A folder is read again only when its modification
time says so. What was hidden once stays hidden under every other name that it has or gets: a
command may rename the folder around it, or a second name (a hard link) may have been there before.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.agent.permissions.rules import PathRule, fixed_path
from etude.sandbox.protocol import WORKSPACE_ROOT

_UNSURE_NS = 100_000_000
"""A folder changed so shortly before it was read may have changed again within the same tick."""
_NOT_WALKED = frozenset({".git"})


@dataclass(frozen=True)
class _Entry:
    name: str
    inode: int
    folder: bool


@dataclass(frozen=True)
class _Folder:
    """What one folder held when it was read; `named` are the paths that the rules name."""

    changed_ns: int
    read_ns: int
    entries: tuple[_Entry, ...]
    inodes: frozenset[int]
    named: tuple[str, ...]
    inner: tuple[str, ...]
    """Paths of the folders to go on with."""


class HiddenFiles:
    """The hidden paths of a project, relative to its root: those that rules name, and `files`."""

    def __init__(self, project: Path, rules: Sequence[PathRule], files: Sequence[str] = ()) -> None:
        self._root = project
        names = [(rule, fixed_path(rule.pattern.removesuffix("/**"))) for rule in rules]
        self._fixed = [path for _, path in names if path is not None]
        self._fixed += [f"{WORKSPACE_ROOT}/{path}" for path in files]
        self._open = [rule.regex for rule, path in names if path is None]
        self._known: dict[str, _Folder] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        """Inode numbers of all that was ever hidden, with size and time of change: numbers of
        files that are gone are used again."""

    def now(self) -> tuple[str, ...]:
        """Sorted; nothing that lies in a folder that is hidden itself. Raises OSError when the
        project cannot be read."""
        if not self._fixed and not self._open:
            return ()
        found: set[str] = set()
        for path in self._fixed:
            inside = path.removeprefix(f"{WORKSPACE_ROOT}/")
            if inside != path:
                self._hide(inside, found)
        # By name first: another name of the same file may stand before it.
        for folder, read in list(self._walk(found)):
            if self._seen.keys().isdisjoint(read.inodes):
                continue
            for entry in read.entries:
                path = _join(folder, entry.name)
                if entry.inode in self._seen and self._same(path):
                    found.add(path)
        return tuple(sorted(path for path in found if not _within(path, found)))

    def _walk(self, found: set[str]) -> Iterator[tuple[str, _Folder]]:
        """Every folder that is not hidden; hides what the patterns name."""
        known: dict[str, _Folder] = {}
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            read = self._read(folder)
            if read is None:
                continue
            known[folder] = read
            for path in read.named:
                self._hide(path, found)
            waiting.extend(path for path in read.inner if path not in found)
            yield folder, read
        self._known = known

    def _read(self, folder: str) -> _Folder | None:
        """A folder, from memory when it has not changed; None when it is gone."""
        path = f"{self._root}/{folder}"  # Plain strings: this is done for every folder each time.
        try:
            changed = os.lstat(path).st_mtime_ns
            before = self._known.get(folder)
            if (
                before is not None
                and before.changed_ns == changed
                and before.read_ns - changed > _UNSURE_NS
            ):
                return before
            now = time.time_ns()
            with os.scandir(path) as found:
                entries = tuple(
                    _Entry(item.name, item.inode(), item.is_dir(follow_symlinks=False))
                    for item in found
                )
        except (FileNotFoundError, NotADirectoryError):
            return None
        paths = [(_join(folder, entry.name), entry) for entry in entries]
        return _Folder(
            changed,
            now,
            entries,
            frozenset(entry.inode for entry in entries),
            tuple(path for path, _ in paths if self._names(path)),
            tuple(path for path, e in paths if e.folder and e.name not in _NOT_WALKED),
        )

    def _names(self, path: str) -> bool:
        """Whether a rule names this path. Folders above it need no look: they are not walked."""
        return any(regex.fullmatch(f"{WORKSPACE_ROOT}/{path}") for regex in self._open)

    def _hide(self, path: str, found: set[str]) -> None:
        """Hide a path; of a link what it leads to, since a mount follows it."""
        full = self._root / path
        try:
            status = full.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISLNK(status.st_mode):
            root = os.path.realpath(self._root)
            target = os.path.realpath(full)  # A circle of links ends in a link, which is no file.
            if target.startswith(f"{root}/") and not Path(target).is_symlink():
                self._hide(os.path.relpath(target, root), found)
            return
        found.add(path)
        known = self._seen.get(status.st_ino)
        self._seen[status.st_ino] = (status.st_size, status.st_mtime_ns)
        if stat.S_ISDIR(status.st_mode) and known != self._seen[status.st_ino]:
            for parent, _, names in os.walk(full):
                for name in names:
                    inner = (Path(parent) / name).lstat()
                    if stat.S_ISREG(inner.st_mode):
                        self._seen[inner.st_ino] = (inner.st_size, inner.st_mtime_ns)

    def _same(self, path: str) -> bool:
        """Whether what stands there is still what was hidden, not a later file of that number."""
        try:
            status = (self._root / path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._seen.get(status.st_ino) == (status.st_size, status.st_mtime_ns)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _within(path: str, found: set[str]) -> bool:
    """Whether a folder above a path is hidden already."""
    while "/" in path:
        path = path.rsplit("/", 1)[0]
        if path in found:
            return True
    return False
