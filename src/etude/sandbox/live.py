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
`git status` in the outer one once a guest added it to the index. `changed_repositories` finds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from pathlib import Path

from etude.errors import EtudeError
from etude.machine import state_folder
from etude.sandbox.gitfacts import GitFacts, read_facts, repositories_of
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
        self._scratch = scratch
        # Files take their times from a clock that ticks more slowly than ours.
        self._since = time.time_ns() - _TICK_NS
        self._made: list[Path] = []
        key = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:32]
        self._journal = state_folder() / "live" / key
        self._facts: tuple[tuple[object, ...], GitFacts] | None = None
        self._lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _share(self._lock, self.root)
            self.arguments = self._arguments()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the stand-ins, unless another live workspace of the folder needs them."""
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
        """What git says about the folder, asked again when its files changed."""
        git = self.root / ".git"
        signature = tuple(_state(path) for path in (git, git / "config", git / "index"))
        if self._facts is None or self._facts[0] != signature:
            self._facts = (signature, read_facts(self.root))
        return self._facts[1]

    def guarded(self) -> list[str]:
        """Paths in the guest that the next command must find read-only; makes the stand-ins.
        Raises EtudeError and OSError."""
        facts = self.facts()
        found: list[Path] = []
        for folder in (self.root, *facts.submodules):
            git = folder / ".git"
            if git.is_symlink():
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
        """Repositories in subfolders, relative to the folder, that were made or reconfigured since
        it is shown live, by whoever; submodules are guarded and left out. Walks all folders."""
        guarded = {self.root, *self.facts().submodules}
        found: list[str] = []
        for folder, folders, files in os.walk(self.root):
            here = Path(folder)
            if ".git" in (*folders, *files) and here not in guarded:
                git = here / ".git"
                places = (git, git / "config", git / "hooks", *(git / name for name in _FILES))
                if any(self._changed(place) for place in places):
                    found.append(str(here.relative_to(self.root)))
            folders[:] = [name for name in folders if name != ".git"]
        return sorted(found)

    def _changed(self, path: Path) -> bool:
        # The time of change cannot be set back by a program, unlike that of modification.
        try:
            return path.lstat().st_ctime_ns >= self._since
        except (FileNotFoundError, NotADirectoryError):
            return False

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
            path.mkdir()
            self._made.append(path)
        elif path.name == ".git" and path not in self._made and not any(path.iterdir()):
            self._made.append(path)  # Left by a session that was killed.
        return path

    def _file(self, path: Path, data: bytes) -> Path:
        if path.is_symlink():
            raise EtudeError(_link(path))
        if not path.exists():
            # Never half written: git outside may look at any moment.
            draft = path.with_name(f"{path.name}{_DRAFT}{os.getpid()}")
            self._make_note(path)
            self._make_note(draft)
            draft.write_bytes(data)
            draft.rename(path)
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
