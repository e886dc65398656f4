"""The grader: what scores, what does not, what is not measured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_repository import (
    BASKET,
    HOLE,
    START,
    TARGETS,
    TESTS,
    answer,
    make_repository,
    make_task,
)

from etude.records import Verdict
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.tasks.grading import Grader, GraderSettings
from etude.tasks.runner import SuiteResult, SuiteRunner
from etude.tasks.task import Check, Task

CHECK = Check(
    function="shop.basket:total", args="([40, 60], 25)", kwargs="{}", expected="('returns', 75)"
)


class CountingRunner(SuiteRunner):
    """Counts what is really run."""

    count = 0

    async def run(
        self, changes: Mapping[str, str | None], tests: Sequence[str] | None, **options: Any
    ) -> SuiteResult:
        self.count += 1
        return await super().run(changes, tests, **options)


def with_grader(
    folder: Path,
    body: Callable[[Grader, CountingRunner], Awaitable[Any]],
    settings: GraderSettings | None = None,
    store: dict[str, str] | None = None,
) -> Any:
    async def main() -> Any:
        repository = make_repository(folder)
        async with CountingRunner(repository, BubblewrapSandbox(), workers=2) as runner:
            return await body(Grader(repository, runner, settings, store=store), runner)

    return asyncio.run(main())


def grade(
    folder: Path,
    changes: Mapping[str, str | None],
    task: Task | None = None,
    settings: GraderSettings | None = None,
) -> Verdict:
    return with_grader(folder, lambda g, _: g.grade(task or make_task(), changes), settings)


@pytest.mark.parametrize(
    "expression", [HOLE, "whole * (100 - rebate) // 100", "int(whole - whole * rebate / 100)"]
)
def test_right_answers_score(tmp_path: Path, expression: str) -> None:
    verdict = grade(tmp_path, answer(expression), make_task([CHECK]))
    assert verdict.score == 1.0
    assert verdict.flags == ()
    assert verdict.tests == dict.fromkeys(TESTS, "passed")
    assert verdict.seconds > 0


@pytest.mark.parametrize(
    "changes",
    [{}, {"shop/basket.py": START}, {"notes.txt": "done"}, {"shop/files.py": "x = 1\n"}],
    ids=["nothing", "no-op", "another file", "another source file"],
)
def test_no_change_scores_nothing_without_a_run(
    tmp_path: Path, changes: dict[str, str | None]
) -> None:
    async def body(grader: Grader, runner: CountingRunner) -> tuple[Verdict, int]:
        return await grader.grade(make_task(), changes), runner.count

    verdict, count = with_grader(tmp_path, body)
    assert verdict.score == 0.0
    assert count == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (answer("whole"), "test_rebate ended as failed"),
        (answer("(("), "no valid Python"),
        ({"shop/basket.py": ""}, "missing"),
        ({"shop/basket.py": None}, "missing"),
        ({"shop/basket.py": "while True: pass\n"}, "in time"),
    ],
    ids=["wrong", "syntax error", "emptied", "deleted", "endless"],
)
def test_wrong_answers_score_nothing(
    tmp_path: Path, changes: dict[str, str | None], reason: str
) -> None:
    verdict = grade(tmp_path, changes, settings=GraderSettings(timeout=4.0, slack=0.5))
    assert verdict.score == 0.0
    assert reason in verdict.reason
    assert set(verdict.tests) == {*TARGETS}


def test_the_rest_of_the_suite_counts(tmp_path: Path) -> None:
    changes: dict[str, str | None] = {
        "shop/basket.py": BASKET.replace("return items[0]", "return items[-1]")
    }
    verdict = grade(tmp_path, changes)
    assert verdict.score == 0.0
    assert "test_first" in verdict.reason
    assert grade(tmp_path, changes, settings=GraderSettings(full=False)).score == 1.0


def test_a_held_out_check_tells_constants_from_code(tmp_path: Path) -> None:
    constants = answer("{(1, 2): 3, (): 0, (4,): 4, (50, 50): 90}.get(tuple(prices))")
    assert grade(tmp_path / "a", constants).score == 1.0
    verdict = grade(tmp_path / "b", constants, make_task([CHECK]))
    assert verdict.score == 0.0
    assert "held-out check" in verdict.reason


def test_equal_answers_run_once(tmp_path: Path) -> None:
    async def body(grader: Grader, runner: CountingRunner) -> tuple[list[Verdict], int]:
        task = make_task()
        changes = [answer(HOLE), answer(HOLE) | {"notes.txt": "x"}, answer("whole")] * 4
        verdicts = await asyncio.gather(*(grader.grade(task, change) for change in changes))
        verdicts.append(await grader.grade(task, answer(HOLE)))
        return verdicts, runner.count

    store: dict[str, str] = {}
    verdicts, count = with_grader(tmp_path, body, store=store)
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, 0.0] * 4 + [1.0]
    # Two runs for the right answer (targets, rest), one for the wrong one.
    assert count == 3
    assert len(store) == 2

    async def later(grader: Grader, runner: CountingRunner) -> tuple[Verdict, int]:
        return await grader.grade(make_task(), answer(HOLE)), runner.count

    again, count = with_grader(tmp_path, later, store=store)
    assert again == verdicts[0]
    assert count == 0


def test_a_cancelled_wait_does_not_spoil_the_others(tmp_path: Path) -> None:
    async def body(grader: Grader, _: CountingRunner) -> Verdict:
        task = make_task()
        first = asyncio.create_task(grader.grade(task, answer(HOLE)))
        second = asyncio.create_task(grader.grade(task, answer(HOLE)))
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    assert with_grader(tmp_path, body).score == 1.0


def test_a_failing_sandbox_is_not_measured_and_not_kept(tmp_path: Path) -> None:
    store: dict[str, str] = {}

    async def main() -> Verdict:
        repository = make_repository(tmp_path)
        broken = repository.model_copy(update={"env": tmp_path / "absent"})
        async with SuiteRunner(broken, BubblewrapSandbox(), workers=1) as runner:
            return await Grader(repository, runner, store=store).grade(make_task(), answer(HOLE))

    verdict = asyncio.run(main())
    assert verdict.score is None
    assert not verdict.measured
    assert "not measured" in verdict.reason
    assert store == {}


def test_a_task_of_another_repository_is_refused(tmp_path: Path) -> None:
    task = make_task().model_copy(update={"repository": "other"})
    with pytest.raises(ValueError, match="another repository"):
        grade(tmp_path, answer(HOLE), task)
