"""What every phase works with: the sandbox, the prepared repository, its tasks, its graders."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    closing,
    nullcontext,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import EtudeError
from etude.machine import cache_folder
from etude.pipeline.recipe import Recipe
from etude.progress import Progress
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.registry import open_sandbox
from etude.tasks.grading import Grader
from etude.tasks.library import TASKS, Library, load, save
from etude.tasks.maker import make
from etude.tasks.prepare import prepare
from etude.tasks.repository import Repository
from etude.tasks.runner import SuiteRunner
from etude.tasks.task import Split


@dataclass(frozen=True)
class Bench:
    """The repository with a running pool of graders."""

    sandbox: BubblewrapSandbox
    repository: Repository
    runner: SuiteRunner
    grader: Grader


@asynccontextmanager
async def open_bench(
    recipe: Recipe,
    progress: Progress,
    *,
    tasks: Path,
    timer: AbstractAsyncContextManager[None] | None = None,
) -> AsyncGenerator[Bench]:
    """Find the repository that `tasks` were made from, or prepare the recipe's source, inside
    `timer`; then start its graders. Raises EtudeError when the tasks are of another state of the
    source and that state is gone from the cache."""
    with closing(await open_sandbox(recipe.sandbox)) as sandbox:
        async with timer or nullcontext():
            repository = await _repository(recipe, progress, sandbox, tasks)
        progress.say(
            f"{repository.name}: {len(repository.tests)} tests pass every time, one run takes"
            f" {repository.suite_seconds:.1f} s"
        )
        workers = recipe.concurrency.graders
        async with SuiteRunner(repository, sandbox, workers=workers) as runner:
            grader = Grader(repository, runner)
            try:
                yield Bench(sandbox, repository, runner, grader)
            finally:
                await grader.close()


async def _repository(
    recipe: Recipe, progress: Progress, sandbox: BubblewrapSandbox, tasks: Path
) -> Repository:
    known = load(tasks).repository if (tasks / TASKS).exists() else None
    if known is not None and known.root.is_dir() and known.env.is_dir():
        return known
    repository = await prepare(
        recipe.source,
        cache=cache_folder(),
        sandbox=sandbox,
        settings=recipe.prepare,
        progress=progress.say,
    )
    if known is not None and known.key != repository.key:
        raise EtudeError(
            f"{tasks} holds tasks of another state of {recipe.source}, which is no longer in"
            f" {cache_folder()}; start a new run"
        )
    return repository


async def find_or_make_tasks(
    bench: Bench, recipe: Recipe, folder: Path, progress: Progress
) -> Library:
    """Tasks in `folder`; made and saved there when it has none. Raises EtudeError when the
    repository yields too few to learn or to measure anything."""
    if (folder / TASKS).exists():
        return load(folder)
    made = await make(
        bench.repository,
        runner=bench.runner,
        sandbox=bench.sandbox,
        settings=recipe.maker,
        progress=progress.say,
    )
    library = Library(bench.repository, tuple(made.tasks))
    counts = {split: sum(t.split is split for t in library.tasks) for split in Split}
    idle = {Split.PRACTICE} if recipe.practice.steps == 0 else set[Split]()
    missing = [split.value for split, n in counts.items() if n == 0 and split not in idle]
    if missing:
        raise EtudeError(
            f"{bench.repository.name} gave no {' and no '.join(missing)} task: its tests notice too"
            " few of the removals that were tried; use a repository with more tests"
        )
    save(library, folder)
    if made.timed_out:
        progress.say("the search for tasks ended at its time limit, before all were found")
    rejected = ", ".join(f"{reason}: {count}" for reason, count in made.rejected.most_common(3))
    progress.say(
        f"{len(library.tasks)} verified tasks ("
        + ", ".join(f"{count} {split.value}" for split, count in counts.items())
        + f"); rejected {sum(made.rejected.values())}"
        + (f" ({rejected})" if rejected else "")
    )
    return library


async def make_tasks(out: Path, recipe: Recipe, progress: Progress) -> dict[str, Any]:
    """`etude tasks make`: prepare, make, save. Returns counts for printing."""
    if out.exists():
        raise EtudeError(f"{out} exists already; remove it or name another folder with --out")
    async with open_bench(recipe, progress, tasks=out) as bench:
        library = await find_or_make_tasks(bench, recipe, out, progress)
    return {
        "repository": library.repository.name,
        "folder": str(out),
        "tasks": len(library.tasks),
        **{split.value: sum(t.split is split for t in library.tasks) for split in Split},
    }
