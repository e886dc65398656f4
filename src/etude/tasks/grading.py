"""Turns what an agent left behind into a verdict.

Only the paths that a task allows travel to a pristine tree; everything else is ignored, and a
changed test or configuration file is named. The target tests run first, then the rest of the
suite; held-out checks decide in the end. An answer scores 1.0 or 0.0; a failure of the sandbox is
*not measured*, never a 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat

from etude.records import Verdict
from etude.sandbox.protocol import WorkspaceError
from etude.tasks.repository import Repository
from etude.tasks.runner import SuiteResult, SuiteRunner
from etude.tasks.scan import scan
from etude.tasks.task import Task

CONFIG_NAMES = frozenset(
    [
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "pyproject.toml", "tox.ini"),
        *("setup.cfg", "setup.py", "sitecustomize.py", "usercustomize.py", ".coveragerc"),
    ]
)
"""Files that decide how tests run; they never travel."""
SOURCE_SUFFIXES = frozenset((".py", ".pyi"))


class GraderSettings(BaseModel):
    """Times are wall-clock seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: PositiveFloat = 5.0
    """Deadline of a run beyond `slack` times what the suite takes. Answers that loop for ever are
    common, and each holds a grader until then."""
    slack: PositiveFloat = 3.0
    full: bool = True
    """Run the rest of the suite when the target tests have passed."""


class Grader:
    """Grades answers to tasks of one repository. Equal answers to a task are run once, also when
    they are graded at the same time; `store` (JSON text by key) keeps verdicts over restarts."""

    def __init__(
        self,
        repository: Repository,
        runner: SuiteRunner,
        settings: GraderSettings | None = None,
        *,
        store: MutableMapping[str, str] | None = None,
    ) -> None:
        self._repository = repository
        self._runner = runner
        self._settings = settings or GraderSettings()
        self._store: MutableMapping[str, str] = {} if store is None else store
        self._running: dict[str, asyncio.Task[Verdict]] = {}

    async def close(self) -> None:
        """Stop whatever is still being graded; nobody waits for it any more."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def grade(self, task: Task, changes: Mapping[str, str | None]) -> Verdict:
        """The verdict on `changes` to the task's start: path to new text, None where the file was
        deleted. A file brought back to its pristine text is a change like any other.

        Raises ValueError for a task of another repository.
        """
        if task.repository != self._repository.key:
            raise ValueError(f"task {task.id} belongs to another repository")
        travelled = {path: changes[path] for path in sorted(changes) if self._travels(task, path)}
        flags = self._flags(task, changes)
        answer = {path: text for path, text in travelled.items() if text != task.files.get(path)}
        if not answer:
            return Verdict(0.0, "nothing of the task's files was changed", flags=flags)
        broken = _unparsable(answer)
        if broken is not None:
            return Verdict(0.0, broken, dict.fromkeys(task.target_tests, "missing"), flags)
        cheats = self._cheats(answer)
        if cheats:
            reason = "the answer contains code that has no business in it"
            return Verdict(0.0, reason, flags=flags + cheats)
        verdict = await self._once(task, dict(task.files) | answer)
        return Verdict(verdict.score, verdict.reason, verdict.tests, flags, verdict.seconds)

    def _travels(self, task: Task, path: str) -> bool:
        return path in task.allowed_paths and not self._judges(path)

    def _judges(self, path: str) -> bool:
        """Whether a file decides how an answer is judged."""
        name = PurePosixPath(path).name
        if path in self._repository.test_files or name in CONFIG_NAMES:
            return True
        return PurePosixPath(path).suffix not in SOURCE_SUFFIXES

    def _flags(self, task: Task, changes: Mapping[str, str | None]) -> tuple[str, ...]:
        """Names what was changed beside the task: tests, configuration, start-up files."""
        flags: list[str] = []
        for path in sorted(changes):
            name = PurePosixPath(path).name
            if path in self._repository.test_files:
                flags.append(f"changed the test file {path}")
            elif name in CONFIG_NAMES or name.endswith(".pth"):
                flags.append(f"changed the configuration file {path}")
        return tuple(flags)

    def _cheats(self, answer: Mapping[str, str | None]) -> tuple[str, ...]:
        found: list[str] = []
        for path, text in answer.items():
            if text is None:
                continue
            file = self._repository.root / path
            pristine = file.read_text("utf-8", "replace") if file.is_file() else None
            found += scan(path, text, pristine)
        return tuple(found)

    async def _once(self, task: Task, files: Mapping[str, str | None]) -> Verdict:
        """The stored verdict of equal files, or a new one."""
        key = answer_key(task, files, self._settings.full)
        stored = self._store.get(key)
        if stored is not None:
            return _decode(stored)
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._measure(task, files))
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        # Shielded: another rollout may wait for the same answer when this one is cancelled.
        verdict = await asyncio.shield(running)
        if verdict.measured:
            self._store[key] = _encode(verdict)
        return verdict

    async def _measure(self, task: Task, files: Mapping[str, str | None]) -> Verdict:
        """Target tests and checks in one guest, then the rest of the suite in another."""
        timeout = self._settings.timeout + self._settings.slack * self._repository.suite_seconds
        run = self._runner.run
        try:
            target = await run(
                files,
                task.target_tests,
                timeout=timeout,
                checks=task.checks,
                stop_at_first_failure=True,
            )
            reason = failure("target", target)
            if reason is None and not all(target.check_results):
                reason = "a held-out check disagrees with the reference"
            if reason is not None or not self._settings.full:
                return _verdict(reason, target)
            required = set(task.target_tests)
            rest = [test for test in self._repository.tests if test not in required]
            if not rest:
                return _verdict(None, target)
            others = await run(files, rest, timeout=timeout, stop_at_first_failure=True)
        except WorkspaceError as error:
            return Verdict(None, f"not measured: {error}")
        return _verdict(failure("other", others), target, others)


def _unparsable(answer: Mapping[str, str | None]) -> str | None:
    """A sentence when a file is no Python: its tests cannot pass, so no guest is spent on it."""
    for path, text in answer.items():
        if text is None or not path.endswith(".py"):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(text, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"{path} is no valid Python: {error}"
    return None


def failure(which: str, result: SuiteResult) -> str | None:
    """Why a run of tests is no success, in one sentence; None if it is one."""
    if result.tampered:
        return f"the record of the {which} tests was tampered with: {result.tampered}"
    if result.timed_out:
        return f"the {which} tests did not end in time"
    for test, outcome in result.outcomes.items():
        if outcome in ("failed", "error", "skipped"):
            return f"the {which} test {test} ended as {outcome}"
    if not result.finished:
        return f"the session of the {which} tests did not end by itself"
    for test, outcome in result.outcomes.items():
        if outcome != "passed":
            return f"the {which} test {test} is {outcome}"
    return None


def answer_key(task: Task, files: Mapping[str, str | None], full: bool) -> str:
    """Hash of the files that run and of all that judges them."""
    checks = [check.model_dump() for check in task.checks]
    judged = [task.repository, task.target_tests, checks, full]
    text = json.dumps([judged, sorted(files.items())], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _verdict(reason: str | None, *results: SuiteResult) -> Verdict:
    tests: dict[str, str] = {}
    for result in results:
        tests.update(result.outcomes)
    seconds = sum(result.seconds for result in results)
    score = 1.0 if reason is None else 0.0
    return Verdict(score, reason or "all tests and checks passed", tests, seconds=seconds)


def _encode(verdict: Verdict) -> str:
    fields: dict[str, Any] = {
        "score": verdict.score,
        "reason": verdict.reason,
        "tests": dict(verdict.tests),
        "seconds": verdict.seconds,
    }
    return json.dumps(fields)


def _decode(text: str) -> Verdict:
    fields = json.loads(text)
    return Verdict(fields["score"], fields["reason"], fields["tests"], seconds=fields["seconds"])
