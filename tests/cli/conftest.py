"""A place of one's own for each test of the command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_place import Place


@pytest.fixture(autouse=True)
def handlers_of_this_process() -> Iterator[None]:
    """A test that calls `main` here ends no process: what it did to signals is undone."""
    hook = sys.excepthook
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    sys.excepthook = hook
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
