"""Styled lines on standard output, in colour where it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from etude.cli.lines import Ansi, Line


def write_lines(lines: Iterable[Line], head: str = "") -> None:
    """Write lines; `head` goes before them on a line of its own."""
    if head:
        sys.stdout.write(f"{head}\n")
    for text in Ansi(colour=sys.stdout.isatty()).encode(lines):
        sys.stdout.write(text.encode("utf-8", "replace").decode() + "\n")
    sys.stdout.flush()
