"""The writable layer of a workspace on the host: copying, measuring, comparing, deleting.

A layer is what overlayfs keeps in its upper folder: changed files whole, a character device 0/0
for a deleted name (a whiteout), and the attribute `overlay.opaque` on a folder that hides the
image's folder of the same name. Its content is hostile: nothing here follows a link. No command
runs on a layer while it is copied or compared; it may while it is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from etude.sandbox.protocol import Diff, WorkspaceError

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
_ENTRY_BYTES = 1024
"""What a name costs beside its blocks, so that a million empty files are not free."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SYS_OPENAT2, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 437, 4, 8
_libc = ctypes.CDLL(None, use_errno=True)
_VANISHED = (FileNotFoundError, NotADirectoryError)
_PATH_BYTES = 4000
"""Linux refuses paths of 4096 bytes; a guest can nest deeper by relative steps."""


def is_whiteout(info: os.stat_result) -> bool:
    """Whether a layer's entry says "deleted"."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


@contextmanager
def _readable(layer: Path) -> Generator[dict[str, int]]:
    """Give ourselves, for a while, the rights that a guest took from its own files; root needs
    none. Yields the modes of what was changed, by path."""
    changed: dict[str, int] = {}
    try:
        if os.geteuid() != 0:
            _unlock(str(layer), changed)
        yield changed
    finally:
        # Inner paths were changed after the folders that lead to them.
        for path, mode in reversed(changed.items()):
            Path(path).chmod(mode)


def _unlock(layer: str, changed: dict[str, int]) -> None:
    stack = [layer]
    while stack:
        folder = stack.pop()
        for name, info in _entries(folder):
            path = f"{folder}/{name}"
            need = 0o700 if stat.S_ISDIR(info.st_mode) else 0o400
            mode = stat.S_IMODE(info.st_mode)
            if (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)) and mode & need != need:
                changed[path] = mode
                Path(path).chmod(mode | need)
            if stat.S_ISDIR(info.st_mode):
                stack.append(path)


def _entries(folder: str) -> list[tuple[str, os.stat_result]]:
    """(name, lstat) of a folder, sorted by name."""
    if len(os.fsencode(folder)) > _PATH_BYTES:
        raise WorkspaceError("the workspace nests folders deeper than a path can be long")
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return sorted(found)


def _open(path: str) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb")


def _read(path: str) -> bytes:
    with _open(path) as file:
        return file.read()


def layer_bytes(layer: Path) -> int:
    """Bytes that a layer occupies: its blocks plus a flat charge per name. A guest may change the
    layer meanwhile: folders are opened without following links, so that one swapped for a link
    leads nowhere; what vanishes counts 0.

    Raises WorkspaceError when folders are nested too deep to be walked.
    """
    total, stack = 0, [""]
    with contextlib.ExitStack() as opened:
        top = _opened(str(layer), None, opened)
        while stack:
            prefix = stack.pop()
            if len(os.fsencode(prefix)) > _PATH_BYTES:
                raise WorkspaceError("the workspace nests folders deeper than a path can be long")
            with contextlib.ExitStack() as way, contextlib.suppress(*_VANISHED):
                for name, info in _members(_below_top(top, prefix, way)):
                    total += info.st_blocks * 512 + _ENTRY_BYTES
                    if stat.S_ISDIR(info.st_mode):
                        stack.append(f"{prefix}{name}/")
    return total


def _below_top(top: int, path: str, stack: contextlib.ExitStack) -> int:
    """The folder at `path` below the open folder `top`, reached without following a link."""
    if not path:
        return top
    how = (ctypes.c_uint64 * 3)(_FOLDER, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
    found = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2),
        ctypes.c_int(top),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if found >= 0 and (os.geteuid() == 0 or os.fstat(found).st_mode & 0o500 == 0o500):
        stack.callback(os.close, found)
        return int(found)
    if found >= 0:
        os.close(found)
    elif ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        raise FileNotFoundError(errno.ENOENT, path)
    # Folders whose rights a guest took from their owner, who is us.
    folder = top
    for name in path.split("/")[:-1]:
        folder = _opened(name, folder, stack)
    return folder


def _members(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """(name, lstat) of what is in an open folder, but for what vanishes meanwhile."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False)


def _opened(name: str, parent: int | None, stack: contextlib.ExitStack) -> int:
    """A folder, until the stack is left also one whose rights a guest took from its owner, who is
    us. O_NOFOLLOW makes a link NotADirectoryError."""
    found = os.open(name, _FOLDER | os.O_NOFOLLOW | os.O_PATH, dir_fd=parent)
    stack.callback(os.close, found)
    place = Path(f"/proc/self/fd/{found}")
    mode = stat.S_IMODE(os.fstat(found).st_mode)
    if os.geteuid() != 0 and mode & 0o500 != 0o500:
        place.chmod(mode | 0o500)
        stack.callback(place.chmod, mode)
    folder = os.open(place, _FOLDER)
    stack.callback(os.close, folder)
    return folder


def copy_layer(source: Path, target: Path) -> None:
    """Copy a layer, whiteouts, attributes and hard links included, to a new folder `target`.
    Sockets are left out: nobody listens on them any more."""
    with _readable(source) as modes:
        _copy_tree(str(source), str(target), modes)


def _copy_tree(source: str, target: str, modes: dict[str, int]) -> None:
    links: dict[int, str] = {}
    finished: list[tuple[str, int]] = []
    _copy_folder(source, target)
    stack = [(source, target)]
    while stack:
        here, there = stack.pop()
        for name, info in _entries(here):
            old, new = f"{here}/{name}", f"{there}/{name}"
            mode = modes.get(old, stat.S_IMODE(info.st_mode))
            if stat.S_ISDIR(info.st_mode):
                _copy_folder(old, new)
                # The mode comes last: a folder without the write bit could not be filled.
                finished.append((new, mode))
                stack.append((old, new))
            elif info.st_nlink > 1 and info.st_ino in links and not is_whiteout(info):
                os.link(links[info.st_ino], new, follow_symlinks=False)
            else:
                links[info.st_ino] = new
                _copy_leaf(old, new, info, mode)
    for new, mode in reversed(finished):
        Path(new).chmod(mode)


def _copy_folder(old: str, new: str) -> None:
    Path(new).mkdir()
    for attribute in os.listxattr(old, follow_symlinks=False):
        if attribute.startswith("user."):
            value = os.getxattr(old, attribute, follow_symlinks=False)
            os.setxattr(new, attribute, value, follow_symlinks=False)


def _copy_leaf(old: str, new: str, info: os.stat_result, mode: int) -> None:
    kind = info.st_mode
    if stat.S_ISREG(kind):
        with _open(old) as reader, Path(new).open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            for attribute in os.listxattr(reader.fileno()):
                if attribute.startswith("user."):
                    os.setxattr(writer.fileno(), attribute, os.getxattr(reader.fileno(), attribute))
        # Before the mode: it may forbid the owner to do more.
        os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
        Path(new).chmod(mode)
    elif stat.S_ISLNK(kind):
        Path(new).symlink_to(Path(old).readlink())
    elif stat.S_ISFIFO(kind):
        os.mkfifo(new, mode)
    elif is_whiteout(info):
        os.mknod(new, stat.S_IFCHR, os.makedev(0, 0))


def delete_tree(path: Path) -> None:
    """Delete a folder whatever a guest made of its modes and depth. Missing is fine."""
    if not path.exists():
        return
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        # Folders without rights (overlayfs' own work folder, or the guest's doing) or nested
        # too deep for Python's recursion: the system's tools walk by descriptor.
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(path)], check=False, capture_output=True)
        done = subprocess.run(["rm", "-rf", "--", str(path)], check=False, capture_output=True)
        if done.returncode != 0:
            detail = done.stderr.decode(errors="replace").strip()
            raise WorkspaceError(f"could not delete {path}: {detail}") from None


def _below(folder: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """(relative path, lstat) of everything below `folder`; folders end with `/`."""
    stack = [(folder, prefix)]
    while stack:
        here, there = stack.pop()
        for name, info in _entries(here):
            if stat.S_ISDIR(info.st_mode):
                stack.append((f"{here}/{name}", f"{there}{name}/"))
                yield f"{there}{name}/", info
            else:
                yield f"{there}{name}", info


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _opaque(path: str) -> bool:
    present = os.listxattr(path, follow_symlinks=False)
    return any(
        name in present and os.getxattr(path, name, follow_symlinks=False) == b"y"
        for name in _OPAQUE
    )


class _Comparison:
    """One walk over a layer against the image below it."""

    def __init__(self, layer: Path, image: Path, max_bytes: int) -> None:
        self.layer, self.image, self.left = str(layer), str(image), max_bytes
        self.files: dict[str, bytes | None] = {}
        self.special: set[str] = set()
        self.gone: dict[str, os.stat_result] = {}
        self.present: set[str] = set()

    def run(self) -> Diff:
        # (path with a trailing slash, does the image have this folder, does it shine through)
        stack = [("", True, True)]
        while stack:
            prefix, in_image, merged = stack.pop()
            for name, info in _entries(f"{self.layer}/{prefix}".rstrip("/")):
                path = prefix + name
                # A link of the image may stand where the layer has a folder; following it would
                # lead out of the image, so the image is asked only below real folders.
                below = _lstat(f"{self.image}/{path}") if in_image else None
                folder_below = below is not None and stat.S_ISDIR(below.st_mode)
                if stat.S_ISDIR(info.st_mode):
                    opaque = _opaque(f"{self.layer}/{path}")
                    if merged and (opaque or not folder_below):
                        self._hide(path, below)
                    stack.append((f"{path}/", folder_below, merged and folder_below and not opaque))
                    continue
                if merged and (folder_below or is_whiteout(info)):
                    self._hide(path, below)
                if not is_whiteout(info):
                    self.present.add(path)
                    self._compare(path, info, below)
        for path, info in self.gone.items():
            if path not in self.present:
                if stat.S_ISREG(info.st_mode):
                    self.files[path] = None
                else:
                    self.special.add(path)
        return Diff(dict(sorted(self.files.items())), tuple(sorted(self.special)))

    def _hide(self, path: str, below: os.stat_result | None) -> None:
        """The image's `path`, if any, no longer shines through."""
        if below is None:
            return
        if stat.S_ISDIR(below.st_mode):
            leaves = _below(f"{self.image}/{path}", f"{path}/")
            self.gone.update((name, info) for name, info in leaves if not name.endswith("/"))
        else:
            self.gone[path] = below

    def _compare(self, path: str, info: os.stat_result, below: os.stat_result | None) -> None:
        here, there = f"{self.layer}/{path}", f"{self.image}/{path}"
        if stat.S_ISREG(info.st_mode):
            self.left -= info.st_size
            if self.left < 0:
                raise WorkspaceError("the files that the workspace changed exceed its disk limit")
            data = _read(here)
            same = below is not None and stat.S_ISREG(below.st_mode) and data == _read(there)
            if not same:
                self.files[path] = data
        elif not (
            stat.S_ISLNK(info.st_mode)
            and below is not None
            and stat.S_ISLNK(below.st_mode)
            and Path(here).readlink() == Path(there).readlink()
        ):
            self.special.add(path)


def diff_layer(layer: Path, image: Path, max_bytes: int) -> Diff:
    """What a layer changes in its image, by content: a file rewritten with the same bytes, or
    with another mode only, is no difference.

    Raises WorkspaceError when the changed files hold more than `max_bytes`.
    """
    with _readable(layer):
        return _Comparison(layer, image, max_bytes).run()
