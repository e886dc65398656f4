"""The one shape of every benchmark result, and the measuring that fills it.

A result file is `{name, command, commit, date, machine, settings, seeds, rows}`; a row is
`{metric, unit, ours, peer, theirs, ratio, low, high, goal}`, where `ratio` is better-is-larger,
ours against theirs, and `low`, `high` are the extremes of the repeats (of the ratio where there is
a peer, else of `ours`). What could not be measured is a row whose `ours` is null and whose
`reason` says why.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One metric of a result; the fields are those of the module docstring."""

    metric: str
    unit: str
    ours: float | None
    peer: str | None = None
    theirs: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    reason: str | None = None


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], repeats: int
) -> tuple[list[float], list[float]]:
    """Call both in turn, so that a machine that slows down slows both. Returns all values."""
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def compared(
    metric: str,
    unit: str,
    values: tuple[Sequence[float], Sequence[float]],
    *,
    peer: str,
    goal: float | None = None,
    larger_is_better: bool = True,
) -> Row:
    """A row from paired repeats: medians, and the median, lowest and highest paired ratio."""
    ours, theirs = values
    ratios = [(a / b) if larger_is_better else (b / a) for a, b in zip(ours, theirs, strict=True)]
    return Row(
        metric=metric,
        unit=unit,
        ours=statistics.median(ours),
        peer=peer,
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        goal=goal,
    )


def alone(metric: str, unit: str, values: Sequence[float], *, goal: float | None = None) -> Row:
    """A row without a peer: the median of the repeats and their extremes."""
    return Row(
        metric,
        unit,
        statistics.median(values),
        low=min(values),
        high=max(values),
        goal=goal,
    )


def not_measured(metric: str, unit: str, reason: str) -> Row:
    """A row that says why there is no number."""
    return Row(metric, unit, None, reason=reason)


def timed(action: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory, load, Python and system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    parts = [line.partition(":") for line in lines]
    fields = {name.strip(): value.strip() for name, _, value in parts}
    flags = fields.get("flags", "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": fields.get("model name", platform.processor()).strip(),
        "cores": cores,
        "features": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "memory_gb": round(memory / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def write(
    name: str, rows: Sequence[Row], settings: Mapping[str, Any], seeds: Sequence[int]
) -> Path:
    """Write `results/<name>.json` and print the rows as a table."""
    command = ["python", Path(sys.argv[0]).resolve().relative_to(RESULTS.parent.parent).as_posix()]
    result = {
        "name": name,
        "command": shlex.join([*command, *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": dict(settings),
        "seeds": list(seeds),
        "rows": [{k: v for k, v in asdict(row).items() if k != "reason" or v} for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(_line(row))
    return path


def _line(row: Row) -> str:
    if row.ours is None:
        return f"{row.metric}: not measured ({row.reason})"
    text = f"{row.metric}: {row.ours:.4g} {row.unit}"
    if row.ratio is not None and row.theirs is not None:
        text += f" against {row.theirs:.4g} of {row.peer}, ratio {row.ratio:.2f}"
    if row.low is not None and row.high is not None:
        text += f" [{row.low:.3g}, {row.high:.3g}]"
    return text + (f", goal {row.goal:g}" if row.goal is not None else "")


def _commit() -> str:
    """The commit, with `+` where the working tree differs from it."""
    git = ["git", "-C", str(RESULTS.parent)]
    done = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return "unknown"
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() + ("+" if changed.stdout.strip() else "")
