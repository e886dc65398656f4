"""Changing a small file of the person's that several sessions may change at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Generator
from pathlib import Path

from etude.errors import EtudeError

_PATIENCE = 10.0


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the lock beside a file. Raises EtudeError after ten seconds."""
    end = time.monotonic() + _PATIENCE
    with path.with_name(f".{path.name}.lock").open("w") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise EtudeError(
                        f"Another process has held the lock of {path} for {_PATIENCE:g} s; end it."
                    ) from error
                time.sleep(0.01)
        yield


def change(path: Path, edit: Callable[[str], str]) -> None:
    """Replace a file's text by `edit` of it ('' when there is none). After a crash it is either
    the old one or the new one, whole; its mode stays, a new one is the person's alone. Raises
    EtudeError when it cannot be written."""
    target = Path(os.path.realpath(path))  # A link to where the file is really kept stays a link.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(target):
            there = target.exists()
            text = edit(target.read_text() if there else "")
            try:
                with temporary.open("w") as file:
                    mode = stat.S_IMODE(target.stat().st_mode) if there else 0o600
                    os.fchmod(file.fileno(), mode)
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    except (OSError, UnicodeError) as error:
        raise EtudeError(f"{path} could not be written ({error}).") from error
