"""The bubblewrap workspace: every operation on files that follows a path runs inside the guest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.sandbox.launcher import Command
from etude.sandbox.place import Place, Run
from etude.sandbox.process import Capture
from etude.sandbox.protocol import (
    WORKSPACE_ROOT,
    Diff,
    ExecResult,
    Job,
    Rights,
    WorkspaceError,
)
from etude.sandbox.system import guest_environment

ALL = Rights()
_FILE_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
# Pipes and devices would block or never end. The messages are parsed by `_refusal`.
_REGULAR = (
    'if [ -e "$1" ] && [ ! -f "$1" ] && [ ! -d "$1" ]; then '
    'echo "$1: Not a regular file" >&2; exit 1; fi; '
)
_READ = _REGULAR + 'exec cat -- "$1"'
_WRITE = 'mkdir -p -- "${1%/*}/" || exit 1; ' + _REGULAR + 'exec tee -- "$1" >/dev/null'
_LIST = (
    'if [ -e "$1" ] && [ ! -d "$1" ]; then echo "$1: Not a directory" >&2; exit 1; fi; '
    'exec find "$1/" -mindepth 1 -maxdepth 1 -printf "%Y%f\\0"'
)
_READ_BYTES = 64 << 20
"""Longest file that is read whole: it is held in this process's memory."""
_STDERR_BYTES = 8 << 10


class BubblewrapWorkspace:
    """A view of one copy of an image, or of a live folder. `/tmp` lasts from one command to the
    next and is restored with the files; a fork has a copy of it unless the folder is live."""

    def __init__(self, place: Place, rights: Rights = ALL, *, view: bool = False) -> None:
        self._place = place
        self._rights = rights
        self._view = view
        self._closed = False

    @property
    def layer(self) -> Path:
        """Where on the host its writes are kept now."""
        return self._place.layer

    def _check_open(self) -> None:
        self._place.check_open()
        if self._closed:
            raise WorkspaceError("the view of the workspace is closed")

    def _command(
        self,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str] | None,
        stdin: bytes = b"",
    ) -> Command:
        if not argv:
            raise ValueError("no command to run")
        return Command(
            argv=list(argv),
            env=guest_environment(self._place.image, env),
            cwd=_absolute(cwd),
            stdin=stdin,
        )

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
        """See `Workspace.exec`. A command that cannot be found exits with 127, one that cannot
        be run (no such `cwd` either) with 126. One that exceeds the memory, the processes or the
        disk is killed: exit code 137, or 122 when the disk limit is seen only at its end, and
        the last line of `stderr` says which limit."""
        self._check_open()
        output_bytes = self._place.limits.output_bytes
        stdout, stderr = Capture(output_bytes), Capture(output_bytes)
        command = self._command(argv, cwd, env, stdin)
        ended, job = await self._place.run(
            Run(command, self._rights, timeout, stdout.feed, stderr, keep)
        )
        text = stderr.text()
        if ended.note:
            text = f"{text.rstrip()}\n[{ended.note}]\n".lstrip()
        return ExecResult(
            exit_code=ended.exit_code,
            stdout=stdout.text(),
            stderr=text,
            seconds=ended.seconds,
            truncated=stdout.truncated or stderr.truncated,
            timed_out=ended.timed_out,
            job=job,
        )

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORKSPACE_ROOT,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """See `Workspace.start`. A command that cannot be run is a job that ends at once."""
        self._check_open()
        return await self._place.start(self._command(argv, cwd, env), self._rights)

    async def jobs(self) -> list[Job]:
        """See `Workspace.jobs`."""
        self._check_open()
        return [job.state() for job in self._place.jobs()]

    async def output(self, job: str, since: int = 0) -> tuple[str, int]:
        """See `Workspace.output`."""
        self._check_open()
        return self._place.job(job).output(since)

    async def stop(self, job: str) -> None:
        """See `Workspace.stop`."""
        self._check_open()
        await self._place.job(job).stop()

    async def read(self, path: str) -> bytes:
        """The bytes of a regular file as the guest sees it."""
        most = min(self._place.limits.disk_bytes, _READ_BYTES)
        output = Capture(2 * most)
        await self._file(_READ, path, output, b"")
        if output.truncated or output.total > most:
            raise PermissionError(f"{path}: larger than {most >> 20} MB")
        return output.bytes()

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making missing parent folders."""
        if len(data) > self._place.limits.disk_bytes:
            raise PermissionError(f"{path}: larger than the workspace's disk limit")
        await self._file(_WRITE, path, Capture(_STDERR_BYTES), data)

    async def list(self, path: str = ".") -> list[str]:
        """Names in a folder, sorted; folders, and links to some, end with `/`."""
        output = Capture(2 * self._place.limits.disk_bytes)
        await self._file(_LIST, path, output, b"")
        entries = output.bytes().decode(errors="replace").split("\0")[:-1]
        return sorted(entry[1:] + "/" * (entry[0] == "d") for entry in entries)

    async def _file(self, script: str, path: str, output: Capture, data: bytes) -> None:
        self._check_open()
        if "\0" in path or not path:
            raise FileNotFoundError(f"{path!r}: no such file")
        command = Command(
            argv=["/bin/sh", "-c", script, "sh", _absolute(path)],
            env=_FILE_ENV,
            cwd="/",
            stdin=data,
        )
        stderr = Capture(_STDERR_BYTES)
        deadline = self._place.launcher.settings.file_seconds
        ended, _ = await self._place.run(Run(command, self._rights, deadline, output.feed, stderr))
        if ended.timed_out:
            raise WorkspaceError(f"{path}: no answer from the guest in {deadline:.0f} s")
        if ended.note:
            raise PermissionError(f"{path}: {ended.note}")
        if ended.exit_code != 0:
            raise _refusal(path, stderr.text(), ended.exit_code)

    def view(self, rights: Rights) -> BubblewrapWorkspace:
        """See `Workspace.view`."""
        return BubblewrapWorkspace(self._place, _both(self._rights, rights), view=True)

    async def fork(self) -> BubblewrapWorkspace:
        """See `Workspace.fork`; snapshots stay with this one."""
        self._check_open()
        return BubblewrapWorkspace(await self._place.fork(), self._rights)

    async def snapshot(self) -> str:
        """See `Workspace.snapshot`."""
        self._check_open()
        return await self._place.snapshot()

    async def restore(self, snapshot: str) -> None:
        """See `Workspace.restore`."""
        self._check_open()
        if self._rights != ALL:
            raise PermissionError("this view may not change all files of the workspace")
        await self._place.restore(snapshot)

    async def diff(self) -> Diff:
        """See `Workspace.diff`. Raises WorkspaceError if that is more than the disk limit
        allows."""
        self._check_open()
        diff = await self._place.diff()
        if not self._rights.hidden:
            return diff
        return Diff(
            {path: data for path, data in diff.files.items() if not self._hides(path)},
            tuple(path for path in diff.special if not self._hides(path)),
        )

    async def changed_repositories(self) -> list[str]:
        """Sentences for the person about what was made in a live folder since it was opened that
        git outside may fall for: repositories that were made or reconfigured, the submodules of
        then aside, operations to go on with, and links in `.git`, which this removes."""
        self._check_open()
        return await self._place.changed_repositories()

    def _hides(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{hidden}/") for hidden in self._rights.hidden)

    async def close(self) -> None:
        """See `Workspace.close`."""
        self._closed = True
        if not self._view:
            await self._place.close()


def _both(one: Rights, other: Rights) -> Rights:
    """What both allow. Raises ValueError for a path that is not below the workspace."""
    hidden = {*one.hidden, *map(_below_root, other.hidden)}
    protected = {*one.protected, *map(_below_root, other.protected)}
    readonly = one.readonly or other.readonly
    return Rights(readonly, tuple(sorted(hidden)), tuple(sorted(protected)))


def _below_root(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path or not parts:
        raise ValueError(f"{path!r}: a path of rights must be relative and inside the workspace")
    return "/".join(parts)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{WORKSPACE_ROOT}/{path}"


def _refusal(path: str, message: str, exit_code: int) -> OSError:
    """The error that a failed file command names in the last words of its message."""
    lines = message.strip().splitlines()
    reason = lines[-1].rpartition(": ")[2] if lines else f"exit code {exit_code}"
    kinds: dict[str, type[OSError]] = {
        "No such file or directory": FileNotFoundError,
        "Too many levels of symbolic links": FileNotFoundError,
        "Is a directory": IsADirectoryError,
        "Not a directory": NotADirectoryError,
        "File exists": NotADirectoryError,
    }
    return kinds.get(reason, PermissionError)(f"{path}: {reason}")
