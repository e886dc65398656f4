"""The folder on the host where guests' writes live, and the clean-up after processes that died.

`<run root>/etude-<uid>/<pid>-<random>/` belongs to one living process, which holds a lock on the
file `lock` in it. Whoever can take that lock knows that the owner is gone and deletes the folder.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from etude.errors import EtudeError
from etude.sandbox.layers import delete_tree
from etude.sandbox.limits import remove_groups

_SHM = Path("/dev/shm")
_ROOMY = 1 << 30
_GROUPS = "cgroups"


def _supports_attributes(folder: Path) -> bool:
    """Whether overlayfs can keep its marks there: tmpfs takes `user.*` since Linux 6.6."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="etude-") as file:
            os.setxattr(file.fileno(), "user.etude", b"y")
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS):
            return False
        raise
    return True


def default_root() -> Path:
    """`/dev/shm` when it has a gigabyte free and takes attributes, else the temporary folder."""
    usable = _SHM.is_dir() and os.access(_SHM, os.W_OK) and free_bytes(_SHM) >= _ROOMY
    if usable and _supports_attributes(_SHM):
        return _SHM
    return Path(tempfile.gettempdir())


def free_bytes(path: Path) -> int:
    """Free space of the disk that holds `path`."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def _base(root: Path) -> Path:
    """The private folder of this user below `root`. Raises EtudeError if another one owns it."""
    base = root / f"etude-{os.geteuid()}"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = base.lstat()
    except OSError as error:
        raise EtudeError(
            f"cannot make the sandbox's run folder {base} ({error.strerror}); "
            "set the sandbox's run_root to a folder you may write"
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise EtudeError(f"{base} is not a private folder of this user; delete it")
    return base


@contextmanager
def _locked(base: Path) -> Generator[None]:
    """Only one process at a time makes or sweeps folders, so that none is seen half made."""
    descriptor = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sweep(root: Path | None = None) -> int:
    """Delete the run folders and control groups of processes that died. Returns how many."""
    base = _base(root or default_root())
    claims: list[tuple[Path, int]] = []
    with _locked(base):
        for folder in base.iterdir():
            claim = _claim(folder) if folder.is_dir() else None
            if claim is not None:
                claims.append((folder, claim))
    for folder, claim in claims:
        groups = folder / _GROUPS
        named = groups.read_text().splitlines() if groups.exists() else []
        if remove_groups([Path(line) for line in named]):
            delete_tree(folder)
        os.close(claim)
    return len(claims)


def _claim(folder: Path) -> int | None:
    """The lock of a folder whose owner is gone, held from now on; None while it lives."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class RunFolder:
    """This process's folder below the run root: made and locked on construction, after sweeping.

    Raises EtudeError when it cannot be made or has less than `min_free_bytes` free.
    """

    def __init__(self, root: Path | None, min_free_bytes: int) -> None:
        self.root = root or default_root()
        self._min_free = min_free_bytes
        sweep(self.root)
        base = _base(self.root)
        self.path = base / f"{os.getpid()}-{secrets.token_hex(4)}"
        with _locked(base):
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._owner = os.getpid()
        self._counter = 0
        self._groups: list[Path] = []
        atexit.register(self.close)
        shortage = self.shortage()
        if shortage is not None:
            self.close()
            raise EtudeError(f"{shortage}; free some or set the sandbox's run_root elsewhere")

    def new(self, kind: str) -> Path:
        """A path for a new folder, not made yet, unique in this process."""
        self._counter += 1
        return self.path / f"{kind}{self._counter}"

    def shortage(self) -> str | None:
        """A clause when the disk below is as good as full, else None."""
        free = free_bytes(self.path)
        if free >= self._min_free:
            return None
        return f"only {free >> 20} MB are free in {self.root}, where sandboxes write"

    def note_groups(self, groups: list[Path]) -> None:
        """Remember control groups that must go with this folder, however the process ends."""
        self._groups = groups
        (self.path / _GROUPS).write_text("\n".join(map(str, groups)))

    def close(self) -> None:
        """Delete everything. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._owner or not self.path.exists():
            return
        atexit.unregister(self.close)
        # A folder that stays tells the next sweep which groups are left.
        if remove_groups(self._groups):
            delete_tree(self.path)
        os.close(self._lock)
