"""Messages of a guest, and what protects the process that sends them."""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

ROOT = "/workspace"
PIECE = 16_000
"""Length of a line that no reader refuses."""


def words(text: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(text.split())


def send(channel: int, message: dict[str, Any]) -> None:
    """Write one JSON message in pieces, ended by an empty line."""
    text = json.dumps(message)
    lines = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    write_all(channel, ("\n".join(lines) + "\n\n").encode("ascii"))


def write_all(fd: int, data: bytes) -> None:
    """Write every byte."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def harden(dumpable: int) -> None:
    """Say whether processes of the same user may trace this one or open its descriptors."""
    if ctypes.CDLL(None, use_errno=True).prctl(4, dumpable, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) was refused")
