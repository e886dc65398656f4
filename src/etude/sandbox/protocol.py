"""The workspace contract that every backend fulfils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WORKSPACE_ROOT = "/workspace"
"""Where the repository stands inside every sandbox."""


@dataclass(frozen=True)
class Image:
    """What a workspace starts from.

    `root` is the host folder shown, copy-on-write, at `/workspace`. `readonly` maps further host
    paths to where they appear inside, read-only (an environment, an interpreter). `env` is the
    whole environment of the guest beside a minimal PATH, HOME and LANG; the host's is never
    inherited.

    With `live`, `root` itself is shown: what is written there is written in the person's own
    folder at once, and nowhere else. What makes git run programs (hooks, configuration, and what
    these name) is read-only, so that no later git command of the person's runs what a guest wrote
    there; a folder that is no repository cannot be made one. See `live.py`.
    """

    root: Path
    readonly: Mapping[Path, str] = field(default_factory=dict[Path, str])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    live: bool = False


@dataclass(frozen=True)
class Rights:
    """What a view of a workspace may do. `readonly`: nothing below `/workspace` can be written.
    `hidden` are paths relative to it that cannot be read, written or removed: a file denies every
    access, a folder is empty; `protected` are such that cannot be written or removed. Those that
    do not exist when a command starts are ignored, a link stands for what it leads to in the
    workspace. All by mounts, for each command anew, so that no command and no link gets round
    them. A hard link is another name that a mount does not cover: name all names of such a file.
    Processes started with more rights keep theirs, and `/tmp` and the loopback network are shared
    with them."""

    readonly: bool = False
    hidden: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Ceilings of one workspace. `disk_bytes` caps a single written file as well."""

    memory_bytes: int = 2 << 30
    disk_bytes: int = 512 << 20
    processes: int = 256
    output_bytes: int = 64 << 10


@dataclass(frozen=True)
class ExecResult:
    """End of one command. `stdout`/`stderr` are head and tail where `truncated`; `timed_out` is
    true when the whole process tree was killed at the limit. `exit_code` is 128 + n after
    signal n. `job` is the background job that the command left behind, if that was allowed."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    truncated: bool = False
    timed_out: bool = False
    job: str = ""


@dataclass(frozen=True)
class Job:
    """A background job: the command as a shell would quote it, its age in seconds (at its end:
    how long it ran). It runs until all its processes have ended; `exit_code` is the command's
    own, 137 if it was stopped, None while it runs."""

    id: str
    command: str
    running: bool
    exit_code: int | None
    seconds: float


@dataclass(frozen=True)
class Diff:
    """Files that differ from the image: path relative to the root → new bytes, None if deleted.
    Paths that are no regular files (links, sockets, devices) are only named in `special`."""

    files: Mapping[str, bytes | None]
    special: tuple[str, ...] = ()


class WorkspaceError(Exception):
    """The sandbox itself failed (never: the command failed). Such a rollout is *not measured*."""


class Workspace(Protocol):
    """One isolated copy of a repository. All paths are inside the guest, absolute or relative to
    `/workspace`. Methods raise `WorkspaceError` when the sandbox fails; `read`, `write` and
    `list` raise FileNotFoundError, IsADirectoryError, NotADirectoryError or PermissionError as
    the guest sees it."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        cwd: str = WORKSPACE_ROOT,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        keep: bool = False,
    ) -> ExecResult:
        """Run a command without a shell. Never blocks on a pipe that a grandchild holds; at
        `timeout` seconds, or when the caller is cancelled, every process of it is dead before
        this returns. What the command leaves running at its own end dies too, or with `keep`
        becomes a background job. Commands may run side by side; each sees its own processes
        only."""
        ...

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORKSPACE_ROOT,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Start a background job without standard input; returns its id. Jobs share the files, the
        loopback network and the limits of all commands of the workspace, and die with it."""
        ...

    async def jobs(self) -> list[Job]:
        """All jobs of the workspace, those that ended included, oldest first."""
        ...

    async def output(self, job: str, since: int = 0) -> tuple[str, int]:
        """What a job wrote from byte `since` on, both streams together, and where the next call
        goes on. Only the last `output_bytes` are kept; a note says what was dropped. Raises
        KeyError for an unknown job."""
        ...

    async def stop(self, job: str) -> None:
        """Kill a job; all of it is dead on return. One that ended stays ended. Raises KeyError
        for an unknown job."""
        ...

    async def read(self, path: str) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making missing parent folders."""
        ...

    async def list(self, path: str = ".") -> list[str]:
        """Names in a folder, sorted; folders end with `/`."""
        ...

    def view(self, rights: Rights) -> Workspace:
        """The same workspace with fewer rights; a view of a view has those of both. Closing a view
        closes only that view, closing the workspace ends all. Raises ValueError for a hidden path
        that is absolute or leads upwards."""
        ...

    # Files are never copied or compared while they change: `fork`, `snapshot`, `restore` and
    # `diff` wait for running commands, and end the background jobs of a copy-on-write workspace.

    async def changed_repositories(self) -> list[str]:
        """Of a live workspace: sentences for the person about git repositories in it that were
        made or reconfigured while it was shown, operations that began, and links in `.git`, which
        this removes. Git runs what their files name, so a person should look first."""
        ...

    async def fork(self) -> Workspace:
        """A new workspace with the same files and rights; no process is carried over. That of a
        live workspace is copy-on-write over the folder as it is."""
        ...

    async def snapshot(self) -> str:
        """Keep the present files under an id. Raises WorkspaceError for a live workspace."""
        ...

    async def restore(self, snapshot: str) -> None:
        """Back to the files of a snapshot. Raises KeyError for an unknown id, PermissionError
        without the right to write, WorkspaceError for a live workspace."""
        ...

    async def diff(self) -> Diff:
        """What differs from the image, hidden paths left out; nothing in a live workspace."""
        ...

    async def close(self) -> None:
        """Kill what runs and delete what was written (not: in a live folder). Idempotent."""
        ...


class Sandbox(Protocol):
    """A backend that makes workspaces."""

    name: str

    async def create(self, image: Image, limits: Limits | None = None) -> Workspace: ...
    async def probe(self) -> str | None:
        """Run a guest. None when this machine can use the backend, else one sentence that says
        what is missing and how to mend it."""
        ...
