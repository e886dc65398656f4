"""Which submodules a git index names, read without git: git itself can be made to run programs by
a repository that someone hostile wrote (it fetches what is missing of one), a parser cannot."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

_GITLINK = 0o160000
_EXTENDED = 0x4000
_VERSIONS = (2, 3, 4)
_MOST_BYTES = 1 << 30
_SHA256 = re.compile(rb"objectformat\s*=\s*\"?sha256", re.IGNORECASE)


def gitlinks(repository: Path) -> list[str]:
    """The paths of submodules in the index of a repository (`.git`), as they stand there: whoever
    wrote it, they may lead anywhere. Of a split index, also those that were taken out since.
    Raises ValueError for what is no index, OSError when it cannot be read."""
    try:
        width = 32 if _SHA256.search(_bytes(repository / "config")) else 20
    except FileNotFoundError:
        width = 20
    try:
        data = _bytes(repository / "index")
    except FileNotFoundError:
        return []
    found, end = _entries(data, width)
    for name, body in _extensions(data, end, width):
        if name == b"link" and any(body[:width]):
            shared = _bytes(repository / f"sharedindex.{body[:width].hex()}")
            found += _entries(shared, width)[0]
    return [os.fsdecode(path) for path in found]


def _bytes(path: Path) -> bytes:
    # Neither through a link nor from something that never answers.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor has no path
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_BYTES:
            raise ValueError(f"{path} is no file of git's")
        return file.read()


def _entries(data: bytes, width: int) -> tuple[list[bytes], int]:
    """The paths of submodules, and where the entries end."""
    version, count = int.from_bytes(data[4:8]), int.from_bytes(data[8:12])
    if data[:4] != b"DIRC" or version not in _VERSIONS:
        raise ValueError("no index of a version that is known")
    found: list[bytes] = []
    at, path = 12, b""
    for _ in range(count):
        start = at
        mode = int.from_bytes(data[start + 24 : start + 28])
        at += 40 + width
        flags = int.from_bytes(data[at : at + 2])
        at += 4 if flags & _EXTENDED else 2
        dropped = 0
        if version == 4:
            dropped, at = _number(data, at)
        end = data.index(b"\0", at)  # ValueError where the file was cut.
        if version == 4:
            path, at = path[: max(len(path) - dropped, 0)] + data[at:end], end + 1
        else:
            path, at = data[at:end], start + (end - start + 8) // 8 * 8
        if mode == _GITLINK:
            found.append(path)
    return found, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = -1
    while at < len(data):
        byte = data[at]
        at += 1
        value = (value + 1) << 7 | byte & 0x7F
        if not byte & 0x80:
            return value, at
    raise ValueError("the index was cut")


def _extensions(data: bytes, at: int, width: int) -> Iterator[tuple[bytes, bytes]]:
    while at + 8 <= len(data) - width:
        size = int.from_bytes(data[at + 4 : at + 8])
        yield data[at : at + 4], data[at + 8 : at + 8 + size]
        at += 8 + size
