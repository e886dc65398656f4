"""A place of one's own for each test of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
