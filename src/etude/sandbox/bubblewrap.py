"""The bubblewrap backend: namespaces, a read-only system and a copy-on-write repository, for root
and for ordinary users alike, without a daemon and without images to pull."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etude.errors import EtudeError
from etude.sandbox.guest import Guest
from etude.sandbox.launcher import GUEST_OWN, Bounds, Command, Launcher, Tree
from etude.sandbox.layers import delete_tree
from etude.sandbox.place import Place
from etude.sandbox.process import Capture
from etude.sandbox.protocol import (
    WORKSPACE_ROOT,
    ExecResult,
    Image,
    Limits,
    WorkspaceError,
)
from etude.sandbox.settings import SandboxSettings
from etude.sandbox.system import guest_environment, installer
from etude.sandbox.workspace import BubblewrapWorkspace

BUILD_LIMITS = Limits(
    memory_bytes=8 << 30, disk_bytes=16 << 30, processes=1024, output_bytes=256 << 10
)
"""Ceilings of a command that builds an environment."""

_PROBE = r"""
grep -q '^CapEff:[[:space:]]*0*$' /proc/self/status || echo 'it keeps privileges'
grep -q '^CapBnd:[[:space:]]*0*$' /proc/self/status || echo 'it can regain privileges'
[ "$(tail -n +3 /proc/net/dev | grep -cv '^ *lo:')" = 0 ] || echo 'it has a network'
echo changed > seen || echo 'it cannot write its copy'
rm kept || echo 'it cannot delete in its copy'
for file in /usr/etude-probe /proc/sys/kernel/domainname /dev/etude-probe; do
  if (echo x > "$file") 2>/dev/null; then echo "it can write $file"; fi
done
"""
_PROBE_SECONDS = 60.0
_DENIED = (
    "this machine denies user namespaces to bubblewrap ({detail}); on a host set "
    "`sysctl kernel.unprivileged_userns_clone=1` and "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`, "
    "in a container start it with `--security-opt seccomp=unconfined`"
)
_NO_OVERLAY = (
    "bubblewrap cannot mount an overlay here ({detail}); it needs bubblewrap 0.11 or newer, "
    "Linux 5.12 or newer, and a run_root on a tmpfs, ext4 or xfs folder"
)


class _LoggedCapture(Capture):
    """Also passes whole lines on to a person's log."""

    def __init__(self, limit: int, log: Callable[[str], None] | None) -> None:
        super().__init__(limit)
        self._log = log
        self._rest = b""

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self._log is not None:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._log(line.decode(errors="replace"))

    def end(self) -> None:
        """Pass on a last line without a newline."""
        if self._log is not None and self._rest:
            self._log(self._rest.decode(errors="replace"))


class BubblewrapSandbox:
    """Makes workspaces on this machine. Nothing is touched before the first use; `close` (also
    at the process's exit) deletes what all its workspaces wrote. Raises EtudeError on first use
    when bubblewrap is missing or the run folder cannot hold anything.

    Guests die with the thread that started them, so run the event loop in a thread that stays.
    The process becomes the parent of orphans below it (`process.adopt_orphans`)."""

    name = "bubblewrap"

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self._settings = settings or SandboxSettings()
        self._launchers: dict[str, Launcher] = {}
        self._opening = asyncio.Lock()

    async def _launcher(self, purpose: str = "run") -> Launcher:
        async with self._opening:
            if purpose not in self._launchers:
                # Environments are built on the disk: their temporary files are large.
                root = Path(tempfile.gettempdir()) if purpose == "build" else None
                self._launchers[purpose] = await asyncio.to_thread(
                    Launcher, self._settings, self._settings.run_root or root
                )
            return self._launchers[purpose]

    async def create(self, image: Image, limits: Limits | None = None) -> BubblewrapWorkspace:
        """A workspace on `image`, which must not change while it lives unless it is live. Raises
        WorkspaceError, and EtudeError for a live folder that cannot be made safe."""
        launcher = await self._launcher()
        _check(image)
        place = Place(launcher, image, limits or Limits(), launcher.new_layer())
        if image.live:
            try:
                await place.open()
            except BaseException:
                await place.close()
                raise
        return BubblewrapWorkspace(place)

    async def spawn(
        self,
        image: Image,
        argv: Sequence[str],
        *,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE_ROOT,
    ) -> Guest:
        """Start a long-lived process in a throw-away copy of `image`. A command that cannot be
        run shows as an immediate end of output with bubblewrap's words in `stderr_tail`. Raises
        WorkspaceError."""
        launcher = await self._launcher()
        _check(image)
        ceilings = limits or Limits()
        layer = launcher.new_layer()
        guest = Guest(launcher, layer, ceilings, launcher.new_group(ceilings))
        command = Command(argv=list(argv), env=guest_environment(image, env), cwd=cwd)
        try:
            await guest.start(image, command)
        except BaseException:
            await guest.kill()
            raise
        return guest

    async def build(
        self,
        image: Image,
        argv: Sequence[str],
        *,
        writable: Mapping[Path, str],
        network: bool,
        timeout: float,
        log: Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE_ROOT,
        limits: Limits = BUILD_LIMITS,
    ) -> ExecResult:
        """Run a command that builds an environment: host folders of `writable` are writable at
        the given places, and with `network` the machine's network, the package installer's
        configuration, local package folders and certificates are there as well; the home is not.
        Changes to `/workspace` are thrown away. `log` gets each line of output."""
        launcher = await self._launcher("build")
        _check(image)
        arguments, variables = installer(os.environ, Path.home()) if network else ([], {})
        command = Command(
            argv=list(argv),
            env={**variables, **guest_environment(image, env)},
            cwd=cwd,
            network=network,
            writable=writable,
            arguments=arguments,
        )
        stdout = _LoggedCapture(limits.output_bytes, log)
        stderr = _LoggedCapture(limits.output_bytes, log)
        layer = launcher.new_layer()
        group = launcher.new_group(limits)
        try:
            process = launcher.construct(image, layer, command, stdout.feed, stderr.feed)
            bounds, tree = Bounds(layer, limits, group), Tree((process.monitor_pid,), GUEST_OWN)
            ended = await launcher.run(process, b"", bounds, tree, timeout, stderr)
        finally:
            if group is not None:
                await asyncio.to_thread(group.remove)
            await asyncio.to_thread(delete_tree, layer)
        stdout.end()
        stderr.end()
        note = f"\n[{ended.note}]\n" if ended.note else ""
        return ExecResult(
            exit_code=ended.exit_code,
            stdout=stdout.text(),
            stderr=stderr.text() + note,
            seconds=ended.seconds,
            truncated=stdout.truncated or stderr.truncated,
            timed_out=ended.timed_out,
        )

    async def probe(self) -> str | None:
        """Run a guest that tries what it must not be able to do. None, or one sentence."""
        if sys.platform != "linux":
            return "the bubblewrap sandbox needs Linux; run Etude in a Linux virtual machine"
        try:
            launcher = await self._launcher()
            return await self._probe(launcher)
        except EtudeError as error:
            return str(error)
        except WorkspaceError as error:
            return _explain(str(error))

    async def _probe(self, launcher: Launcher) -> str | None:
        root = launcher.folder.new("probe")
        root.mkdir()
        for name in ("seen", "kept"):
            (root / name).write_text("host")
        workspace = await self.create(Image(root))
        try:
            result = await workspace.exec(["/bin/sh", "-c", _PROBE], timeout=_PROBE_SECONDS)
            changes = dict((await workspace.diff()).files)
        finally:
            await workspace.close()
        untouched = all((root / name).read_text() == "host" for name in ("seen", "kept"))
        await asyncio.to_thread(delete_tree, root)
        if not untouched:
            return "the bubblewrap sandbox is not safe here: a guest changed the host's files"
        faults = result.stdout.strip().splitlines()
        if faults or result.exit_code != 0:
            what = "; ".join(faults) or result.stderr.strip() or f"exit code {result.exit_code}"
            return f"a bubblewrap guest does not behave on this machine ({what}); use another"
        if changes != {"seen": b"changed\n", "kept": None}:
            return _NO_OVERLAY.format(detail="a guest's changes did not arrive")
        return None

    def close(self) -> None:
        """Delete what all workspaces wrote; they must not be used afterwards."""
        for launcher in self._launchers.values():
            launcher.close()
        self._launchers.clear()


def _check(image: Image) -> None:
    for source in (image.root, *image.readonly):
        if not source.exists():
            raise WorkspaceError(f"{source}, which a workspace should show, does not exist")
    for target in image.readonly.values():
        # Bubblewrap would make the place for it in the person's folder.
        if image.live and Path(target).is_relative_to(WORKSPACE_ROOT):
            raise WorkspaceError(
                f"{target} lies inside a live folder, so nothing can be shown there"
            )


def _explain(detail: str) -> str:
    """The sentence for what bubblewrap said when it failed."""
    lowered = detail.lower()
    detail = detail.replace("bubblewrap failed: ", "").replace("\n", "; ")
    if "overlay" in lowered:
        return _NO_OVERLAY.format(detail=detail)
    if any(word in lowered for word in ("namespace", "uid map", "uid_map", "not permitted")):
        return _DENIED.format(detail=detail)
    return f"the bubblewrap sandbox does not work on this machine ({detail})"
