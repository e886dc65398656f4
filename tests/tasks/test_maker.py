"""Made tasks hold what the issue promises: fails when deleted, passes when restored, splits by
function."""

import ast
import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.tasks.coverage import measure
from etude.tasks.holes import SourceFile, apply_edit
from etude.tasks.maker import MadeTasks, make
from etude.tasks.prepare import prepare
from etude.tasks.repository import Repository
from etude.tasks.runner import SuiteRunner
from etude.tasks.settings import MakerSettings, Wanted
from etude.tasks.splits import heldout_spans, split_functions
from etude.tasks.task import Rung, Split, Task

SOURCE = '''\
"""Words."""

import re

REGISTRY = {}


def register(function):
    """Runs at import for every decorated function."""
    REGISTRY[function.__name__.lower()] = function
    return function


@register
def count(words):
    """How often each word stands."""
    found = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found


@register
def longest(words):
    best = max(words, key=len)
    if len(best) > 3 and best.isalpha():
        return best.upper()
    return None


def split(text):
    return re.findall(r"[a-z]+", text.lower())


def common(text):
    """Used by every test."""
    return text.strip().lower()


def tolerant(value):
    """The tests see no difference here."""
    try:
        return int(value) + 0 * len(str(value))
    except Exception:
        return -1


def unused(value):
    return value * 2 + 1


def shy(values):
    """Broken for one test only by name, not by coverage."""
    total = sum(values) * 1
    return total
'''
TESTS = """\
import inspect

import pytest
from words import common, count, longest, register, shy, split, tolerant


@pytest.fixture(autouse=True)
def everywhere():
    assert common(" A ") == "a"


def test_count():
    assert count(split("a b a")) == {"a": 2, "b": 1}


def test_split():
    assert split("One, two") == ["one", "two"]


@pytest.mark.parametrize("words, best", [(["ab", "word"], "WORD"), (["a"], None)])
def test_longest(words, best):
    assert longest(words) == best


def test_tolerant():
    assert tolerant("x") == -1


def test_register():
    assert register(count) is count


def test_shy():
    assert shy([1, 2]) == 3


def test_source_of_shy():
    assert "sum(values) * 1" in inspect.getsource(shy)
"""


def small(root: Path) -> Repository:
    (root / "tests").mkdir(parents=True)
    (root / "words.py").write_text(SOURCE)
    (root / "tests" / "test_words.py").write_text(TESTS)
    names = ("count", "split", "longest[words0-WORD]", "longest[words1-None]", "tolerant",
             "register", "shy", "source_of_shy")  # fmt: skip
    return Repository(
        key="small", name="words", source=str(root), root=root, env=Path(sys.prefix),
        source_files=("words.py",), test_files=("tests/test_words.py",),
        tests=tuple(f"tests/test_words.py::test_{name}" for name in names), suite_seconds=0.3,
    )  # fmt: skip


def everything(**settings: object) -> MakerSettings:
    wanted = dict.fromkeys(Rung, Wanted(warmup=50, practice=50, heldout=50))
    return MakerSettings(wanted=wanted, **settings)  # pyright: ignore[reportArgumentType]


def with_runner(
    repository: Repository, job: Callable[[SuiteRunner, BubblewrapSandbox], Awaitable[object]]
) -> None:
    async def run() -> None:
        sandbox = BubblewrapSandbox()
        async with SuiteRunner(repository, sandbox, workers=2) as runner:
            await job(runner, sandbox)

    asyncio.run(run())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Repository, MadeTasks]:
    repository = small(tmp_path_factory.mktemp("repo") / "root")
    results: list[MadeTasks] = []

    async def job(runner: SuiteRunner, sandbox: BubblewrapSandbox) -> None:
        results.append(
            await make(repository, runner=runner, sandbox=sandbox, settings=everything())
        )

    with_runner(repository, job)
    return repository, results[0]


def test_each_task_fails_deleted_and_passes_restored(made: tuple[Repository, MadeTasks]) -> None:
    repository, result = made
    pristine = (repository.root / "words.py").read_bytes()

    async def job(runner: SuiteRunner, _: BubblewrapSandbox) -> None:
        for task in result.tasks[::4]:
            broken = await runner.run(task.files, repository.tests, timeout=30)
            failing = {t for t, o in broken.outcomes.items() if o != "passed"}
            assert failing == set(task.target_tests) != set()
            restored = {task.path: apply_edit(task.files[task.path], task.answer)}
            assert restored == task.reference
            assert restored[task.path].encode() == pristine
            fixed = await runner.run(restored, repository.tests, timeout=30, checks=task.checks)
            assert fixed.passed and all(fixed.check_results)

    assert {task.rung for task in result.tasks} == set(Rung)
    with_runner(repository, job)


def test_what_cannot_teach_is_left_out(made: tuple[Repository, MadeTasks]) -> None:
    _, result = made
    functions = {task.function.split("::")[1] for task in result.tasks}
    assert {"count", "longest", "split"} <= functions
    assert functions.isdisjoint({"register", "common", "unused"})
    removed = {task.answer.new for task in result.tasks}
    assert "int(value) + 0 * len(str(value))" not in removed
    assert "sum(values) * 1" not in removed
    reasons = result.rejected
    assert reasons["no test runs it"] > 0  # unused
    assert reasons["runs at import"] > 0  # register
    assert reasons["most tests run it"] > 0  # common
    assert reasons["no test fails"] > 0  # tolerant
    assert reasons["breaks tests that do not run it"] > 0  # shy
    assert result.missing and not result.timed_out


def test_tasks_are_whole(made: tuple[Repository, MadeTasks]) -> None:
    repository, result = made
    assert len({task.id for task in result.tasks}) == len(result.tasks)
    for task in result.tasks:
        assert task.repository == repository.key and task.kind == "feature-deletion"
        assert task.allowed_paths == [task.path] == list(task.files) == list(task.reference)
        assert task.answer.old in task.prompt
        assert task.answer.new not in task.prompt or len(task.answer.new) < 12
        ast.parse(task.files[task.path])
        assert set(task.target_tests) <= set(repository.tests)
    assert any(task.checks for task in result.tasks)


def test_the_same_settings_give_the_same_tasks(made: tuple[Repository, MadeTasks]) -> None:
    repository, result = made
    wanted = {Rung.EXPRESSION: Wanted(warmup=2, practice=3, heldout=2)}
    runs: list[tuple[Task, ...]] = []

    async def job(runner: SuiteRunner, sandbox: BubblewrapSandbox) -> None:
        for _ in range(2):
            settings = MakerSettings(wanted=wanted, checks=False)
            found = await make(repository, runner=runner, sandbox=sandbox, settings=settings)
            runs.append(found.tasks)

    with_runner(repository, job)
    assert runs[0] == runs[1]
    assert {t.id for t in runs[0]} <= {t.id for t in result.tasks}
    assert all(count <= 3 for count in Counter(t.split for t in runs[0]).values())


def test_coverage_knows_tests_and_import_time(made: tuple[Repository, MadeTasks]) -> None:
    repository, _ = made
    source = SourceFile("words.py", SOURCE)
    lines = {f.qualname: f.def_line for f in source.functions}
    found = asyncio.run(measure(repository, BubblewrapSandbox()))
    assert found.at_import("words.py", lines["register"] + 2, lines["register"] + 3)
    assert not found.at_import("words.py", lines["count"] + 2, lines["count"] + 5)
    names = {
        t.split("::")[1] for t in found.tests_of("words.py", lines["count"] + 2, lines["count"] + 5)
    }
    assert names == {"test_count"}
    assert found.tests_of("words.py", lines["unused"] + 1, lines["unused"] + 1) == frozenset()
    assert found.tests_of("words.py", lines["common"] + 2, lines["common"] + 2) == set(
        repository.tests
    )


def test_a_repository_whose_tests_see_nothing_is_told(tmp_path: Path) -> None:
    repository = small(tmp_path / "root")
    (repository.root / "tests" / "test_words.py").write_text("def test_nothing(): pass\n")
    repository = repository.model_copy(update={"tests": ("tests/test_words.py::test_nothing",)})

    async def job(runner: SuiteRunner, sandbox: BubblewrapSandbox) -> None:
        await make(repository, runner=runner, sandbox=sandbox)

    with pytest.raises(EtudeError, match="no task could be made from its 8 functions"):
        with_runner(repository, job)


def test_time_that_is_up_ends_the_search(tmp_path: Path) -> None:
    repository = small(tmp_path / "root")

    async def job(runner: SuiteRunner, sandbox: BubblewrapSandbox) -> None:
        await make(repository, runner=runner, sandbox=sandbox,
                   settings=everything(max_seconds=0.001))  # fmt: skip

    with pytest.raises(EtudeError, match="no task could be made"):
        with_runner(repository, job)


# --- splits -----------------------------------------------------------------------------------


def splits_of(text: str, **settings: float) -> dict[str, Split]:
    functions = SourceFile("m.py", text).functions
    return split_functions(functions, MakerSettings(**settings))  # pyright: ignore[reportArgumentType]


def test_splits_do_not_depend_on_other_functions_and_follow_the_fractions() -> None:
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(2000))
    splits = splits_of(text)
    shares = {s: n / 2000 for s, n in Counter(splits.values()).items()}
    assert abs(shares[Split.HELDOUT] - 0.3) < 0.04
    assert abs(shares[Split.WARMUP] - 0.2) < 0.04
    few = splits_of("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(0, 2000, 7)))
    assert all(splits[name] is split for name, split in few.items())
    assert splits_of(text, seed=1) != splits


def test_the_same_code_under_another_name_shares_its_split() -> None:
    text = "".join(
        f"def a{n}(x: int) -> int:\n    '''Doc.'''\n    return x + {n}\n"
        f"@deco\ndef b{n}(x):\n    return x + {n}\n"
        for n in range(200)
    )
    splits = splits_of(text)
    assert all(splits[f"m.py::a{n}"] is splits[f"m.py::b{n}"] for n in range(200))
    assert len(set(splits.values())) == 3


def test_no_task_of_training_touches_a_heldout_line(made: tuple[Repository, MadeTasks]) -> None:
    repository, result = made
    spans = heldout_spans(repository, everything())
    lines = {n for first, last in spans["words.py"] for n in range(first, last + 1)}
    rows = SOURCE.splitlines()
    assert lines and result.tasks
    assert all(rows[first - 1].startswith(("def ", "@")) for first, _ in spans["words.py"])
    for task in result.tasks:
        assert (task.meta["line"] in lines) == (task.split is Split.HELDOUT)
        if task.split is not Split.HELDOUT:
            secret = {rows[n - 1].strip() for n in lines} - {""}
            open_rows = {r.strip() for n, r in enumerate(rows, 1) if n not in lines}
            shown = {row.strip() for row in task.prompt.split("\n\n", 1)[1].splitlines()}
            assert not shown & (secret - open_rows)


# --- the real thing ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_toolz_from_the_registry(tmp_path: Path) -> None:
    """`pypi:toolz` end to end, then once more without a network."""

    async def run() -> None:
        sandbox = BubblewrapSandbox()
        repository = await prepare("pypi:toolz==1.2.0", cache=tmp_path, sandbox=sandbox)
        assert len(repository.tests) > 150
        assert "toolz/itertoolz.py" in repository.source_files
        assert not [f for f in repository.source_files if "tests" in f]
        wanted = dict.fromkeys(Rung, Wanted(warmup=2, practice=4, heldout=4))
        async with SuiteRunner(repository, sandbox, workers=2) as runner:
            made = await make(
                repository, runner=runner, sandbox=sandbox, settings=MakerSettings(wanted=wanted)
            )
            assert len(made.tasks) == 30 and not made.missing
            for task in made.tasks[::5]:
                fixed = {task.path: apply_edit(task.files[task.path], task.answer)}
                result = await runner.run(fixed, repository.tests, timeout=60, checks=task.checks)
                assert result.passed and all(result.check_results)

    asyncio.run(run())
