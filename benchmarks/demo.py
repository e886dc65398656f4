"""Record what a finished run printed: python benchmarks/demo.py RUN

Writes `benchmarks/results/demo.json`, from which `benchmarks/tables.py` makes the README's table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from etude.pipeline.report import gain_table, remarks, table
from etude.pipeline.run import Run
from etude.pipeline.summary import summarize
from shape import RESULTS


def main() -> None:
    """Read the run's store and write the record."""
    with Run.resume(Path(sys.argv[1])) as run:
        summary = summarize(run)
    first = next(iter(summary.scores.values()))
    facts = summary.facts
    record = {
        "command": facts["command"],
        "date": facts["date"],
        "machine": facts["machine"],
        "seed": facts["seed"],
        "versions": facts["versions"],
        "minutes": sum(summary.phases.values()) / 60,
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
    (RESULTS / "demo.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
