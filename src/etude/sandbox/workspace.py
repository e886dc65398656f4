"""The bubblewrap workspace: every operation on files that follows a path runs inside the guest."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from etude.sandbox.launcher import Command, Ended, Launcher
from etude.sandbox.layers import delete_tree, diff_layer
from etude.sandbox.limits import Group
from etude.sandbox.process import Capture, uninterrupted
from etude.sandbox.protocol import (
    WORKSPACE_ROOT,
    Diff,
    ExecResult,
    Image,
    Limits,
    WorkspaceError,
)
from etude.sandbox.system import guest_environment

P = ParamSpec("P")
T = TypeVar("T")
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
_STDERR_BYTES = 8 << 10


class BubblewrapWorkspace:
    """One copy of an image. Its operations take turns: overlayfs allows one mount of a layer.
    `/tmp` lasts from one command to the next and is forked and restored with the files."""

    def __init__(self, launcher: Launcher, image: Image, limits: Limits, layer: Path) -> None:
        self._launcher = launcher
        self._image = image
        self._limits = limits
        self.layer = layer
        self._group: Group | None = None
        self._grouped = False
        self._snapshots: dict[str, Path] = {}
        self._turn = asyncio.Lock()
        self._running: asyncio.Task[Ended] | None = None
        self._closed = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        cwd: str = WORKSPACE_ROOT,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `Workspace.exec`. A command that cannot be found exits with 127, one that cannot
        be run (no such `cwd` either) with 126. One that exceeds the memory, the processes or the
        disk is killed: exit code 137, or 122 when the disk limit is seen only at its end, and
        the last line of `stderr` says which limit."""
        command = Command(
            argv=list(argv),
            env=guest_environment(self._image, env),
            cwd=_absolute(cwd),
            stdin=stdin,
        )
        stdout, stderr = Capture(self._limits.output_bytes), Capture(self._limits.output_bytes)
        ended = await self._run(command, timeout, stdout.feed, stderr)
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
        )

    async def _run(
        self,
        command: Command,
        timeout: float,
        stdout: Callable[[bytes], None],
        stderr: Capture,
    ) -> Ended:
        async with self._turn:
            self._check_open()
            if not self._grouped:
                self._group = self._launcher.new_group(self._limits)
                self._grouped = True
            task = asyncio.ensure_future(
                self._launcher.run(
                    self._image,
                    self.layer,
                    command,
                    self._limits,
                    self._group,
                    timeout,
                    stdout,
                    stderr,
                )
            )
            self._running = task
            try:
                # A second task, so that `close` can cancel the run without its caller.
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                task.cancel()
                await uninterrupted(_settled(task))
                if self._closed:
                    raise WorkspaceError("the workspace was closed while a command ran") from None
                raise
            finally:
                self._running = None

    def _check_open(self) -> None:
        if self._closed:
            raise WorkspaceError("the workspace is closed")

    async def read(self, path: str) -> bytes:
        """The bytes of a regular file as the guest sees it."""
        output = Capture(2 * self._limits.disk_bytes)
        await self._file(_READ, path, output, b"")
        if output.truncated:
            raise PermissionError(f"{path}: larger than the workspace's disk limit")
        return output.bytes()

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making missing parent folders."""
        if len(data) > self._limits.disk_bytes:
            raise PermissionError(f"{path}: larger than the workspace's disk limit")
        await self._file(_WRITE, path, Capture(_STDERR_BYTES), data)

    async def list(self, path: str = ".") -> list[str]:
        """Names in a folder, sorted; folders, and links to some, end with `/`."""
        output = Capture(2 * self._limits.disk_bytes)
        await self._file(_LIST, path, output, b"")
        entries = output.bytes().decode(errors="replace").split("\0")[:-1]
        return sorted(entry[1:] + "/" * (entry[0] == "d") for entry in entries)

    async def _file(self, script: str, path: str, output: Capture, data: bytes) -> None:
        if "\0" in path or not path:
            raise FileNotFoundError(f"{path!r}: no such file")
        command = Command(
            argv=["/bin/sh", "-c", script, "sh", _absolute(path)],
            env=_FILE_ENV,
            cwd="/",
            stdin=data,
        )
        stderr = Capture(_STDERR_BYTES)
        deadline = self._launcher.settings.file_seconds
        ended = await self._run(command, deadline, output.feed, stderr)
        if ended.timed_out:
            raise WorkspaceError(f"{path}: no answer from the guest in {deadline:.0f} s")
        if ended.note:
            raise PermissionError(f"{path}: {ended.note}")
        if ended.exit_code != 0:
            raise _refusal(path, stderr.text(), ended.exit_code)

    async def fork(self) -> BubblewrapWorkspace:
        """A new workspace with the same files; snapshots stay with this one."""
        async with self._turn:
            self._check_open()
            layer = await _in_thread(self._launcher.new_layer, self.layer)
        return BubblewrapWorkspace(self._launcher, self._image, self._limits, layer)

    async def snapshot(self) -> str:
        """Keep the present files under an id."""
        async with self._turn:
            self._check_open()
            name = secrets.token_hex(8)
            self._snapshots[name] = await _in_thread(self._launcher.new_layer, self.layer)
        return name

    async def restore(self, snapshot: str) -> None:
        """Back to the files of a snapshot, which stays. Raises KeyError for an unknown id."""
        async with self._turn:
            self._check_open()
            source = self._snapshots[snapshot]
            layer = await _in_thread(self._launcher.new_layer, source)
            old, self.layer = self.layer, layer
            await _in_thread(delete_tree, old)

    async def diff(self) -> Diff:
        """What differs from the image. Raises WorkspaceError if that is more than the disk limit
        allows."""
        async with self._turn:
            self._check_open()
            return await _in_thread(
                diff_layer, self.layer / "upper", self._image.root, self._limits.disk_bytes
            )

    async def close(self) -> None:
        """Kill what runs and delete what was written. Idempotent."""
        if not self._closed:
            self._closed = True
            await uninterrupted(self._delete())

    async def _delete(self) -> None:
        if self._running is not None:
            self._running.cancel()
        async with self._turn:
            if self._group is not None:
                await asyncio.to_thread(self._group.remove)
            for layer in (self.layer, *self._snapshots.values()):
                await asyncio.to_thread(delete_tree, layer)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{WORKSPACE_ROOT}/{path}"


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work on the disk off the loop. A thread cannot be stopped half way, so being cancelled
    waits for it. A failing disk is the sandbox's failure."""
    try:
        return await uninterrupted(asyncio.to_thread(work, *args, **kwargs))
    except OSError as error:
        raise WorkspaceError(f"could not work on a workspace's files: {error}") from error


async def _settled(task: asyncio.Task[Ended]) -> None:
    await asyncio.wait((task,))


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
