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
    """

    root: Path
    readonly: Mapping[Path, str] = field(default_factory=dict[Path, str])
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Rights:
    """What a view of a workspace may do. `readonly`: nothing below `/workspace` can be written.
    `hidden` are paths relative to it that cannot be read, written or removed. Both by mounts, so
    that no command, link or second name gets round them."""

    readonly: bool = False
    hidden: tuple[str, ...] = ()


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
    signal n."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    truncated: bool = False
    timed_out: bool = False


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
    ) -> ExecResult:
        """Run a command without a shell. Never blocks on a pipe that a grandchild holds; at
        `timeout` seconds, or when the caller is cancelled, every process of it is dead before
        this returns."""
        ...

    async def read(self, path: str) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making missing parent folders."""
        ...

    async def list(self, path: str = ".") -> list[str]:
        """Names in a folder, sorted; folders end with `/`."""
        ...

    def view(self, rights: Rights) -> Workspace:
        """The same files with fewer rights; a view of a view has those of both. Views share the
        workspace's life: closing one closes none of the others."""
        ...

    async def fork(self) -> Workspace:
        """A new workspace with the same files; running processes are not carried over."""
        ...

    async def snapshot(self) -> str:
        """Keep the present files under an id."""
        ...

    async def restore(self, snapshot: str) -> None:
        """Back to the files of a snapshot. Raises KeyError for an unknown id."""
        ...

    async def diff(self) -> Diff: ...
    async def close(self) -> None:
        """Kill what runs and delete what was written. Idempotent."""
        ...


class Sandbox(Protocol):
    """A backend that makes workspaces."""

    name: str

    async def create(self, image: Image, limits: Limits | None = None) -> Workspace: ...
    async def probe(self) -> str | None:
        """Run a guest. None when this machine can use the backend, else one sentence that says
        what is missing and how to mend it."""
        ...
