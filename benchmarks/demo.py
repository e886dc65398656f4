"""Run `make demo` as a newcomer would, timed, and record what it printed.

python benchmarks/demo.py FOLDER [--record-only]

FOLDER, which must not exist, gets a fresh clone of the last commit and an empty cache; pip's cache
is not used either. `--record-only` reads a FOLDER where that has been done. The record is
`benchmarks/results/demo.json`, from which `benchmarks/tables.py` makes the README's table. Close
everything else first: the recipe's phases end by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

from etude.pipeline.report import gain_table, remarks, table
from etude.pipeline.run import Run
from etude.pipeline.summary import summarize
from shape import RESULTS

ROOT = RESULTS.parent.parent


def run(folder: Path) -> None:
    """Clone, run and time; the time goes to FOLDER/wall.json."""
    folder.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "etude")], check=True)
    environment = {
        **os.environ,
        "ETUDE_CACHE": str((folder / "cache").resolve()),
        "PIP_NO_CACHE_DIR": "1",
    }
    start = time.monotonic()
    subprocess.run(["make", "demo"], cwd=folder / "etude", env=environment, check=True)
    wall = {"wall_minutes": (time.monotonic() - start) / 60, "load_at_end": os.getloadavg()[0]}
    (folder / "wall.json").write_text(json.dumps(wall))


def record(folder: Path) -> None:
    """Read the run's store and write the record."""
    (path,) = (folder / "etude" / "runs").iterdir()
    with Run.look(path) as finished:
        summary = summarize(finished)
    first = next(iter(summary.scores.values()))
    facts = summary.facts
    result = {
        "command": facts["command"],
        "date": facts["date"],
        "machine": facts["machine"],
        "seed": facts["seed"],
        "versions": facts["versions"],
        "minutes": sum(summary.phases.values()) / 60,
        **json.loads((folder / "wall.json").read_text()),
        "phases": {name: round(seconds, 1) for name, seconds in summary.phases.items()},
        "tasks": first.tasks,
        "k": first.k,
        "rows": [
            [row["name"], row["pass_1"], row["pass_k"], row["valid"], row["correct"]]
            for row in table(summary)
        ],
        "gains": [[row["name"], row["value"], row["interval"]] for row in gain_table(summary)],
        "remarks": remarks(summary),
        "practice": summary.practice,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "demo.json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Run and record, or only record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.record_only:
        run(arguments.folder)
    record(arguments.folder)


if __name__ == "__main__":
    main()
