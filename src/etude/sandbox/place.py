"""What all views of one workspace share: its files, its guest, its limits, its jobs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from etude.errors import EtudeError
from etude.sandbox.holder import Holder
from etude.sandbox.jobs import BackgroundJob, Tail
from etude.sandbox.joined import JoinedProcess, Porter
from etude.sandbox.launcher import (
    JOINED_GROUPED,
    JOINED_OWN,
    Bounds,
    Command,
    Ended,
    Launcher,
    Tree,
)
from etude.sandbox.layers import delete_tree, diff_layer
from etude.sandbox.limits import Group
from etude.sandbox.live import LiveFolder
from etude.sandbox.process import Capture, uninterrupted
from etude.sandbox.protocol import (
    WORKSPACE_ROOT,
    Diff,
    Image,
    Limits,
    Rights,
    WorkspaceError,
)
from etude.sandbox.runfolder import free_bytes
from etude.sandbox.turns import Turns

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A command to run to its end, and who takes its output."""

    command: Command
    rights: Rights
    timeout: float
    stdout: Callable[[bytes], None]
    stderr: Capture
    keep: bool = False


class Place:
    """One guest that stays, started when the first command needs it, and again after its layer
    was exchanged or it died."""

    def __init__(self, launcher: Launcher, image: Image, limits: Limits, layer: Path) -> None:
        self.launcher = launcher
        self.image = image
        self.limits = limits
        self.layer = layer
        self._group: Group | None = None
        self._grouped = False
        self._holder: Holder | None = None
        self._porter: Porter | None = None
        self._live: LiveFolder | None = None
        self._opening = asyncio.Lock()
        self._turns = Turns()
        self._running: set[asyncio.Task[tuple[Ended, str]]] = set()
        self._snapshots: dict[str, Path] = {}
        self._jobs: dict[str, BackgroundJob] = {}
        self._closed = False

    def check_open(self) -> None:
        """Raises WorkspaceError after `close`."""
        if self._closed:
            raise WorkspaceError("the workspace is closed")

    async def open(self) -> tuple[Holder, Porter]:
        """The guest, running, and who starts commands in it. Raises WorkspaceError, and for a
        live folder EtudeError."""
        async with self._opening:
            self.check_open()
            if not self._grouped:
                self._group = self.launcher.new_group(self.limits, JOINED_GROUPED)
                self._grouped = True
            if self._holder is None or not self._holder.alive():
                await self._end_guest()
            if self._porter is None or not self._porter.alive():
                await self._end_porter()
                await self._begin()
            assert self._holder is not None
            assert self._porter is not None
            return self._holder, self._porter

    async def _begin(self) -> None:
        """A porter, and a guest if there is none: both take a while, so side by side."""
        seconds = self.launcher.settings.start_seconds
        coming = asyncio.ensure_future(self.launcher.porter(self.limits, self._group))
        try:
            if self._holder is None:
                self._holder = await self._new_holder()
                await self._holder.ready(seconds)
            self._porter = await coming
            await self._porter.enter(self._holder.entrance, seconds)
        except BaseException:
            coming.cancel()
            await uninterrupted(_settled(coming))
            if self._porter is None and not coming.cancelled() and coming.exception() is None:
                self._porter = coming.result()
            await self._end_guest()
            raise

    async def _new_holder(self) -> Holder:
        if self.image.live and self._live is None:
            self._live = await in_thread(LiveFolder, self.image.root, self.layer)
            await in_thread(self._live.guarded)
        arguments = None if self._live is None else self._live.arguments
        return self.launcher.holder(self.image, self.layer, arguments)

    async def _end_porter(self) -> None:
        porter, self._porter = self._porter, None
        if porter is not None:
            await uninterrupted(porter.end(self.launcher.settings.death_seconds))

    async def _end_guest(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.kill()
        await self._end_porter()
        if holder is not None:
            await uninterrupted(holder.end(self.launcher.settings.death_seconds))

    async def _guarded(self) -> list[str]:
        """What of a live folder the next command must find read-only."""
        if self._live is None:
            return []
        async with self._opening:
            try:
                return await in_thread(self._live.guarded)
            except EtudeError as error:
                raise WorkspaceError(str(error)) from error

    def _bounds(
        self, holder: Holder, porter: Porter, guarded: list[str], rights: Rights
    ) -> tuple[Bounds, Tree]:
        check = self._check_of(guarded, rights)
        tree = Tree((holder.monitor_pid, porter.pid), JOINED_OWN - 1)
        return Bounds(self.layer, self.limits, self._group, check), tree

    def _check_of(self, guarded: list[str], rights: Rights) -> Callable[[], str]:
        live = self._live
        if live is None:
            return lambda: ""
        before = live.identities(guarded)
        # A program outside that saves by renaming puts a file there that no mount covers.
        covered = [f"{WORKSPACE_ROOT}/{path}" for path in (*rights.hidden, *rights.protected)]
        covered_before = live.identities(covered)

        def check() -> str:
            free = free_bytes(live.root)
            if free < self.launcher.settings.min_free_bytes:
                return f"only {free >> 20} MB are free on the disk of {live.root}"
            if live.identities(guarded) != before:
                return (
                    "git's own files were replaced from outside, which unprotects them; try again"
                )
            if live.identities(covered) != covered_before:
                return "a hidden or protected file was replaced from outside; try again"
            return ""

        return check

    async def run(self, run: Run) -> tuple[Ended, str]:
        """Run a command to its end. With it the id of the job that it left, or ""."""
        async with self._turns.shared():
            self.check_open()
            # A second task, so that `close` can cancel the run without its caller.
            task = asyncio.ensure_future(self._run(run))
            self._running.add(task)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                task.cancel()
                await uninterrupted(_settled(task))
                if self._closed:
                    raise WorkspaceError("the workspace was closed while a command ran") from None
                raise
            finally:
                self._running.discard(task)

    async def _run(self, run: Run) -> tuple[Ended, str]:
        holder, porter = await self.open()
        guarded = await self._guarded()
        bounds, tree = self._bounds(holder, porter, guarded, run.rights)
        process = self.launcher.join(
            porter,
            run.command,
            run.rights,
            run.stdout,
            run.stderr.feed,
            guarded=guarded,
            keep=run.keep,
        )
        ended = await self.launcher.run(
            process, run.command.stdin, bounds, tree, run.timeout, run.stderr
        )
        job = self._adopt(process, run.command, bounds, tree) if process.left else ""
        return ended, job

    def _adopt(self, process: JoinedProcess, command: Command, bounds: Bounds, tree: Tree) -> str:
        """Make a job of what a command left running; what it wrote before was the command's."""
        tail = Tail(self.limits.output_bytes)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.drain()
                pipe.sink = tail.feed
        process.stdin.close()
        return self._new_job(process, command, tail, bounds, tree)

    def _new_job(
        self, process: JoinedProcess, command: Command, tail: Tail, bounds: Bounds, tree: Tree
    ) -> str:
        name = str(len(self._jobs) + 1)
        self._jobs[name] = BackgroundJob(
            name,
            shlex.join(command.argv),
            process,
            tail,
            self.launcher.watch(bounds, tree, self.limits.disk_bytes),
            self.launcher.settings.death_seconds,
        )
        return name

    async def start(self, command: Command, rights: Rights) -> str:
        """Start a background job. Raises WorkspaceError."""
        async with self._turns.shared():
            self.check_open()
            holder, porter = await self.open()
            guarded = await self._guarded()
            bounds, tree = self._bounds(holder, porter, guarded, rights)
            tail = Tail(self.limits.output_bytes)
            process = self.launcher.join(
                porter, command, rights, tail.feed, None, guarded=guarded, keep=True
            )
            try:
                process.stdin.close()
                await self.launcher.begin(process, bounds, tree)
                if not process.joined:
                    raise WorkspaceError(f"a job could not be started: {process.failure}")
            except BaseException:
                await process.end(self.launcher.settings.death_seconds)
                raise
            return self._new_job(process, command, tail, bounds, tree)

    def job(self, name: str) -> BackgroundJob:
        """A job by its id. Raises KeyError."""
        self.check_open()
        return self._jobs[name]

    def jobs(self) -> list[BackgroundJob]:
        """All jobs, oldest first."""
        self.check_open()
        return list(self._jobs.values())

    async def _stop_jobs(self) -> None:
        await asyncio.gather(*(job.stop() for job in self._jobs.values()))

    async def fork(self) -> Place:
        """A new place with the same files; snapshots and jobs stay with this one."""
        async with self._turns.exclusive():
            self.check_open()
            source = None
            if not self.image.live:
                await self._stop_jobs()
                source = self.layer
            layer = await in_thread(self.launcher.new_layer, source)
        return Place(self.launcher, replace(self.image, live=False), self.limits, layer)

    def _check_copied(self) -> None:
        self.check_open()
        if self.image.live:
            raise WorkspaceError(
                "a live workspace has no snapshots: its files are the person's own folder"
            )

    async def snapshot(self) -> str:
        """Keep the present files under an id."""
        async with self._turns.exclusive():
            self._check_copied()
            await self._stop_jobs()
            name = secrets.token_hex(8)
            self._snapshots[name] = await in_thread(self.launcher.new_layer, self.layer)
        return name

    async def restore(self, snapshot: str) -> None:
        """Back to the files of a snapshot, which stays. Raises KeyError for an unknown id."""
        async with self._turns.exclusive():
            self._check_copied()
            source = self._snapshots[snapshot]
            layer = await in_thread(self.launcher.new_layer, source)
            old, self.layer = self.layer, layer
            await self._stop_jobs()
            await self._end_guest()
            await in_thread(delete_tree, old)

    async def diff(self) -> Diff:
        """What differs from the image; nothing in a live folder. Raises WorkspaceError if that is
        more than the disk limit allows."""
        async with self._turns.exclusive():
            self.check_open()
            if self.image.live:
                return Diff({})
            await self._stop_jobs()
            return await in_thread(
                diff_layer, self.layer / "upper", self.image.root, self.limits.disk_bytes
            )

    async def changed_repositories(self) -> list[str]:
        """See `LiveFolder.changed_repositories`; none in a copy."""
        self.check_open()
        return [] if self._live is None else await in_thread(self._live.changed_repositories)

    async def close(self) -> None:
        """Kill what runs and delete what was written. Idempotent."""
        if not self._closed:
            self._closed = True
            await uninterrupted(self._delete())

    async def _delete(self) -> None:
        for task in self._running:
            task.cancel()
        async with self._turns.exclusive():
            try:
                # The guest's end is that of everything in it.
                await self._end_guest()
                await self._stop_jobs()
            finally:
                if self._group is not None:
                    await asyncio.to_thread(self._group.remove)
                if self._live is not None:
                    await asyncio.to_thread(self._live.close)
                for layer in (self.layer, *self._snapshots.values()):
                    await asyncio.to_thread(delete_tree, layer)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work on the disk off the loop. A thread cannot be stopped half way, so being cancelled
    waits for it. A failing disk is the sandbox's failure."""
    try:
        return await uninterrupted(asyncio.to_thread(work, *args, **kwargs))
    except OSError as error:
        raise WorkspaceError(f"could not work on a workspace's files: {error}") from error


async def _settled(task: asyncio.Future[T]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait((task,))
