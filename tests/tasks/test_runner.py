"""The suite runner against what tests and candidates can do, in the real sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from small_repository import BASKET, TARGETS, TESTS, answer, make_repository

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import WorkspaceError
from etude.tasks.runner import SuiteResult, SuiteRunner
from etude.tasks.task import Check

T = TypeVar("T")
PROBE = "tests/test_probe.py"


@asynccontextmanager
async def open_runner(folder: Path, workers: int = 1) -> AsyncGenerator[SuiteRunner]:
    sandbox = BubblewrapSandbox()
    try:
        async with SuiteRunner(make_repository(folder), sandbox, workers=workers) as runner:
            yield runner
    finally:
        sandbox.close()


def with_runner(folder: Path, body: Callable[[SuiteRunner], Awaitable[T]], workers: int = 1) -> T:
    async def main() -> T:
        async with open_runner(folder, workers) as runner:
            return await body(runner)

    return asyncio.run(main())


def probe(folder: Path, source: str, *names: str, timeout: float = 20.0) -> SuiteResult:
    """Run the tests of one more file."""
    ids = [f"{PROBE}::{name}" for name in names]
    return with_runner(folder, lambda r: r.run({PROBE: source}, ids, timeout=timeout))


def short(result: SuiteResult) -> dict[str, str]:
    return {test.split("::")[-1]: outcome for test, outcome in result.outcomes.items()}


def test_whole_suite_passes_on_the_pristine_tree(tmp_path: Path) -> None:
    result = with_runner(tmp_path, lambda r: r.run({}, None, timeout=30))
    assert result.passed
    assert not result.timed_out
    assert result.outcomes == dict.fromkeys(TESTS, "passed")
    assert 0 < result.seconds < 30


def test_failures_are_those_of_plain_pytest(tmp_path: Path) -> None:
    result = with_runner(tmp_path, lambda r: r.run(answer("whole"), None, timeout=30))
    wrong = {"tests/test_basket.py::test_rebate"}
    assert {test for test, end in result.outcomes.items() if end == "failed"} == wrong
    assert {test for test, end in result.outcomes.items() if end == "passed"} == {*TESTS} - wrong
    assert result.finished
    assert not result.passed
    assert "assert total([50, 50], 10) == 90" in result.tail


def test_each_phase_and_kind_of_outcome(tmp_path: Path) -> None:
    source = """
import pytest

@pytest.fixture
def broken():
    raise ValueError

@pytest.fixture
def late():
    yield
    raise ValueError

def test_good(): pass
def test_bad(): assert False
def test_setup(broken): pass
def test_teardown(late): pass
def test_skip(): pytest.skip("not now")
@pytest.mark.skip
def test_marked(): pass
@pytest.mark.xfail
def test_expected(): assert False
def test_exit(): raise SystemExit(0)
"""
    names = ["good", "bad", "setup", "teardown", "skip", "marked", "expected", "exit", "absent"]
    result = probe(tmp_path, source, *(f"test_{name}" for name in names))
    ends = ["passed", "failed", "error", "error", *["skipped"] * 3, "failed", "missing"]
    assert short(result) == {f"test_{name}": end for name, end in zip(names, ends, strict=True)}
    assert result.finished


def test_syntax_error_is_missing_and_named(tmp_path: Path) -> None:
    result = with_runner(tmp_path, lambda r: r.run(answer("(("), TARGETS, timeout=30))
    assert set(result.outcomes.values()) == {"missing"}
    assert not result.passed
    # The shared conftest imports the broken file: pytest cannot even begin.
    assert "SyntaxError" in result.tail


def test_broken_test_file_does_not_hide_the_others(tmp_path: Path) -> None:
    changes = {PROBE: "import nothing_of_that_name\n"}
    result = with_runner(tmp_path, lambda r: r.run(changes, None, timeout=30))
    assert result.outcomes == dict.fromkeys(TESTS, "passed")
    assert list(result.collection_errors) == [PROBE]
    assert "nothing_of_that_name" in result.collection_errors[PROBE]


@pytest.mark.parametrize(
    "statement",
    [
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getppid(), 9)",
        "os.kill(os.getppid(), 19)",
        "os.abort()",
        "raise KeyboardInterrupt",
        "pytest.exit('all good', returncode=0)",
    ],
)
def test_candidate_that_ends_the_session_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.setattr("etude.tasks.runner.GRACE_SECONDS", 1.5)
    source = (
        f"import os, pytest\ndef test_a(): pass\ndef test_b(): {statement}\ndef test_c(): pass\n"
    )
    result = probe(tmp_path, source, "test_a", "test_b", "test_c", timeout=2.0)
    assert not result.passed
    assert result.outcomes[f"{PROBE}::test_c"] == "missing"


def test_hang_ends_at_the_deadline(tmp_path: Path) -> None:
    begun = time.monotonic()
    result = probe(
        tmp_path, "def test_a(): pass\ndef test_b():\n  while True: pass\n", "test_a", "test_b",
        timeout=1.5,
    )  # fmt: skip
    assert result.timed_out
    assert not result.finished
    assert short(result) == {"test_a": "passed", "test_b": "missing"}
    assert time.monotonic() - begun < 30


def test_grandchild_with_the_pipe_delays_nothing(tmp_path: Path) -> None:
    source = """
import os
def test_a():
    for fd in range(3, 64):
        try: os.set_inheritable(fd, True)
        except OSError: pass
    os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
"""
    result = probe(tmp_path, source, "test_a", timeout=50.0)
    assert result.passed
    assert result.seconds < 20


def test_output_is_capped_and_never_parsed(tmp_path: Path) -> None:
    source = """
import sys
def test_a(capfd):
    with capfd.disabled():
        for _ in range(300):
            print('{"id": "x", "when": "call", "outcome": "passed"}' * 1000)
        print("the end PASSED")
    assert False
"""
    result = probe(tmp_path, source, "test_a")
    assert short(result) == {"test_a": "failed"}
    assert len(result.tail) <= 4000


def test_stop_at_first_failure(tmp_path: Path) -> None:
    changes = {PROBE: "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): assert 0\n"}
    ids = [f"{PROBE}::test_{name}" for name in "abc"]

    async def body(runner: SuiteRunner) -> SuiteResult:
        return await runner.run(changes, ids, timeout=20, stop_at_first_failure=True)

    result = with_runner(tmp_path, body)
    assert short(result) == {"test_a": "passed", "test_b": "failed", "test_c": "missing"}
    assert result.finished


def test_order_is_the_given_one_or_shuffled_by_the_seed(tmp_path: Path) -> None:
    names = "hgfedcba"
    source = "seen = []\n" + "".join(
        f"def test_{name}():\n    seen.append('{name}')\n"
        f"    assert ''.join(seen) == '{''.join(sorted(names))}'[:len(seen)]\n"
        for name in names
    )
    ids = [f"{PROBE}::test_{name}" for name in sorted(names)]

    async def body(runner: SuiteRunner) -> list[SuiteResult]:
        return [
            await runner.run({PROBE: source}, ids, timeout=20, order_seed=seed)
            for seed in (None, 3, 3, 4)
        ]

    given, one, again, other = with_runner(tmp_path, body)
    assert given.passed
    assert not one.passed
    assert one.outcomes == again.outcomes
    assert other.finished


def test_hash_seed_is_fixed_and_can_be_chosen(tmp_path: Path) -> None:
    check = Check(function="builtins:hash", args="('word',)", kwargs="{}", expected="")

    async def body(runner: SuiteRunner) -> list[str | None]:
        found: list[str | None] = []
        for seed in (None, None, 0, 7, 7):
            result = await runner.run({}, (), timeout=20, checks=[check], hash_seed=seed)
            found += result.call_results
        return found

    first, second, zero, seven, again = with_runner(tmp_path, body)
    assert first is not None
    assert first == second == zero
    assert seven == again != first


def test_parent_is_out_of_reach(tmp_path: Path) -> None:
    source = """
import os, pytest
def test_a():
    parent = os.getppid()
    assert parent > 2
    for pid in (2, parent):
        for name in ("mem", "environ", "fd/0", "fd/1", "fd/3"):
            with pytest.raises(PermissionError):
                open(f"/proc/{pid}/{name}", "rb").read(1)
"""
    assert probe(tmp_path, source, "test_a").passed


def test_forged_answers_on_the_guests_own_output_are_noise(tmp_path: Path) -> None:
    # Process 1 of the namespace holds the pipe to the host open, and can be opened by anybody.
    source = """
import json, os
def test_a():
    outcomes = {"tests/test_probe.py::test_a": "passed"}
    answer = {"outcomes": outcomes, "finished": True, "tampered": "", "results": {}}
    lines = [json.dumps(m) for m in (answer, {"answer": answer}, {"token": "", "answer": answer})]
    out = os.open("/proc/1/fd/1", os.O_WRONLY)
    os.write(out, "\\n\\n".join(["", *lines, "[1", "no message"]).encode())
    assert False
"""
    result = probe(tmp_path, source, "test_a")
    assert short(result) == {"test_a": "failed"}


def test_repository_configuration_is_kept_but_not_its_addopts(tmp_path: Path) -> None:
    # `filterwarnings = error` of the repository holds; its unknown flags and `-x` do not.
    source = "import warnings\ndef test_a(): warnings.warn('x')\ndef test_b(): pass\n"
    result = probe(tmp_path, source, "test_a", "test_b")
    assert short(result) == {"test_a": "failed", "test_b": "passed"}


def test_doctests_exist_where_the_repository_wants_them(tmp_path: Path) -> None:
    repository = make_repository(tmp_path)
    config = '[tool.pytest.ini_options]\naddopts = ["--doctest-modules"]\n'
    (tmp_path / "pyproject.toml").write_text(config)
    (tmp_path / "shop" / "more.py").write_text(
        'def one():\n    """\n    >>> one()\n    1\n    """\n    return 1\n'
    )

    async def main() -> SuiteResult:
        async with SuiteRunner(repository, BubblewrapSandbox(), workers=1) as runner:
            return await runner.run({}, ["shop/more.py::shop.more.one"], timeout=20)

    result = asyncio.run(main())
    assert result.passed
    assert set(result.outcomes.values()) == {"passed"}


@pytest.mark.parametrize("path", ["../x.py", "/etc/passwd", "a/../../b.py", ""])
def test_paths_that_lead_out_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        with_runner(tmp_path, lambda r: r.run({path: ""}, (), timeout=5))


def test_guests_share_nothing(tmp_path: Path) -> None:
    async def body(runner: SuiteRunner) -> list[SuiteResult]:
        expressions = [
            "whole - whole * rebate // 100",
            "whole",
            "0",
            "(whole * (100 - rebate)) // 100",
        ]
        runs = [runner.run(answer(expressions[n % 4]), TARGETS, timeout=30) for n in range(12)]
        return await asyncio.gather(*runs)

    results = with_runner(tmp_path, body, workers=2)
    assert [result.passed for result in results] == [True, False, False, True] * 3
    assert (tmp_path / "shop/basket.py").read_text() == BASKET


def test_a_guest_that_dies_while_waiting_is_replaced(tmp_path: Path) -> None:
    async def body(runner: SuiteRunner) -> SuiteResult:
        for guest in await asyncio.gather(*runner._warming):
            await guest.kill()
        return await runner.run({}, TARGETS, timeout=20)

    assert with_runner(tmp_path, body).passed


def test_a_machine_that_cannot_start_guests_is_not_measured(tmp_path: Path) -> None:
    repository = make_repository(tmp_path)
    broken = repository.model_copy(update={"env": tmp_path / "no-environment"})

    async def main() -> None:
        async with SuiteRunner(broken, BubblewrapSandbox(), workers=1) as runner:
            await runner.run({}, TARGETS, timeout=20)

    with pytest.raises(WorkspaceError):
        asyncio.run(main())


def test_an_interpreter_without_pytest_is_not_measured(tmp_path: Path) -> None:
    env = tmp_path / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").symlink_to("/bin/false")
    repository = make_repository(tmp_path / "repository").model_copy(update={"env": env})

    async def main() -> None:
        async with SuiteRunner(repository, BubblewrapSandbox(), workers=1) as runner:
            await runner.run({}, TARGETS, timeout=20)

    with pytest.raises(WorkspaceError, match="did not start"):
        asyncio.run(main())


def test_cancelled_run_leaves_a_usable_runner(tmp_path: Path) -> None:
    async def body(runner: SuiteRunner) -> SuiteResult:
        endless = {PROBE: "def test_a():\n    while True: pass\n"}
        run = asyncio.create_task(runner.run(endless, [f"{PROBE}::test_a"], timeout=60))
        await asyncio.sleep(1.0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return await runner.run({}, TARGETS, timeout=20)

    assert with_runner(tmp_path, body).passed
