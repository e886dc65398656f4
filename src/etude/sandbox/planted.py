"""What a guest left in a live folder for the person's own git to fall for: links in `.git`, through
which git would write files anywhere; operations to go on with; repositories in subfolders. Walks
by descriptors and follows no link, since the guest may change everything meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_DEEPEST = 64
"""Folders below one another; git makes no more."""
_OPERATIONS = (
    "MERGE_MSG",
    "SQUASH_MSG",
    "rebase-merge",
    "rebase-apply",
    "sequencer",
    "BISECT_START",
)
_CONFIGURING = ("config", "config.worktree", "commondir", "gitdir")
_DATA = ("objects", "refs", "logs")


def open_folder(path: Path) -> int:
    """A descriptor of a folder, no part of whose absolute path is a link. Raises OSError."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open("/", flags)
    try:
        for part in path.parts[1:]:
            below = os.open(part, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Planted:
    """What was not in the repositories (`.git`) of a folder when this was made. Raises OSError
    when they cannot be read."""

    def __init__(self, repositories: list[Path]) -> None:
        self._links = {
            repository: {
                path: target for path, target, _, _ in _links(repository, [], objects=True)
            }
            for repository in repositories
        }
        self._operations = {
            repository / name
            for repository in repositories
            for name in _OPERATIONS
            if os.path.lexists(repository / name)
        }
        self._removed: list[str] = []

    def remove_links(self, repositories: list[Path], *, objects: bool = True) -> list[str]:
        """Remove the links that came since to the repositories of now, those of their objects,
        which are many files, aside if so asked. A sentence for each that ever did, and for what
        could not be looked into."""
        told: list[str] = []
        for repository in repositories:
            before = self._links.get(repository, {})
            for path, target, name, folder in _links(repository, told, objects=objects):
                if _is_branch(path, target):
                    continue
                if before.get(path) == target:
                    # Left by a session that was killed, or the person's own: it stays.
                    if _leads_out(path, target):
                        told.append(
                            f"{_shown(repository / path)} is a link to {_shown(target)}; if you did"
                            " not make it, remove it, since git writes there"
                        )
                    continue
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                self._removed.append(
                    f"{_shown(repository / path)} was made a link to {_shown(target)} during this"
                    " session; it was removed, since git would have written there"
                )
        return [*self._removed, *told]

    def operations(self, repositories: list[Path]) -> list[str]:
        """A sentence for each operation that git would go on with and that began since."""
        return [
            f"{_shown(repository / name)} was made during this session; read it before you commit"
            " or continue what it belongs to, since git takes text and commands from it"
            for repository in repositories
            for name in _OPERATIONS
            if repository / name not in self._operations and os.path.lexists(repository / name)
        ]


def _is_branch(path: str, target: str) -> bool:
    """An old way to name the present branch, which git can still be told to use."""
    return path == "HEAD" and target.startswith("refs/") and ".." not in target.split("/")


def _leads_out(path: str, target: str) -> bool:
    return os.path.normpath(f"{path}/../{target}").startswith("..") or target.startswith("/")


def _links(
    repository: Path, told: list[str], *, objects: bool
) -> Iterator[tuple[str, str, str, int]]:
    """Each link in it: its path there, its target, its name in the folder of the descriptor,
    which is open only until the next one is asked for."""
    try:
        descriptor = open_folder(repository)
    except OSError:
        told.append(f"{_shown(repository)} cannot be opened, so it was not looked through")
        return
    try:
        yield from _links_below(descriptor, repository, "", told, objects=objects)
    finally:
        os.close(descriptor)


def _links_below(
    descriptor: int, repository: Path, prefix: str, told: list[str], *, objects: bool = True
) -> Iterator[tuple[str, str, str, int]]:
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
    except OSError:
        place = _shown(repository / prefix)
        told.append(f"{place} cannot be read, so it was not looked through for links")
        return
    try:
        with os.scandir(readable) as entries:
            found = [(e.name, e.is_symlink(), e.is_dir(follow_symlinks=False)) for e in entries]
        for name, link, folder in found:
            if link:
                with contextlib.suppress(OSError):  # It is gone again, or no link any more.
                    target = os.readlink(name, dir_fd=readable)
                    yield f"{prefix}{name}", target, name, readable
            elif folder and not objects and name == "objects":
                continue
            elif folder and prefix.count("/") >= _DEEPEST:
                place = _shown(repository / prefix)
                told.append(f"folders below {place} lie too deep to be looked through for links")
            elif folder:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    below = os.open(name, flags, dir_fd=readable)
                    try:
                        yield from _links_below(below, repository, f"{prefix}{name}/", told)
                    finally:
                        os.close(below)
    finally:
        os.close(readable)


def is_bare(names: Iterable[str]) -> bool:
    """Whether git takes a folder with these names in it for a repository."""
    found = set(names)
    return "HEAD" in found and ({"objects", "refs"} <= found or "commondir" in found)


def changed_repositories(root: Path, known: set[Path], since: int) -> list[str]:
    """A sentence for each repository in `root`, also a bare one, that was made or reconfigured
    since (ns); those that are known aside, which are guarded. Walks all folders."""
    found: list[str] = []
    for here, names, folders in _walk(root):
        place = _shown(here.relative_to(root))
        if names is None:
            if _changed(here, since):
                found.append(f"{place} cannot be read, so it was not looked through")
            continue
        if ".git" in names and here not in known and _reconfigured(here / ".git", since):
            found.append(
                f"{place}/.git was made or changed during this session; look at its config and"
                " hooks before git runs in it or in a folder above it"
            )
        if is_bare(names) and _reconfigured(here, since):
            found.append(
                f"{place} was made a bare git repository, or changed as one, during this session;"
                " look at its config and hooks before git runs in it"
            )
        folders[:] = [name for name in folders if name != ".git"]
    return sorted(found)


def _walk(root: Path) -> Iterator[tuple[Path, set[str] | None, list[str]]]:
    """Each folder, the names in it, or None if it cannot be read, and those of folders, which may
    be taken out. Not `os.walk`: that ends with an error where folders lie very deep."""
    stack = [root]
    while stack:
        here = stack.pop()
        folders: list[str] = []
        try:
            with os.scandir(here) as entries:
                found = [(each.name, each.is_dir(follow_symlinks=False)) for each in entries]
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            yield here, None, folders
            continue
        folders += [name for name, folder in found if folder]
        yield here, {name for name, _ in found}, folders
        stack += [here / name for name in folders]


def _reconfigured(git: Path, since: int) -> bool:
    """Whether what makes git run programs changed in a repository, or in those inside of it."""
    marks = ("", "HEAD", "hooks", *_CONFIGURING)
    if any(_changed(git / mark, since) for mark in marks):
        return True
    for here, names, folders in _walk(git):
        hooks = "hooks" in here.relative_to(git).parts
        if any(
            _changed(here / name, since)
            for name in names or ()
            if hooks or name in _CONFIGURING or name == "hooks"
        ):
            return True
        folders[:] = [name for name in folders if name not in _DATA]
    return False


def _changed(path: Path, since: int) -> bool:
    # The time of change cannot be set back by a program, unlike that of modification.
    try:
        return path.lstat().st_ctime_ns >= since
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # It lies deeper than a path can tell.


def _shown(path: Path | str) -> str:
    """A name that a guest chose, for a person's terminal."""
    return "".join(each if each.isprintable() else "?" for each in str(path))
