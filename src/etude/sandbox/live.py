"""A person's own folder as the workspace: what of it must not be written, although the rest is.

Git runs programs that its own files name: hooks, filters, file-system monitors, editors. Were a
guest able to write those files, the person's next `git status` outside would run what it wrote.
So these are guarded: read-only for each command, with every folder that leads to them held in
place. Files that git would look for but that are not there cannot be guarded, so harmless ones
stand in for them until the last live workspace of the folder is closed: empty folders, an empty
`config.worktree`, and a `commondir` that names the folder itself (git takes another one for the
whole repository: its configuration and hooks). What was made is noted first, in the state folder,
so that the next one to close removes also what a session that was killed left behind.

Not covered, because mounts cannot forbid a name everywhere: a *new* repository that a guest makes
in a subfolder, or one there that is no submodule. Whoever runs git there trusts it, and so does
`git status` in the outer one once a guest added it to the index. Nor is what git writes all the
time, such as the index: links there are removed, and operations that began are told. See `planted`;
`changed_repositories` tells the person of all of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from etude.errors import EtudeError
from etude.machine import state_folder
from etude.sandbox.gitfacts import GitFacts, is_repository, read_facts, repositories_of
from etude.sandbox.planted import Planted, changed_repositories, is_bare, open_folder
from etude.sandbox.protocol import WORKSPACE_ROOT

OWN_FOLDER = ".etude"
"""Holds what a project says an agent may not do; nothing in it may be lifted by the agent."""
_FOLDERS = ("hooks", "info", "modules", "worktrees", "remotes", "branches")
_FILES = {"config": b"", "config.worktree": b"", "commondir": b".\n"}
"""Name → what stands in for it."""
_DRAFT = ".etude-"
_LOCK_SECONDS = 10.0
_TICK_NS = 20_000_000


class LiveFolder:
    """A folder shown live. `close` removes what stood in for missing files. Raises EtudeError for
    a folder that cannot be made safe, OSError when it cannot be read.

    `scratch` is a folder of ours for what the guest sees in place of the person's files.
    """

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root.resolve()
        home = Path.home().resolve()
        if self.root in (home, *home.parents):
            raise EtudeError(
                f"{self.root} holds your home folder, so it cannot be a live workspace;"
                " start Etude in a project's folder"
            )
        names = [path.name for path in self.root.iterdir()]
        if is_bare(names) and not is_repository(self.root):
            raise EtudeError(
                f"{self.root} is a bare git repository, so it cannot be a live workspace;"
                " start Etude in a working tree of it"
            )
        self._scratch = scratch
        # Files take their times from a clock that ticks more slowly than ours.
        self._since = time.time_ns() - _TICK_NS
        self._made: list[Path] = []
        key = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:32]
        self._journal = state_folder() / "live" / key
        self._facts: tuple[tuple[object, ...], GitFacts] | None = None
        self._known: tuple[Path, ...] | None = None
        self._planted: Planted | None = None
        self._lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _share(self._lock, self.root)
            self.arguments = self._arguments()
            self._planted = Planted(self._repositories())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove planted links, and the stand-ins unless another live workspace of the folder
        needs them."""
        if self._planted is not None:
            with contextlib.suppress(OSError, EtudeError):
                self._planted.remove_links(self._repositories())
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            noted = [path for path in self._noted() if path not in self._made]
            for path in (*reversed(noted), *reversed(self._made)):
                with contextlib.suppress(OSError):
                    _remove(path)
            with contextlib.suppress(OSError):
                self._journal.unlink(missing_ok=True)
        os.close(self._lock)

    def _make_note(self, path: Path) -> None:
        """Before the path is made. One write each, so that sessions side by side do not mix."""
        line = f"{json.dumps(str(path))}\n".encode()
        try:
            self._journal.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._journal.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            raise EtudeError(
                f"{self._journal} cannot be written ({error.strerror}), so what stands in for git's"
                " files could not be removed later; make the folder writable or set ETUDE_STATE"
            ) from error

    def _noted(self) -> list[Path]:
        """What sessions noted that did not end well, and those that closed before this one."""
        found: list[Path] = []
        with contextlib.suppress(OSError):
            for line in self._journal.read_bytes().splitlines():
                # A line may be half written: its session was killed before it made anything.
                with contextlib.suppress(ValueError):
                    found.append(Path(str(json.loads(line))))
        return found

    def _arguments(self) -> list[str]:
        """For the guest that stays."""
        facts = self.facts()
        settings = self._scratch / "gitconfig"
        settings.write_text(facts.guest_settings())
        found = ["--bind", str(self.root), WORKSPACE_ROOT]
        found += ["--ro-bind", str(settings), "/etc/gitconfig"]
        if facts.linked is not None:
            found += facts.linked.arguments(self._scratch)
        return found

    def facts(self) -> GitFacts:
        """What git says about the folder, asked again when its configuration changed. Submodules
        are those that were there at first: a guest may write the index, and what it adds there is
        its own."""
        git = self.root / ".git"
        signature = tuple(_state(path) for path in (git, git / "config"))
        if self._facts is None or self._facts[0] != signature:
            self._facts = (signature, read_facts(self.root))
        facts = self._facts[1]
        # One that was taken away and comes back is new.
        known = facts.submodules if self._known is None else self._known
        self._known = tuple(path for path in known if path.is_dir())
        return replace(facts, submodules=self._known)

    def _repositories(self) -> list[Path]:
        """Where git keeps what it writes for the folder and its submodules."""
        facts = self.facts()
        found: list[Path] = []
        for folder in (self.root, *facts.submodules):
            git = folder / ".git"
            if git.is_symlink():
                raise EtudeError(_link(git))
            if git.is_file():
                found += repositories_of(git, self.root)
            elif git.is_dir():
                found.append(git)
        if facts.linked is not None:
            found.append(facts.linked.folder)
            if facts.linked.common is not None:
                found.append(facts.linked.common)
        return found

    def guarded(self) -> list[str]:
        """Paths in the guest that the next command must find read-only; makes the stand-ins, and
        removes planted links. Raises EtudeError and OSError."""
        facts = self.facts()
        if self._planted is not None:
            self._planted.remove_links(self._repositories(), objects=False)
        found: list[Path] = []
        for folder in (self.root, *facts.submodules):
            git = folder / ".git"
            if git.is_symlink() or folder.resolve() != folder:
                raise EtudeError(_link(git))
            if git.is_file():
                found.append(git)
                for repository in repositories_of(git, self.root):
                    found += self._of_repository(repository)
            elif (git / "HEAD").exists():
                found += self._of_repository(git)
            else:
                found.append(self._folder(git))
        own = self.root / OWN_FOLDER
        if own.is_dir() and not own.is_symlink():
            found.append(own)
        found += [self._named(path, folder=True) for path in facts.hook_folders]
        found += [self._named(path, folder=False) for path in facts.named_files]
        shown = [f"{WORKSPACE_ROOT}/{path.relative_to(self.root)}" for path in found]
        if facts.linked is not None:
            shown += self._of_linked(facts)
        return sorted(set(shown))

    def identities(self, guarded: list[str]) -> list[object]:
        """Which files the guarded paths are: changes when one is replaced from outside, which
        takes the guard away from commands that run."""
        return [
            _identity(self.root / path.removeprefix(f"{WORKSPACE_ROOT}/"))
            for path in guarded
            if path.startswith(f"{WORKSPACE_ROOT}/")
        ]

    def changed_repositories(self) -> list[str]:
        """Sentences for the person: what was made in the folder since it is shown live, by
        whoever, that their own git may fall for. Removes planted links. Walks all folders."""
        assert self._planted is not None
        known = {self.root, *self.facts().submodules}
        found = changed_repositories(self.root, known, self._since)
        repositories = self._repositories()
        links = self._planted.remove_links(repositories)
        return [*links, *self._planted.operations(repositories), *found]

    def _of_repository(self, git: Path) -> list[Path]:
        folders = [self._folder(git / name) for name in _FOLDERS]
        return folders + [self._file(git / name, data) for name, data in _FILES.items()]

    def _of_linked(self, facts: GitFacts) -> list[str]:
        assert facts.linked is not None
        git, shown = facts.linked.folder, facts.linked.shown
        if facts.linked.common is None:
            names = [path.name for path in self._of_repository(git)]
        else:
            self._file(git / "config.worktree", b"")
            names = ["commondir", "gitdir", "config.worktree"]
        return [f"{shown}/{name}" for name in names]

    def _folder(self, path: Path) -> Path:
        if path.is_symlink():
            raise EtudeError(_link(path))
        if not path.exists():
            self._make_note(path)
            with _opened(path.parent) as folder:
                os.mkdir(path.name, dir_fd=folder)
            self._made.append(path)
        elif path.name == ".git" and path not in self._made and not any(path.iterdir()):
            self._made.append(path)  # Left by a session that was killed.
        return path

    def _file(self, path: Path, data: bytes) -> Path:
        if path.is_symlink():
            raise EtudeError(_link(path))
        if not path.exists():
            # Never half written: git outside may look at any moment.
            draft = path.with_name(f"{path.name}{_DRAFT}{secrets.token_hex(8)}")
            self._make_note(path)
            self._make_note(draft)
            # Where the guest may write: nothing that it put there is followed or written to.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with _opened(path.parent) as folder:
                with os.fdopen(os.open(draft.name, flags, 0o644, dir_fd=folder), "wb") as file:
                    file.write(data)
                os.rename(draft.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            self._made.append(path)
        elif path.name == "commondir" and path not in self._made and path.read_bytes() == data:
            self._made.append(path)
        return path

    def _named(self, path: Path, *, folder: bool) -> Path:
        """A path that git's configuration names."""
        if path.resolve() != path:
            raise EtudeError(_link(path))
        if folder and not path.exists():
            missing = [each for each in (path, *path.parents) if not each.exists()]
            for each in reversed(missing):
                self._make_note(each)
            path.mkdir(parents=True)
            self._made += reversed(missing)
        if not path.exists():
            raise EtudeError(
                f"git's configuration includes {path}, which does not exist; create it or remove"
                " the include, so that nothing else can create it"
            )
        return path


@contextlib.contextmanager
def _opened(folder: Path) -> Generator[int]:
    descriptor = open_folder(folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a stand-in that is still what we made. Raises OSError."""
    if path.is_symlink() or path.parent.resolve() != path.parent:
        return
    if path.is_dir():
        path.rmdir()
    elif path.read_bytes() == _FILES.get(path.name.partition(_DRAFT)[0]):
        path.unlink()


def _link(path: Path) -> str:
    return (
        f"{path} is, or lies behind, a symbolic link, which cannot be protected from the agent;"
        " replace the link to work live in this folder"
    )


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (info.st_dev, info.st_ino, info.st_mode)


def _state(path: Path) -> tuple[int, ...] | None:
    identity = _identity(path)
    if identity is None or path.is_dir():
        return identity
    info = path.lstat()
    return (*identity, info.st_size, info.st_mtime_ns)


def _share(descriptor: int, root: Path) -> None:
    """Take the folder's lock beside others. Someone who has it alone is only tidying up."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise EtudeError(f"another program keeps {root} locked; try again later") from None
            time.sleep(0.05)
        else:
            return
