"""The child that runs tests: pytest with a plugin that reports through the parent's pipe."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .calls import CallRecorder
from .wire import ROOT

MAX_ERROR = 2_000
"""Characters kept of a collection error."""


class Recorder:
    """The pytest plugin of the child. Sends one record for each phase of each test."""

    def __init__(self, job: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
        self.job = job
        self.emit = emit
        self.canaries: set[str] = set()
        self.raised = False

    def arrange(self, session: Any, items: list[Any]) -> None:
        """Keep the wanted tests, put them in order, plant the canaries among them."""
        wanted: list[str] | None = self.job["tests"]
        if wanted is not None:
            places = {test: at for at, test in enumerate(wanted)}
            chosen = [item for item in items if item.nodeid in places]
            chosen.sort(key=lambda item: places[item.nodeid])
        else:
            chosen = list(items)
        seed: int | None = self.job["order_seed"]
        if seed is not None:
            chosen = shuffled(chosen, seed)
        if chosen:
            self.plant(chosen)
        items[:] = chosen
        self.emit({"collected": [item.nodeid for item in chosen]})

    def plant(self, chosen: list[Any]) -> None:
        """Put two tests among the others that look like them: one must fail, one must pass."""
        import pytest

        place = random.Random(self.job["nonce"])
        parents = [item.getparent(pytest.Module) for item in chosen]
        modules = [parent for parent in parents if type(parent) is pytest.Module]
        if not modules:
            return
        parent = place.choice(modules)
        # The failing one stands among the first tests: a run that stops at the first failure
        # has then always met it before it can be called complete.
        for key in ("good", "bad"):
            name = self.job["canaries"][key]
            item = pytest.Function.from_parent(
                parent, name=name, callobj=canary(name, parent, key == "good")
            )
            self.canaries.add(item.nodeid)
            self.emit({"canary": key, "id": item.nodeid})
            chosen.insert(place.randrange(2), item)

    def phase(self, item: Any, call: Any, report: Any) -> None:
        """Judge a phase by what was raised and by the report: it passes only if both say so."""
        outcome = report.outcome
        if outcome == "passed" and call.excinfo is not None:
            outcome = "failed"
        self.emit({"id": item.nodeid, "when": call.when, "outcome": outcome})
        if item.nodeid in self.canaries:
            # Already noted; a person who reads the output should not be puzzled by it.
            report.outcome, report.longrepr = "passed", None
            return
        if outcome != "passed":
            self.raised = True
            if self.job["stop_at_first_failure"]:
                item.session.shouldstop = "a test failed"


def canary(name: str, parent: Any, good: bool) -> Callable[[], None]:
    """A test function that seems to stand in the module of its neighbours."""
    path = getattr(parent, "path", None) or parent.fspath
    source = f"def {name}():\n    assert {name!r}.upper() {'!=' if good else '=='} {name!r}\n"
    namespace: dict[str, Any] = {"__name__": parent.obj.__name__}
    exec(compile(source, str(path), "exec"), namespace)
    return namespace[name]


def shuffled(items: list[Any], seed: int) -> list[Any]:
    """Files in a random order, and the tests of each file too."""
    place = random.Random(seed)
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(item.nodeid.split("::")[0], []).append(item)
    names = sorted(groups)
    place.shuffle(names)
    for name in names:
        place.shuffle(groups[name])
    return [item for name in names for item in groups[name]]


def plugin(recorder: Recorder) -> object:
    """The recorder's hooks, made here because their markers need pytest."""
    import pytest

    class Hooks:
        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> Iterator[None]:
            outcome: Any = yield
            outcome.get_result()
            recorder.arrange(session, items)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
            outcome: Any = yield
            recorder.phase(item, call, outcome.get_result())

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                text = str(report.longrepr)[-MAX_ERROR:]
                recorder.emit({"collection_error": str(report.nodeid), "text": text})

    return Hooks()


def run_tests(job: dict[str, Any], warm: dict[str, Any], emit: Callable[..., None]) -> None:
    """Body of the tests' child."""
    import pytest

    calls = CallRecorder(job["record"], emit) if job["record"] else None
    arguments = [
        "-c",
        warm["config"],
        "--rootdir",
        ROOT,
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
    ]
    arguments += ["--continue-on-collection-errors", "--assert=plain", "--tb=short", "-q", "-q"]
    arguments += ["-o", "console_output_style=classic", "--color=no", *warm["flags"]]
    for name in warm["plugins"]:
        arguments += ["-p", name]
    if job["tests"] is not None:
        files = dict.fromkeys(test.split("::")[0] for test in job["tests"])
        arguments += [path for path in files if Path(path).exists()]
    recorder = Recorder(job, emit)
    if calls is not None:
        sys.setprofile(calls.profile)
    status = int(pytest.main(arguments, plugins=[plugin(recorder)]))
    sys.setprofile(None)
    emit({"end": job["nonce"], "status": status})
