"""How long work tells a person where it is, without knowing about screens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


class Meter(Protocol):
    """One running piece of work. `update` sets what is done and, if given, a short note."""

    def update(self, done: float, note: str = "") -> None: ...


class Progress(Protocol):
    """Where messages and meters go."""

    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    def meter(self, label: str, total: float, unit: str) -> Meter:
        """Begin a meter; the next one, or `finish`, ends it."""
        ...

    def finish(self) -> None:
        """End the running meter, if any."""
        ...


class Silent:
    """A Progress that shows nothing, for tests and for `--json`."""

    def say(self, text: str) -> None:
        """Drop the line."""

    def meter(self, label: str, total: float, unit: str) -> Meter:
        """A meter that goes nowhere."""
        return self

    def update(self, done: float, note: str = "") -> None:
        """Drop the figure."""

    def finish(self) -> None:
        """Nothing to end."""


@contextmanager
def metered(progress: Progress, label: str, total: float, unit: str) -> Generator[Meter]:
    """A meter that ends with the block, however it ends."""
    meter = progress.meter(label, total, unit)
    try:
        yield meter
    finally:
        progress.finish()
