"""What a person sees: lines, meters with an estimate of the time left, tables."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from etude.pipeline.summary import Summary

_WIDTH = None if sys.stdout.isatty() else 110
"""A log file has no width; tables in it must not be cut at 80 columns."""

console = Console(stderr=False, highlight=False, width=_WIDTH)

_LOG_EVERY_S = 15.0


class Screen:
    """A Progress on the terminal: rich meters on a screen, plain lines in a log file."""

    def __init__(self) -> None:
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._label, self._unit, self._total = "", "", 0.0
        self._began = self._told = 0.0

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            console.print(text, markup=False, soft_wrap=True)

    def meter(self, label: str, total: float, unit: str) -> Screen:
        """Begin a meter; the running one ends."""
        self.finish()
        self._label, self._unit, self._total = label, unit, total
        self._began = self._told = time.monotonic()
        if console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description:<22}", markup=False),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TextColumn(unit, markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=console,
            )
            self._live.start()
            self._task = self._live.add_task(label, total=total, note="")
        else:
            console.print(f"{label} …", markup=False)
        return self

    def update(self, done: float, note: str = "") -> None:
        """Set what is done of the running meter."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=round(done, 1), note=note)
            return
        now = time.monotonic()
        if now - self._told >= _LOG_EVERY_S:
            self._told = now
            left = (now - self._began) * (self._total - done) / done if done else float("nan")
            console.print(
                f"{self._label} {done:g}/{self._total:g} {self._unit}, {left:.0f} s left {note}",
                markup=False,
            )

    def finish(self) -> None:
        """End the running meter, if any."""
        if self._live is not None:
            self._live.stop()
            self._live = self._task = None


def print_json(data: Any) -> None:
    """Machine-readable output, one document on stdout; what is undefined is null."""
    sys.stdout.write(json.dumps(_defined(data), indent=2, default=str, allow_nan=False) + "\n")


def _defined(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _defined(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_defined(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_summary(summary: Summary) -> None:
    """The result of a run, as it is."""
    from etude.pipeline.report import gain_table, headline, remarks, table

    k = min(score.k for score in summary.scores.values())
    console.print(headline(summary), style="bold")
    print_table(
        "",
        ["held-out tasks", "pass@1", f"pass@{k}", "valid calls", "correct if valid"],
        [
            [row["name"], row["pass_1"], row["pass_k"], row["valid"], row["correct"]]
            for row in table(summary)
        ],
    )
    if gains := gain_table(summary):
        print_table(
            "",
            ["difference in pass@1 (points)", "", "95 % interval"],
            [[row["name"], row["value"], row["interval"]] for row in gains],
        )
    for line in remarks(summary):
        console.print(line, markup=False)
