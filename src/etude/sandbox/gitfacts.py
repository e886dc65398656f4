"""What git says about a live folder: which of its files name programs that git runs, and where a
linked worktree or a submodule keeps its repository. Reads only; runs nothing of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from etude.errors import EtudeError
from etude.sandbox.gitindex import gitlinks
from etude.sandbox.joiner import REPOSITORY
from etude.sandbox.protocol import WORKSPACE_ROOT

_SECONDS = 30.0
_DATA_FOLDERS = ("objects", "refs", "logs")
_SETTINGS = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "safe.directory=*",
    "safe.bareRepository=explicit",
)
_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "",  # None: nothing is fetched, by no program that a repository names.
    "GIT_TERMINAL_PROMPT": "0",
}
_WORDS = re.compile(r"[\s\"'`;|&()=!<>]+")


@dataclass(frozen=True)
class Linked:
    """The repository of a folder whose `.git` is a file: `folder` on the host, `shown` in the
    guest. `common`, of a worktree, is the main repository: only its data can be written."""

    folder: Path
    common: Path | None

    @property
    def shown(self) -> str:
        """Where the guest sees `folder`."""
        return REPOSITORY if self.common is None else f"{REPOSITORY}/worktrees/{self.folder.name}"

    def arguments(self, scratch: Path) -> list[str]:
        """Bubblewrap's, for the repository and for a `.git` file that leads to it."""
        (scratch / "gitfile").write_text(f"gitdir: {self.shown}\n")
        found: list[str] = []
        if self.common is None:
            found += ["--bind", str(self.folder), REPOSITORY]
            config = scratch / "config"
            shutil.copyfile(self.folder / "config", config)
            _git(scratch, "config", "--file", str(config), "core.worktree", WORKSPACE_ROOT)
            found += ["--ro-bind", str(config), f"{REPOSITORY}/config"]
        else:
            found += ["--ro-bind", str(self.common), REPOSITORY]
            for name in _DATA_FOLDERS:
                (self.common / name).mkdir(exist_ok=True)
                found += ["--bind", str(self.common / name), f"{REPOSITORY}/{name}"]
            (scratch / "gitdir").write_text(f"{WORKSPACE_ROOT}/.git\n")
            found += ["--bind", str(self.folder), self.shown]
            found += ["--ro-bind", str(scratch / "gitdir"), f"{self.shown}/gitdir"]
        return [*found, "--ro-bind", str(scratch / "gitfile"), f"{WORKSPACE_ROOT}/.git"]


@dataclass(frozen=True)
class GitFacts:
    """Paths are on the host and inside the folder, `linked` aside. `submodules` are the folders
    of submodules, at any depth; `hook_folders` hold hooks; `named_files` are files that the
    configuration includes or names in a command."""

    submodules: tuple[Path, ...] = ()
    hook_folders: tuple[Path, ...] = ()
    named_files: tuple[Path, ...] = ()
    linked: Linked | None = None
    identity: tuple[tuple[str, str], ...] = ()

    def guest_settings(self) -> str:
        """Git's settings for the guest: who commits, and that the folder is to be trusted there,
        whoever owns it."""
        lines = ["[safe]", "\tdirectory = *", "[user]"]
        lines += [f"\t{key} = {_quoted(value)}" for key, value in self.identity]
        return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def read_facts(root: Path) -> GitFacts:
    """Ask git about `root`, a resolved path. Without git on this machine there is nothing that
    could run. Raises EtudeError when git fails."""
    if shutil.which("git") is None:
        return GitFacts()
    top = next((folder for folder in (root, *root.parents) if is_repository(folder)), root)
    hooks: set[Path] = set()
    files: set[Path] = set()
    identity: dict[str, str] = {}
    listed = _git(root, "config", "--list", "--includes", "--show-origin", "-z").split(b"\0")
    for origin, entry in zip(listed[::2], listed[1::2], strict=False):
        key, _, value = entry.decode(errors="surrogateescape").partition("\n")
        source = _source(origin.decode(errors="surrogateescape"), root)
        if source is not None:
            files.add(source)
        if key in ("user.name", "user.email"):
            identity[key.removeprefix("user.")] = value
        elif key == "core.hookspath":
            hooks.add(_resolved(value, top))
        elif key == "include.path" or (key.startswith("includeif.") and key.endswith(".path")):
            files.add(_resolved(value, top if source is None else source.parent))
        else:
            words = (_resolved(word, top) for word in _WORDS.split(value) if word)
            files |= {word for word in words if _is_file(word)}
    return GitFacts(
        submodules=tuple(sorted(_submodules(root))) if top == root else (),
        hook_folders=tuple(sorted(path for path in hooks if _inside(path, root))),
        named_files=tuple(sorted(path for path in files if _inside(path, root))),
        linked=_linked(root),
        identity=tuple(sorted(identity.items())),
    )


def _git(folder: Path, *arguments: str) -> bytes:
    """Git's answer, with nothing that could make it run a program. Never asked in a repository
    below the folder, nor for what needs objects. Raises EtudeError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), "--no-optional-locks", "--no-pager"]
    for setting in _SETTINGS:
        command += ["-c", setting]
    try:
        done = subprocess.run(
            [*command, *arguments],
            env={**environment, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise EtudeError(f"git gave no answer about {folder} in {_SECONDS:.0f} s") from None
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
        raise EtudeError(f"git cannot read {folder}, so it cannot be a live workspace: {words}")
    return done.stdout


def is_repository(folder: Path) -> bool:
    """Whether it is the working tree of one, as far as its `.git` shows."""
    git = folder / ".git"
    return git.is_file() or (git / "HEAD").exists()


def _resolved(value: str, base: Path) -> Path:
    # Not `resolve`: whether links are on the way is for the guard to find.
    return Path(os.path.normpath(base / Path(value).expanduser()))


def _source(origin: str, root: Path) -> Path | None:
    kind, _, name = origin.partition(":")
    return _resolved(name, root) if kind == "file" else None


def _inside(path: Path, root: Path) -> bool:
    """Below the folder, and not what is guarded anyway."""
    return path.is_relative_to(root) and path != root and path.relative_to(root).parts[0] != ".git"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # Too long a name, a null byte: no path of a file.
        return False


def _submodules(root: Path) -> set[Path]:
    """Raises EtudeError when the folder's own index cannot be read. One below that cannot be read
    names none: git can do no more with it."""
    found: set[Path] = set()
    stack = [root]
    while stack:
        folder = stack.pop()
        if not is_repository(folder):
            continue
        git = folder / ".git"
        try:
            names = gitlinks(_target(git) if git.is_file() else git)
        except (OSError, ValueError) as error:
            if folder == root:
                raise EtudeError(
                    f"git's index of {root} cannot be read, so it cannot be a live workspace: "
                    f"{error}"
                ) from error
            continue
        for name in names:
            path = folder / name
            if _is_below(name) and path.is_dir() and path.resolve() == path and path not in found:
                found.add(path)
                stack.append(path)
    return found


def _is_below(name: str) -> bool:
    """Whether a path from an index leads downwards, and into no repository."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or part.lower() == ".git" for part in parts)


def _target(pointer: Path) -> Path:
    """The folder that a `.git` file names."""
    text = pointer.read_text(errors="surrogateescape").strip()
    return _resolved(text.removeprefix("gitdir:").strip(), pointer.parent).resolve()


def repositories_of(pointer: Path, root: Path) -> list[Path]:
    """The repositories that a `.git` file leads to, where they lie in the folder itself and are
    not below an inner one's `modules` or `worktrees`, which are guarded as a whole."""
    folder = _target(pointer)
    found = [folder]
    if (folder / "commondir").is_file():
        found.append(_resolved((folder / "commondir").read_text().strip(), folder).resolve())
    return [
        path
        for path in found
        if path.is_relative_to(root)
        and (path / "HEAD").is_file()
        and not {"modules", "worktrees"} & set(path.relative_to(root).parts)
    ]


def _linked(root: Path) -> Linked | None:
    """The repository outside that a `.git` file names, if that one names this folder in turn: a
    file alone, which anyone could have written, opens no other folder to the guest."""
    pointer = root / ".git"
    if pointer.is_symlink() or not pointer.is_file():
        return None
    folder = _target(pointer)
    if folder.is_relative_to(root):
        return None
    back = folder / "gitdir"
    if (folder / "commondir").is_file() and back.is_file():
        common = _resolved((folder / "commondir").read_text().strip(), folder).resolve()
        named = _resolved(back.read_text(errors="surrogateescape").strip(), folder).resolve()
        if named == pointer and folder.parent == common / "worktrees":
            return Linked(folder, common)
    elif (folder / "config").is_file() and (folder / "HEAD").is_file():
        try:
            value = _git(root, "config", "--file", str(folder / "config"), "core.worktree")
        except EtudeError:
            return None  # It names no folder.
        if _resolved(os.fsdecode(value).rstrip("\n"), folder).resolve() == root:
            return Linked(folder, None)
    return None
