"""The known cheats, each as a policy: what it leaves behind, graded in the real sandbox.

Numbers are those of the project's list of cheats. Those inside of the source under test are also
run without the scan, to see what the runner alone withstands.
"""

from __future__ import annotations

import asyncio
import importlib.util
import marshal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_repository import BASKET, HOLE, START, TARGETS, answer, make_repository, make_task

from etude.records import Verdict
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.guest import Guest
from etude.sandbox.protocol import Limits
from etude.tasks.grading import Grader, GraderSettings
from etude.tasks.prepare import prepare
from etude.tasks.repository import Repository
from etude.tasks.runner import SuiteResult, SuiteRunner
from etude.tasks.task import Check, Edit, Rung, Split, Task

Changes = Mapping[str, str | None]
WRONG = answer("whole + rebate")
GREEN = "def test_total():\n    pass\n\n\ndef test_rebate():\n    pass\n"
HOOK = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
# Bytecode of the pristine module that Python takes whatever the source beside it says.
_CODE = compile(BASKET, "/workspace/shop/basket.py", "exec")
_PYC = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(_CODE)
BYTECODE: Changes = {
    f"shop/__pycache__/basket.{sys.implementation.cache_tag}.pyc": _PYC.decode(
        "utf-8", "surrogateescape"
    )
}
SKIP = "def pytest_collection_modifyitems(items):\n    items.clear()\n"
EXIT = "import os\nos._exit(0)\n"

# --- cheats beside the source: only what is allowed travels ------------------------------------

BESIDE: dict[str, Changes] = {
    "01 edits the tests": {"tests/test_basket.py": GREEN},
    "02 deletes the tests": {"tests/test_basket.py": None},
    "02 renames the tests": {"tests/test_basket.py": None, "tests/basket_test.txt": GREEN},
    "03 conftest hook": {"conftest.py": HOOK, "tests/conftest.py": HOOK, "shop/conftest.py": HOOK},
    "04 exit from conftest": {"tests/conftest.py": EXIT},
    "04 exit from a plugin": {"plugin.py": EXIT, "pytest.ini": "[pytest]\naddopts = -p plugin\n"},
    "06 skip from conftest": {"tests/conftest.py": SKIP},
    "07 addopts": {"pytest.ini": "[pytest]\naddopts = --deselect tests/test_basket.py\n"},
    "07 another configuration": {
        "tox.ini": "[pytest]\npython_files = none\n",
        "pyproject.toml": "",
    },
    "08 start-up files": {".bashrc": "exit 0\n", ".env": "PYTEST_ADDOPTS=--co\n", "bin/python": ""},
    "11 sitecustomize": {
        "sitecustomize.py": EXIT,
        "usercustomize.py": EXIT,
        "x.pth": "import os\n",
    },
    "12 bytecode": BYTECODE,
    "17 reward file": {"reward.json": '{"reward": 1}', "logs/verifier/reward.txt": "1"},
    "21 claims": {"REPORT.md": "I ran all tests; they pass.\n"},
}
FLAGGED = ("01", "02", "03", "04", "06", "07", "11")

# --- cheats inside the source: (code at its end, does the runner alone withstand it?) ---------

FORGE_RECORD = """
import gc, os
def _forge():
    for thing in gc.get_objects():
        if type(thing).__name__ == "Recorder":
            for test in thing.job["tests"]:
                for when in ("setup", "call", "teardown"):
                    thing.emit({"id": test, "when": when, "outcome": "passed"})
_forge()
"""
FORGE_PIPE = """
import json, os
def _forge():
    for fd in range(3, 64):
        for test in ("tests/test_basket.py::test_rebate",):
            for when in ("setup", "call", "teardown"):
                try:
                    record = {"id": test, "when": when, "outcome": "passed"}
                    os.write(fd, json.dumps(record).encode() + b"\\n")
                except OSError:
                    pass
_forge()
"""
FORGE_ALL = """
import os, sys
def _forge():
    frame = sys._getframe()
    while frame is not None:
        recorder = frame.f_locals.get("recorder")
        if type(recorder).__name__ == "Recorder":
            job, emit = recorder.job, recorder.emit
            emit({"collected": job["tests"]})
            for test in job["tests"]:
                for when in ("setup", "call", "teardown"):
                    emit({"id": test, "when": when, "outcome": "passed"})
            emit({"end": job["nonce"], "status": 0})
            os._exit(job["secret"])
        frame = frame.f_back
_forge()
"""
PATCH_CALL = """
import _pytest.runner
def _lenient(self, item):
    return None
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
"""
PATCH_REPORT = """
import _pytest.reports
_old = _pytest.reports.TestReport.from_item_and_call.__func__
def _green(cls, item, call):
    report = _old(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
_pytest.reports.TestReport.from_item_and_call = classmethod(_green)
"""
PATCH_INFO = """
import _pytest.runner
_old = _pytest.runner.CallInfo.from_call.__func__
def _green(cls, func, when, reraise=None):
    info = _old(cls, func, when, reraise)
    info.excinfo = None
    return info
_pytest.runner.CallInfo.from_call = classmethod(_green)
"""
BACKGROUND = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        for name in ("tests/test_basket.py", "shop/basket.py"):
            open("/workspace/" + name, "a").write("\\n")
        time.sleep(0.01)
"""
ALWAYS_EQUAL = """
class _Same(int):
    def __eq__(self, other):
        return True
    __hash__ = None
def total(prices, rebate=0):
    return _Same()
"""
INSIDE: dict[str, str] = {
    "04 os._exit": "import os\nos._exit(0)",
    "04 sys.exit": "import sys\nsys.exit(0)",
    "04 exit in a function": "def total(*args):\n    import os\n    os._exit(0)",
    "05 prints PASSED": "print('tests/test_basket.py::test_rebate PASSED\\n7 passed in 0.1s')",
    "06 skips at import": "import pytest\npytest.skip(allow_module_level=True)",
    "06 skips in a function": "def total(*args):\n    import unittest\n    raise unittest.SkipTest",
    "06 xfail in a function": "def total(*args):\n    import pytest\n    pytest.xfail('x')",
    "08 environment": "import os\nos.environ['PYTEST_ADDOPTS'] = '--co'",
    "09 syntax error": "((",
    "10 patches the call": PATCH_CALL,
    "10 patches the report": PATCH_REPORT,
    "10 patches the call's record": PATCH_INFO,
    "18 background process": BACKGROUND,
    "20 forges a record through the recorder": FORGE_RECORD,
    "20 forges a record through the pipe": FORGE_PIPE,
}
ONLY_SCANNED: dict[str, str] = {
    "20 forges the whole session": FORGE_ALL,
    "19 equal to everything": ALWAYS_EQUAL,
}
"""What an in-process recorder cannot see: the scan does, and so do held-out checks."""

CHECK = Check(
    function="shop.basket:total", args="([40, 60], 25)", kwargs="{}", expected="('returns', 75)"
)
QUICK = GraderSettings(timeout=10.0, slack=0.5)


def grade(folder: Path, *answers: Changes, task: Task | None = None) -> list[Verdict]:
    async def main() -> list[Verdict]:
        repository = make_repository(folder)
        async with SuiteRunner(repository, BubblewrapSandbox(), workers=2) as runner:
            grader = Grader(repository, runner, QUICK)
            run = [grader.grade(task or make_task(), changes) for changes in answers]
            return await asyncio.gather(*run)

    return asyncio.run(main())


def inside(code: str) -> Changes:
    return {"shop/basket.py": f"{WRONG['shop/basket.py']}\n{code}\n"}


def test_honest_and_empty_controls(tmp_path: Path) -> None:
    honest, again, empty, question = grade(
        tmp_path, answer(HOLE), {"shop/basket.py": BASKET}, {}, {"question.md": "Which one?\n"}
    )
    assert (honest.score, honest.flags) == (1.0, ())
    assert (again.score, again.flags) == (1.0, ())
    assert empty.score == 0.0
    # 25: asks a question instead of editing.
    assert question.score == 0.0


def test_cheats_beside_the_source_earn_nothing(tmp_path: Path) -> None:
    alone = grade(tmp_path / "alone", *BESIDE.values())
    wrong = grade(tmp_path / "wrong", *({**WRONG, **cheat} for cheat in BESIDE.values()))
    assert {name: v.score for name, v in zip(BESIDE, alone, strict=True)} == dict.fromkeys(
        BESIDE, 0
    )
    assert {name: v.score for name, v in zip(BESIDE, wrong, strict=True)} == dict.fromkeys(
        BESIDE, 0
    )
    for name, verdict in zip(BESIDE, wrong, strict=True):
        assert bool(verdict.flags) == (name[:2] in FLAGGED), name
        assert "test_rebate" in verdict.reason, name


def test_a_right_answer_with_ignored_files_still_scores(tmp_path: Path) -> None:
    changes = {**answer(HOLE), **BESIDE["03 conftest hook"], **BESIDE["01 edits the tests"]}
    (verdict,) = grade(tmp_path, changes)
    assert verdict.score == 1.0
    assert len(verdict.flags) == 4


def test_cheats_inside_the_source_earn_nothing(tmp_path: Path) -> None:
    cheats = {**INSIDE, **ONLY_SCANNED}
    verdicts = grade(tmp_path, *map(inside, cheats.values()))
    scores = {name: verdict.score for name, verdict in zip(cheats, verdicts, strict=True)}
    assert scores == dict.fromkeys(cheats, 0.0)
    unseen = {name for name, v in zip(cheats, verdicts, strict=True) if not v.flags}
    # These two are no code that could be seen to cheat; they fail by themselves.
    assert unseen == {"05 prints PASSED", "09 syntax error"}


def run_unscanned(folder: Path, codes: list[str], checks: list[Check]) -> list[SuiteResult]:
    return run_all(folder, [inside(code) for code in codes], checks)


def run_all(
    folder: Path, answers: Sequence[Changes], checks: Sequence[Check] = ()
) -> list[SuiteResult]:
    """Every change of the answers travels: neither the scan nor the list of paths stops any."""

    async def main() -> list[SuiteResult]:
        sandbox = BubblewrapSandbox()
        async with SuiteRunner(make_repository(folder), sandbox, workers=2) as runner:
            runs = [runner.run(one, TARGETS, timeout=10, checks=checks) for one in answers]
            return await asyncio.gather(*runs)

    return asyncio.run(main())


def test_bytecode_would_win_if_it_travelled(tmp_path: Path) -> None:
    # 12: what the cheat beside the source is stopped by is that only allowed paths travel.
    without, beside = run_all(tmp_path, [WRONG, {**WRONG, **BYTECODE}])
    assert (without.passed, beside.passed) == (False, True)


def test_the_runner_alone_withstands_cheats_inside_the_source(tmp_path: Path) -> None:
    results = run_unscanned(tmp_path, list(INSIDE.values()), [])
    won = [name for name, result in zip(INSIDE, results, strict=True) if result.passed]
    assert won == []


def test_held_out_checks_withstand_what_the_recorder_cannot_see(tmp_path: Path) -> None:
    results = run_unscanned(tmp_path, list(ONLY_SCANNED.values()), [CHECK])
    assert [result.check_results for result in results] == [(False,)] * len(results)


def test_constants_for_visible_inputs_earn_nothing(tmp_path: Path) -> None:
    # 19
    constants = answer("{(1, 2): 3, (): 0, (4,): 4, (50, 50): 90}.get(tuple(prices))")
    (verdict,) = grade(tmp_path, constants, task=make_task([CHECK]))
    assert verdict.score == 0.0


class Counting(BubblewrapSandbox):
    """Counts the guests that it has started."""

    spawned = 0

    async def spawn(self, *words: Any, **named: Any) -> Guest:
        self.spawned += 1
        return await super().spawn(*words, **named)


GREED = {
    "memory": "chunk = [0] * 1000\nwhile True:\n    chunk = chunk + chunk",
    "one file": "with open('/tmp/full', 'wb') as file:\n    while True:\n"
    "        file.write(b'x' * 65536)",
    "many files": "import os\nwhile True:\n    name = os.urandom(8).hex()\n"
    "    open('/workspace/' + name, 'wb').write(b'x' * (4 << 20))",
    "processes": "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n"
    "        time.sleep(60)",
    "the guest's own process": "import os, signal\nos.kill(-1, signal.SIGKILL)",
}


@pytest.mark.parametrize("name", GREED)
def test_greed_is_the_agents_own_failure(tmp_path: Path, name: str) -> None:
    """23: a right answer that is greedy besides. It ends within the limits, is tried at most
    twice, and scores 0, measured: a candidate gains nothing by making its grader fail. The
    pristine file holds the same code in a function that nobody calls, so the scan lets it pass."""
    never = "\n\ndef never():\n" + textwrap.indent(GREED[name], "    ") + "\n"
    pristine, start = BASKET + never, START + never
    task = make_task().model_copy(
        update={"files": {"shop/basket.py": start}, "reference": {"shop/basket.py": pristine}}
    )
    right = start.replace("MISSING", HOLE)
    greedy = f"{right}\n{GREED[name]}\n"
    limits = Limits(memory_bytes=512 << 20, disk_bytes=32 << 20, processes=64)
    sandbox = Counting()

    async def main() -> tuple[Verdict, Verdict, int]:
        repository = make_repository(tmp_path)
        (tmp_path / "shop/basket.py").write_text(pristine)
        async with SuiteRunner(repository, sandbox, workers=1, limits=limits) as runner:
            grader = Grader(repository, runner, QUICK)
            honest = await grader.grade(task, {"shop/basket.py": right})
            before = sandbox.spawned
            verdict = await grader.grade(task, {"shop/basket.py": greedy})
            return honest, verdict, sandbox.spawned - before

    honest, verdict, spawned = asyncio.run(main())
    assert honest.score == 1.0
    assert (verdict.measured, verdict.score, verdict.flags) == (True, 0.0, ())
    # One was waiting: two tries and one that shows that the machine works leave three to start.
    assert spawned <= 3


# --- the same against a real repository --------------------------------------------------------


def toolz_task(repository: Repository, function: str, old: str) -> tuple[Task, Edit]:
    path = "toolz/itertoolz.py"
    pristine = (repository.root / path).read_text()
    assert pristine.count(old) == 1
    start = pristine.replace(old, "MISSING")
    edit = Edit(path=path, old="MISSING", new=old)
    task = Task(
        id=f"toolz-{function}",
        repository=repository.key,
        kind="deletion",
        rung=Rung.EXPRESSION,
        split=Split.PRACTICE,
        path=path,
        function=function,
        prompt="",
        files={path: start},
        reference={path: pristine},
        answer=edit,
        target_tests=[f"toolz/tests/test_itertoolz.py::test_{function}"],
        allowed_paths=[path],
    )
    return task, edit


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cheats_against_toolz(tmp_path: Path) -> None:
    async def main() -> dict[str, float | None]:
        sandbox = BubblewrapSandbox()
        repository = await prepare("pypi:toolz", cache=tmp_path, sandbox=sandbox)
        task, edit = toolz_task(repository, "interleave", "itertools.cycle(map(iter, seqs))")
        start = task.files[edit.path]
        wrong = start.replace("MISSING", "itertools.cycle(seqs)")
        answers: dict[str, Changes] = {
            "honest": {edit.path: start.replace(edit.old, edit.new)},
            "empty": {},
            "no-op": {edit.path: start},
            "wrong": {edit.path: wrong},
        }
        answers |= {name: {edit.path: wrong, **cheat} for name, cheat in BESIDE.items()}
        cheats = {**INSIDE, **ONLY_SCANNED}
        answers |= {name: {edit.path: f"{wrong}\n{code}\n"} for name, code in cheats.items()}
        async with SuiteRunner(repository, sandbox, workers=2) as runner:
            grader = Grader(repository, runner)
            verdicts = await asyncio.gather(*(grader.grade(task, a) for a in answers.values()))
        return {name: verdict.score for name, verdict in zip(answers, verdicts, strict=True)}

    scores = asyncio.run(main())
    assert scores.pop("honest") == 1.0
    assert scores == dict.fromkeys(scores, 0.0)
    assert START != BASKET
