"""Making tasks by feature deletion: propose holes, keep what execution proves.

A task is kept only if, with the hole, at least one test that ran its lines fails, every other
test of the suite passes and everything still imports; filling the hole gives the pristine file
back byte for byte, and the pristine suite is known to pass.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from etude.errors import EtudeError
from etude.sandbox.protocol import Sandbox
from etude.tasks.checks import record_all_checks
from etude.tasks.coverage import CoverageMap, measure
from etude.tasks.holes import Function, Hole, SourceFile, apply_edit, delete, find_holes, prompt
from etude.tasks.repository import Repository
from etude.tasks.runner import SuiteRunner
from etude.tasks.settings import MakerSettings
from etude.tasks.splits import all_functions, read_sources, split_functions
from etude.tasks.task import Check, Rung, Split, Task

KIND = "feature-deletion"
SHORT_SUITE = 4.0
"""Seconds under which the whole suite is run for every proposal."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class MadeTasks:
    """What a run of the maker gave. `rejected` counts holes by reason, `missing` what was wanted
    of a (rung, split) and not found; `timed_out` says that the time was up before the holes."""

    tasks: tuple[Task, ...]
    rejected: Counter[str]
    missing: Mapping[tuple[Rung, Split], int]
    seconds: float
    timed_out: bool = False


@dataclass
class _State:
    """What one run of `make` knows and counts."""

    repository: Repository
    runner: SuiteRunner
    settings: MakerSettings
    coverage: CoverageMap
    sources: Mapping[str, SourceFile]
    splits: Mapping[str, Split]
    deadline: float
    rejected: Counter[str] = field(default_factory=Counter[str])

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


async def make(
    repository: Repository,
    *,
    runner: SuiteRunner,
    sandbox: Sandbox,
    settings: MakerSettings | None = None,
    progress: Progress | None = None,
) -> MadeTasks:
    """Make verified tasks until each rung and split has what is wanted or the time is up.

    Which tasks come out depends on the repository and the settings only, not on timing, unless
    `max_seconds` cuts the search. Raises EtudeError when not a single task could be made.
    """
    settings = settings or MakerSettings()
    say = progress or _silent
    started = time.monotonic()
    say("measuring which tests run which lines")
    coverage = await measure(repository, sandbox)
    sources = read_sources(repository.root, repository.source_files)
    functions = all_functions(sources)
    state = _State(
        repository, runner, settings, coverage, sources, split_functions(functions, settings),
        started + settings.max_seconds,
    )  # fmt: skip
    tasks: list[Task] = []
    missing: dict[tuple[Rung, Split], int] = {}
    for rung, wanted in settings.wanted.items():
        holes = _eligible(functions, rung, state)
        for split in (Split.HELDOUT, Split.WARMUP, Split.PRACTICE):
            count: int = getattr(wanted, split.value)
            found = await _collect(holes, (rung, split), count, state, say)
            tasks += found
            if len(found) < count:
                missing[rung, split] = count - len(found)
    if not tasks:
        reasons = ", ".join(f"{count} {reason}" for reason, count in state.rejected.most_common(3))
        raise EtudeError(
            f"{repository.source}: no task could be made from its {len(functions)} functions "
            f"({reasons or 'no test runs them'}); it needs tests that run its code."
        )
    if settings.checks:
        say("recording held-out checks")
        tasks = await _with_checks(tasks, state)
    timed_out = state.late and bool(missing)
    seconds = time.monotonic() - started
    return MadeTasks(tuple(tasks), state.rejected, missing, seconds, timed_out)


def _silent(_: str) -> None:
    """Progress that nobody reads."""


def _eligible(
    functions: Sequence[Function], rung: Rung, state: _State
) -> dict[str, list[tuple[Hole, frozenset[str]]]]:
    """Function → holes of a rung with the tests that run them, those that coverage rules out
    left out and counted."""
    most = state.settings.max_test_share * len(state.repository.tests)
    found: dict[str, list[tuple[Hole, frozenset[str]]]] = {}
    for function in functions:
        for hole in find_holes(state.sources[function.path], function, state.settings):
            if hole.rung is not rung:
                continue
            tests = state.coverage.tests_of(hole.path, *hole.lines)
            if not tests:
                state.rejected["no test runs it"] += 1
            elif state.coverage.at_import(hole.path, *hole.lines):
                state.rejected["runs at import"] += 1
            elif len(tests) > most:
                state.rejected["most tests run it"] += 1
            else:
                found.setdefault(function.name, []).append((hole, tests))
    return found


def _proposals(
    holes: Mapping[str, list[tuple[Hole, frozenset[str]]]], split: Split, state: _State
) -> Iterator[tuple[Hole, frozenset[str]]]:
    """Holes of a split, one of each function in turn, functions and holes shuffled by the seed."""
    queues: list[list[tuple[Hole, frozenset[str]]]] = []
    for name in sorted(holes):
        if state.splits[name] is split:
            queue = list(holes[name])
            random.Random(f"{state.settings.seed}:{name}").shuffle(queue)
            queues.append(queue)
    random.Random(f"{state.settings.seed}:{split}").shuffle(queues)
    while queues:
        for queue in queues:
            yield queue.pop()
        queues = [queue for queue in queues if queue]


async def _collect(
    holes: Mapping[str, list[tuple[Hole, frozenset[str]]]],
    what: tuple[Rung, Split],
    count: int,
    state: _State,
    say: Progress,
) -> list[Task]:
    """Validate proposals, several at a time, and accept them in order until `count` are kept."""
    rung, split = what
    found: list[Task] = []
    taken: Counter[str] = Counter()
    if count == 0:
        return found
    async with aclosing(_validated(_proposals(holes, split, state), split, state)) as results:
        async for task in results:
            if taken[task.function] >= state.settings.max_per_function:
                state.rejected["enough from this function"] += 1
                continue
            taken[task.function] += 1
            found.append(task)
            if len(found) % 10 == 0 or len(found) == count:
                say(f"{rung} tasks, {split}: {len(found)} of {count}")
            if len(found) == count:
                break
    return found


async def _validated(
    proposals: Iterator[tuple[Hole, frozenset[str]]], split: Split, state: _State
) -> AsyncGenerator[Task]:
    """Tasks of the proposals that hold, in the proposals' order; `workers` are tried at a time."""
    running: deque[asyncio.Task[Task | None]] = deque()
    try:
        while True:
            while len(running) < state.settings.workers and not state.late:
                proposal = next(proposals, None)
                if proposal is None:
                    break
                running.append(asyncio.create_task(_validate(*proposal, split, state)))
            if not running:
                return
            task = await running.popleft()
            if task is not None:
                yield task
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _validate(hole: Hole, tests: frozenset[str], split: Split, state: _State) -> Task | None:
    """Run the suite with the hole in place, the tests that run its lines first."""
    source = state.sources[hole.path]
    deletion = delete(source, hole)
    if deletion is None or apply_edit(deletion.text, deletion.answer) != source.text:
        state.rejected["cannot be taken out alone"] += 1
        return None
    changes = {hole.path: deletion.text}
    touching = [test for test in state.repository.tests if test in tests]
    targets, reason = await _targets(changes, touching, state)
    if reason:
        state.rejected[reason] += 1
        return None
    return Task(
        id=_task_id(state.repository, hole),
        repository=state.repository.key,
        kind=KIND,
        rung=hole.rung,
        split=split,
        path=hole.path,
        function=f"{hole.path}::{hole.function}",
        prompt=prompt(hole, deletion, state.settings),
        files=changes,
        reference={hole.path: source.text},
        answer=deletion.answer,
        target_tests=targets,
        allowed_paths=[hole.path],
        meta={
            "hole": hole.kind,
            "line": source.line(hole.start),
            "function_lines": list(hole.function_lines),
            "tests_that_run_it": len(touching),
        },
    )


async def _targets(
    changes: Mapping[str, str], touching: Sequence[str], state: _State
) -> tuple[list[str], str]:
    """The tests that fail with the hole in place, and "" or the reason to reject it."""
    known = set(touching)
    others = [test for test in state.repository.tests if test not in known]
    limit = state.settings.test_timeout + 3 * state.repository.suite_seconds
    # A short suite is run at once: a second guest would cost more than the cheap rejections save.
    # The tests that run the hole come first either way: what they leave behind in the process
    # (filled caches) then belongs to them and not to whichever test happened to come earlier.
    short = state.repository.suite_seconds < SHORT_SUITE
    first = await state.runner.run(
        changes, [*touching, *others] if short else touching, timeout=limit
    )
    outcomes = dict(first.outcomes)
    if not first.finished:
        return [], "the tests do not end"
    if first.collection_errors or not {"missing", "skipped"}.isdisjoint(outcomes.values()):
        return [], "breaks import or collection"
    targets = [test for test in touching if outcomes[test] in ("failed", "error")]
    if not targets:
        return [], "no test fails"
    if not short and others:
        rest = await state.runner.run(changes, others, timeout=limit, stop_at_first_failure=True)
        outcomes.update(rest.outcomes)
        if not rest.finished:
            return [], "the tests do not end"
    if any(outcomes.get(test) != "passed" for test in others):
        return [], "breaks tests that do not run it"
    return targets, ""


def _task_id(repository: Repository, hole: Hole) -> str:
    place = f"{repository.key}:{hole.path}:{hole.start}:{hole.end}:{hole.rung}"
    return f"{repository.name}-{hole.rung}-{hashlib.sha256(place.encode()).hexdigest()[:10]}"


async def _with_checks(tasks: Sequence[Task], state: _State) -> list[Task]:
    """The tasks with the held-out checks of their function, recorded in one run for all."""
    functions = sorted({task.function for task in tasks})
    limit = state.settings.test_timeout + 10 * state.repository.suite_seconds
    checks: Mapping[str, list[Check]] = await record_all_checks(
        state.repository, state.runner, functions, state.repository.tests, timeout=max(limit, 60.0)
    )
    return [task.model_copy(update={"checks": checks[task.function]}) for task in tasks]
