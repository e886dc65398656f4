"""What was done in a session, by its events alone."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from etude.agent.explain.commands import (
    Check,
    Parsed,
    Step,
    TestRun,
    find_check_run,
    find_test_run,
    may_change,
    parse,
    undoes,
)
from etude.agent.tools.tool import ErrorClass
from etude.records import Event, EventKind
from etude.sandbox.protocol import WORKSPACE_ROOT


@dataclass(frozen=True)
class Place:
    """Where something stands in the record: the model's turn, from 0, and the call's id. `order`
    is the number of the call among all calls."""

    turn: int
    call_id: str
    order: int


class Outcome(StrEnum):
    """How a call or a run of tests came out."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_RUN = "not run"
    INTERRUPTED = "interrupted"
    NO_TESTS = "ran no test"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class FileUse:
    """A file that was read or changed, relative to the workspace where it lies inside. `made` says
    that it was not there before; `text` is what an edit or write brought."""

    place: Place
    path: str
    made: bool = False
    text: str = ""


@dataclass(frozen=True)
class Attempt:
    """A call that was to read or change a file and failed."""

    place: Place
    path: str
    error: str


@dataclass(frozen=True)
class Refusal:
    """A call, other than a shell command, that a rule, a mode or a person did not allow. `subject`
    is what it was about: a path, an address, ..."""

    place: Place
    tool: str
    subject: str
    reason: str


@dataclass(frozen=True)
class Command:
    """A shell command with how it ended. `tests` and `check` say what it was for; `result` is how
    its tests came out, `passed` how many it counted (None: it did not say). `changes` says that
    files may be others afterwards, `undoes` that earlier changes may be gone, `changes_behind` that
    files may have changed behind its tests or check."""

    place: Place
    command: str
    outcome: Outcome
    told: str
    tests: TestRun | None = None
    check: Check | None = None
    result: Outcome = Outcome.UNKNOWN
    passed: int | None = None
    changes: bool = False
    undoes: bool = False
    changes_behind: bool = False


@dataclass
class Deeds:
    """Everything that was asked and done, in order. `final` is the last thing the model told the
    person, `final_turn` its turn. `delegated` are calls that let a sub-agent change files."""

    asked: list[str] = field(default_factory=list[str])
    read: list[FileUse] = field(default_factory=list[FileUse])
    changed: list[FileUse] = field(default_factory=list[FileUse])
    failed: list[Attempt] = field(default_factory=list[Attempt])
    refused: list[Refusal] = field(default_factory=list[Refusal])
    commands: list[Command] = field(default_factory=list[Command])
    delegated: list[Place] = field(default_factory=list[Place])
    final: str = ""
    final_turn: int = -1
    stop: str = ""

    def changing_commands(self) -> list[Command]:
        """Commands that ran, whole or in part, and after which files may be others."""
        return [c for c in self.commands if c.changes and c.outcome is not Outcome.NOT_RUN]

    def last_change(self) -> Place | None:
        """The last call after which files may be others, or None."""
        places = [use.place for use in self.changed]
        places += [c.place for c in self.changing_commands()]
        places += self.delegated
        return max(places, key=lambda place: place.order, default=None)


def deeds(events: Sequence[Event]) -> Deeds:
    """Read a record."""
    found = Deeds()
    results = {e.data["id"]: e for e in events if e.kind is EventKind.TOOL_RESULT}
    order = 0
    for event in events:
        data = event.data
        if event.kind is EventKind.USER:
            found.asked.append(data["text"])
        elif event.kind is EventKind.ASSISTANT and data["text"].strip():
            found.final, found.final_turn = data["text"], event.turn
        elif event.kind is EventKind.STOP:
            found.stop = data["reason"]
        elif event.kind is EventKind.TOOL_CALL:
            place = Place(event.turn, data["id"], order)
            order += 1
            _call(found, place, data, results.get(data["id"]))
    return found


def _call(found: Deeds, place: Place, data: Mapping[str, Any], result: Event | None) -> None:
    if data.get("malformed"):
        return
    name, arguments = data["name"], data["arguments"]
    error = ErrorClass.NOT_RUN.value if result is None else result.data["error_class"]
    text = "" if result is None else str(result.data["text"])
    if name != "shell" and error == ErrorClass.REFUSED.value:
        found.refused.append(Refusal(place, name, _subject(arguments), text))
    if name == "shell":
        found.commands.append(_command(place, arguments, error, text))
    elif name == "finish" and error is None and str(arguments.get("message", "")).strip():
        found.final, found.final_turn = str(arguments["message"]), place.turn
    elif name == "task" and error is None and not arguments.get("readonly"):
        found.delegated.append(place)
    elif name in ("read", "edit", "write"):
        path = relative(str(arguments.get("path", "")))
        if error is not None:
            found.failed.append(Attempt(place, path, error))
        elif name == "read":
            found.read.append(FileUse(place, path))
        else:
            brought = str(arguments.get("new", arguments.get("content", "")))
            taken = str(arguments.get("old", ""))
            made = name == "write" and text.startswith("made ")
            found.changed.append(FileUse(place, path, made, f"{taken}\n{brought}"))


def _subject(arguments: Mapping[str, Any]) -> str:
    """The first argument that is text: tools name first what they are about."""
    return next((value for value in arguments.values() if isinstance(value, str)), "")


def relative(path: str) -> str:
    """A path relative to the workspace, or absolute where it lies outside."""
    absolute = posixpath.normpath(posixpath.join(WORKSPACE_ROOT, path))
    return absolute.removeprefix(f"{WORKSPACE_ROOT}/")


_ENDS = {
    None: Outcome.PASSED,
    ErrorClass.NONZERO_EXIT.value: Outcome.FAILED,
    ErrorClass.TIMEOUT.value: Outcome.TIMED_OUT,
    ErrorClass.INTERRUPTED.value: Outcome.INTERRUPTED,
}


def _command(place: Place, arguments: Mapping[str, Any], error: str | None, text: str) -> Command:
    command = str(arguments.get("command", ""))
    parsed = parse(command)
    outcome = _ENDS.get(error, Outcome.NOT_RUN)
    if arguments.get("background") and outcome is Outcome.PASSED:
        outcome = Outcome.UNKNOWN
    code = re.match(r"exit code (\d+)", text) if error else None
    told = f"exit code {code[1]}" if code else outcome.value
    told = f"{outcome.value}: {error}" if outcome is Outcome.NOT_RUN else told
    told = "went on in the background" if outcome is Outcome.UNKNOWN else told
    runs = [run for step in parsed.steps if (run := find_test_run(step.words)) is not None]
    check = _first_check(parsed)
    tests = TestRun(all(run.narrow for run in runs)) if runs else None
    result, passed = Outcome.UNKNOWN, None
    if tests is not None:
        result, passed = _test_result(parsed, outcome, text)
    elif check and outcome in (Outcome.PASSED, Outcome.FAILED):
        exact = _exit_is_that_of(parsed, lambda words: find_check_run(words) is not None)
        result = outcome if exact or outcome is Outcome.FAILED else Outcome.UNKNOWN
    return Command(
        place=place,
        command=command,
        outcome=outcome,
        told=told,
        tests=tests,
        check=check,
        result=result,
        passed=passed,
        changes=may_change(parsed, command),
        undoes=undoes(parsed),
        changes_behind=_changes_behind(parsed),
    )


def _changes_behind(parsed: Parsed) -> bool:
    """Whether a step behind the last run of tests or check may change files."""
    behind: list[Step] = []
    for step in parsed.steps:
        behind = [*behind, step]
        if find_test_run(step.words) is not None or find_check_run(step.words) is not None:
            behind = []
    return bool(behind) and may_change(Parsed(tuple(behind), opaque=False), "")


def _first_check(parsed: Parsed) -> Check | None:
    for step in parsed.steps:
        kind = find_check_run(step.words)
        if kind is not None:
            return kind
    return None


def _exit_is_that_of(parsed: Parsed, wanted: Callable[[tuple[str, ...]], bool]) -> bool:
    """Whether exit code 0 of the whole means that each wanted step ended with 0: behind it only
    `&&` may stand, and nothing may be tried only when something else failed."""
    if parsed.opaque or any(step.joint == "||" for step in parsed.steps):
        return False
    seen = False
    for step in parsed.steps:
        if wanted(step.words):
            seen = True
        if seen and step.joint not in ("", "&&") and step is not parsed.steps[-1]:
            return False
    return not (seen and parsed.steps[-1].joint == "&")


_SUMMARIES = (
    re.compile(r"^=*[ \t]*\d+ \w+(?:, \d+ \w+)* in [\d.:]+ ?s?\b.*$", re.MULTILINE),
    re.compile(r"^Tests:\s.*$", re.MULTILINE),
    re.compile(r"^test result: .*$", re.MULTILINE),
    re.compile(r"^[ \t]*\d+ (?:passing|failing)\b.*$", re.MULTILINE),
    re.compile(r"^.*\b\d+ passed\b.*$", re.MULTILINE),
)
_BAD = re.compile(r"\b([1-9]\d*) (?:failed|errors?|failing|failures)\b|\bFAILED\b")
_GOOD = re.compile(r"\b(\d+) (?:passed|passing)\b")
_FAIL_LINES = re.compile(r"^(?:--- FAIL|FAIL\b|FAILED \(|not ok \d)", re.MULTILINE)
_NONE = re.compile(r"no tests ran|\b[Rr]an 0 tests|collected 0 items(?!\s*/)|\[no test files\]")


def _test_result(parsed: Parsed, outcome: Outcome, text: str) -> tuple[Outcome, int | None]:
    """(how the tests came out, how many passed by the output's own count). The exit code decides
    where it is that of the tests; the output where it is another command's."""
    if outcome not in (Outcome.PASSED, Outcome.FAILED):
        return outcome, None
    lines: list[str] = []
    for pattern in _SUMMARIES:
        lines = pattern.findall(text)
        if lines:
            break
    good = [int(n) for line in lines for n in _GOOD.findall(line)]
    unittest = re.search(r"^Ran (\d+) tests? in", text, re.MULTILINE)
    if unittest and not good and re.search(r"^OK\b", text, re.MULTILINE):
        good = [int(unittest[1])]
    bad = any(_BAD.search(line) for line in lines) or _FAIL_LINES.search(text) is not None
    passed = sum(good) if good else None
    exact = _exit_is_that_of(parsed, lambda words: find_test_run(words) is not None)
    alone = len(parsed.steps) == 1 and not parsed.opaque
    if _NONE.search(text) and not passed:
        return Outcome.NO_TESTS, passed
    if bad or (outcome is Outcome.FAILED and alone):
        return Outcome.FAILED, passed
    if outcome is Outcome.PASSED and (exact or passed):
        return Outcome.PASSED, passed
    return Outcome.UNKNOWN, passed


def to_json(found: Deeds) -> dict[str, Any]:
    """The deeds as JSON values."""
    return {
        "asked": found.asked,
        "read": _files(found.read),
        "changed": _files(found.changed),
        "may_have_changed": [
            *(
                {"turn": c.place.turn, "call": c.place.call_id, "command": c.command}
                for c in found.changing_commands()
            ),
            *({"turn": p.turn, "call": p.call_id, "command": "task"} for p in found.delegated),
        ],
        "refused": [
            {
                "turn": r.place.turn,
                "call": r.place.call_id,
                "tool": r.tool,
                "subject": r.subject,
                "reason": r.reason,
            }
            for r in found.refused
        ],
        "failed": [
            {"turn": a.place.turn, "call": a.place.call_id, "path": a.path, "error": a.error}
            for a in found.failed
        ],
        "commands": [
            {
                "turn": c.place.turn,
                "call": c.place.call_id,
                "command": c.command,
                "outcome": c.told,
                "tests": c.result.value if c.tests is not None else None,
                "check": c.check,
            }
            for c in found.commands
        ],
        "stop": found.stop,
    }


def _files(uses: Sequence[FileUse]) -> list[dict[str, Any]]:
    """Each file once, with the calls that touched it."""
    files: dict[str, dict[str, Any]] = {}
    for use in uses:
        entry = files.setdefault(use.path, {"path": use.path, "made": False, "calls": []})
        entry["made"] = entry["made"] or use.made
        entry["calls"].append({"turn": use.place.turn, "call": use.place.call_id})
    return list(files.values())


def one_line(text: str, limit: int = 200) -> str:
    """Text as one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def quoted(text: str) -> str:
    """A command or path in quotes, for a sentence."""
    return json.dumps(one_line(text, 120), ensure_ascii=False)
