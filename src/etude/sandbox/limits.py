"""Ceilings on what a guest may use: control groups where this process may make them, else its
process tree is measured while it runs; resource limits in both cases."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.protocol import Limits

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_REMOVE_SECONDS = 5.0


@dataclass(frozen=True)
class Usage:
    """What a process tree holds at one moment. `rss_bytes` counts shared pages once per process,
    so it errs on the large side."""

    processes: int
    rss_bytes: int


def tree_usage(pid: int) -> Usage:
    """Usage of all descendants of `pid`, itself left out. Processes that end meanwhile count 0."""
    stack, seen, rss = [pid], 0, 0
    while stack:
        current = stack.pop()
        try:
            for task in os.listdir(f"/proc/{current}/task"):  # noqa: PTH208
                children = Path(f"/proc/{current}/task/{task}/children").read_text()
                stack.extend(int(child) for child in children.split())
            if current != pid:
                seen += 1
                rss += int(Path(f"/proc/{current}/statm").read_text().split()[1]) * _PAGE
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Usage(seen, rss)


def set_resource_limits(pid: int, limits: Limits, *, grouped: bool, own: int) -> None:
    """Set hard limits on a guest's first process, which its children inherit: size of a file,
    no core dumps, number of processes beside `own` ones of the sandbox (Linux does not enforce that
    one for the host's root).
    Without a control group each process may also hold at most `memory_bytes` of private data;
    address space is not limited, since runtimes reserve far more of it than they use."""
    ceilings = [
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits.processes + own),
    ]
    if not grouped:
        ceilings.append((resource.RLIMIT_DATA, limits.memory_bytes))
    for kind, ceiling in ceilings:
        _, hard = resource.prlimit(pid, kind)
        value = ceiling if hard == resource.RLIM_INFINITY else min(ceiling, hard)
        resource.prlimit(pid, kind, (value, value))


@dataclass(frozen=True)
class _Hierarchy:
    """One place where groups can be made: a controller of version 1, or the tree of version 2."""

    parent: Path
    controllers: tuple[str, ...]
    version: int

    def settings(self, limits: Limits, own: int) -> list[tuple[str, int, bool]]:
        """(file, value, must it exist) for a group's ceilings."""
        found: list[tuple[str, int, bool]] = []
        if "memory" in self.controllers:
            if self.version == 1:
                found.append(("memory.limit_in_bytes", limits.memory_bytes, True))
                found.append(("memory.memsw.limit_in_bytes", limits.memory_bytes, False))
            else:
                found.append(("memory.max", limits.memory_bytes, True))
                found.append(("memory.swap.max", 0, False))
        if "pids" in self.controllers:
            found.append(("pids.max", limits.processes + own, True))
        return found


@dataclass(frozen=True)
class Group:
    """The control group of one workspace: one folder per hierarchy."""

    folders: tuple[Path, ...]

    def add(self, pid: int) -> None:
        """Move a process in; what it starts from now on is in too."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Delete the group; its processes must be dead."""
        remove_groups(self.folders)


class Groups:
    """Makes groups named `name` for one process. Build it with `open_groups`."""

    def __init__(self, hierarchies: Sequence[_Hierarchy], name: str) -> None:
        self._hierarchies = tuple(hierarchies)
        self._name = name
        for hierarchy in self._hierarchies:
            (hierarchy.parent / name).mkdir()
            if hierarchy.version == 2:
                _enable(hierarchy.parent / name)

    @property
    def folders(self) -> list[Path]:
        """The folders that hold all groups of this process."""
        return [hierarchy.parent / self._name for hierarchy in self._hierarchies]

    def make(self, name: str, limits: Limits, own: int) -> Group:
        """A new group with these ceilings, and room for `own` processes of the sandbox. Raises
        OSError."""
        made: list[Path] = []
        for hierarchy in self._hierarchies:
            folder = hierarchy.parent / self._name / name
            folder.mkdir()
            made.append(folder)
            for file, value, required in hierarchy.settings(limits, own):
                if required or (folder / file).exists():
                    (folder / file).write_text(str(value))
        return Group(tuple(made))


def _enable(folder: Path) -> None:
    (folder / "cgroup.subtree_control").write_text("+memory +pids")


def _candidates() -> list[list[_Hierarchy]]:
    """Places to try, best first: our own group's children, then its siblings, which is where a
    delegated version 2 tree lets a process put others."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    found: list[list[_Hierarchy]] = []
    if "memory" in own and "pids" in own:
        found.append(
            [
                _Hierarchy(_present(_CGROUP_MOUNT / name, own[name]), (name,), 1)
                for name in ("memory", "pids")
            ]
        )
    elif "" in own:
        here = _present(_CGROUP_MOUNT, own[""])
        found.extend(
            [_Hierarchy(place, ("memory", "pids"), 2)]
            for place in (here, here.parent)
            if place == _CGROUP_MOUNT or _CGROUP_MOUNT in place.parents
        )
    return found


def _present(mount: Path, path: str) -> Path:
    """Our own group's folder; the mount itself where a container shows only its part."""
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount


def open_groups(name: str) -> Groups | None:
    """Groups with memory and process ceilings, or None where this process may not make them.
    Each place is tried with a real group and a real process."""
    for hierarchies in _candidates():
        folders = [hierarchy.parent / name for hierarchy in hierarchies]
        try:
            groups = Groups(hierarchies, name)
            trial = groups.make("trial", Limits(), 1)
            _try_member(trial)
        except OSError:
            remove_groups(folders)
            continue
        trial.remove()
        return groups
    return None


def _try_member(group: Group) -> None:
    """Move a short-lived child in and end it. Raises OSError when that is not allowed."""
    read, write = os.pipe()
    child = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)])
    os.close(read)
    try:
        group.add(child)
    finally:
        os.close(write)
        os.waitpid(child, 0)


def remove_groups(folders: Sequence[Path]) -> bool:
    """Kill what is left in control groups and delete them with all groups in them. False when
    one still holds a dying process after some seconds; then the next sweep tries again."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    for folder in folders:
        if not folder.is_dir():
            continue
        inner = [path for path in folder.rglob("*") if path.is_dir()]
        for path in [*reversed(inner), folder]:
            while not _removed(path):
                if time.monotonic() > deadline:
                    return False
                _kill_members(path)
                time.sleep(0.01)
    return True


def _kill_members(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in (folder / "cgroup.procs").read_text().split():
            # 0 stands for a process of a namespace that cannot be seen from here.
            if int(line) > 0:
                os.kill(int(line), signal.SIGKILL)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True
