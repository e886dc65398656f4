"""How fast verified tasks are made: `make bench NAME=tasks` writes `results/tasks.json`.

The time counts proposing, validating by the whole suite and recording held-out checks, on the
prepared repository; preparation (once for each repository) is stated in `settings`. Each repeat
has another seed, so other functions and holes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import shape
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.tasks.coverage import measure
from etude.tasks.maker import MadeTasks, make
from etude.tasks.prepare import prepare
from etude.tasks.repository import Repository
from etude.tasks.runner import SuiteRunner
from etude.tasks.settings import MakerSettings, Wanted
from etude.tasks.task import Rung

SOURCE = "pypi:toolz==1.2.0"
GOAL = 67.0
"""200 tasks in three minutes on two cores, which leaves the demo its twenty."""


async def run(
    wanted: Wanted, seeds: list[int], workers: int
) -> tuple[Repository, list[MadeTasks], dict[str, float]]:
    """Prepare once, then make tasks once for each seed."""
    home = os.environ.get("ETUDE_CACHE") or Path.home() / ".cache" / "etude"
    sandbox = BubblewrapSandbox()
    began = time.perf_counter()
    repository = await prepare(SOURCE, cache=Path(home), sandbox=sandbox)
    prepared = time.perf_counter()
    await measure(repository, sandbox)
    times = {"prepare_s": prepared - began, "coverage_s": time.perf_counter() - prepared}
    made: list[MadeTasks] = []
    async with SuiteRunner(repository, sandbox, workers=workers) as runner:
        for seed in seeds:
            settings = MakerSettings(
                seed=seed, wanted={Rung.EXPRESSION: wanted}, workers=workers, max_seconds=3600
            )
            made.append(await make(repository, runner=runner, sandbox=sandbox, settings=settings))
    return repository, made, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few tasks, printed only")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    wanted = Wanted(warmup=1, practice=2, heldout=1) if options.quick else Wanted()
    seeds = list(range(1 if options.quick else options.repeats))
    repository, made, times = asyncio.run(run(wanted, seeds, options.workers))
    rows = [
        shape.alone(
            "valid tasks per minute",
            "tasks/min",
            [60 * len(one.tasks) / one.seconds for one in made],
            goal=GOAL,
        ),
        shape.not_measured(
            "tasks per minute vs SWE-smith", "tasks/min", "the peer is not yet part of this script"
        ),
    ]
    if options.quick:
        for row in rows:
            print(row)
        return
    facts = {
        "source": SOURCE,
        "rung": "expression",
        "tests": len(repository.tests),
        "suite_seconds": repository.suite_seconds,
        "tasks": [len(one.tasks) for one in made],
        "with_checks": [sum(bool(task.checks) for task in one.tasks) for one in made],
        "rejected": [dict(one.rejected) for one in made],
        "workers": options.workers,
        **{name: round(seconds, 2) for name, seconds in times.items()},
    }
    print(shape.write("tasks", rows, facts, seeds))


if __name__ == "__main__":
    main()
