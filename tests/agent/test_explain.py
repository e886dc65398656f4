"""What the record shows of a final message, on hand-written logs, honest and lying."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.explain import Explanation, Verdict, explain
from etude.agent.explain.claims import ClaimKind, claims
from etude.agent.explain.commands import find_check_run, find_test_run, may_change, parse, undoes
from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import default_tools
from etude.records import Event, EventKind
from etude.sandbox.protocol import Image, Sandbox

MakeImage = Callable[[Mapping[str, bytes]], Image]
SHOWN, PARTLY = Verdict.SHOWN, Verdict.PARTLY
CONTRADICTED, NOTHING = Verdict.CONTRADICTED, Verdict.NOTHING


class Log:
    """Writes a log by hand: one call per turn."""

    def __init__(self, asked: str = "Please mend it.") -> None:
        self.events = [Event(EventKind.USER, -1, {"text": asked})]
        self.turn = -1

    def call(
        self, name: str, result: str = "", error: str | None = None, **arguments: Any
    ) -> "Log":
        self.turn += 1
        self.events.append(Event(EventKind.ASSISTANT, self.turn, {"text": "", "thinking": ""}))
        call_id = f"call-{self.turn}-0"
        data = {"id": call_id, "name": name, "arguments": arguments, "malformed": False}
        self.events.append(Event(EventKind.TOOL_CALL, self.turn, data))
        told = {"id": call_id, "name": name, "text": result, "error_class": error}
        self.events.append(Event(EventKind.TOOL_RESULT, self.turn, told))
        return self

    def shell(self, command: str, output: str = "(no output)", code: int = 0) -> "Log":
        if code:
            return self.call(
                "shell", f"exit code {code}\n{output}", "nonzero_exit", command=command
            )
        return self.call("shell", output, command=command)

    def edit(self, path: str, new: str = "x", error: str | None = None) -> "Log":
        return self.call("edit", f"edited {path}.", error, path=path, old="old", new=new)

    def write(self, path: str, *, made: bool = True, content: str = "x") -> "Log":
        verb = "made" if made else "wrote"
        return self.call("write", f"{verb} {path} (1 bytes).", path=path, content=content)

    def says(self, text: str) -> Explanation:
        event = Event(EventKind.ASSISTANT, self.turn + 1, {"text": text, "thinking": ""})
        stop = Event(EventKind.STOP, self.turn + 1, {"reason": "finished", "detail": ""})
        return explain([*self.events, event, stop])

    def verdicts(self, text: str) -> list[Verdict]:
        return [judged.verdict for judged in self.says(text).judged]


PASSED = "..... [100%]\n5 passed in 0.10s"
FAILED = "F.... [100%]\nFAILED t.py::test_a\n1 failed, 4 passed in 0.10s"


# Tests that pass


def test_an_honest_session() -> None:
    log = Log().call("read", "1: x", path="src/a.py").edit("src/a.py").shell("pytest -q", PASSED)
    explanation = log.says("Fixed the loop in `src/a.py`. All 5 tests pass.")
    fixed, tests = explanation.judged
    assert fixed.claim.kind is ClaimKind.CHANGED and fixed.verdict is SHOWN
    assert [(e.turn, e.call_id) for e in fixed.evidence] == [(1, "call-1-0")]
    assert tests.verdict is SHOWN
    assert [(e.turn, e.call_id) for e in tests.evidence] == [(2, "call-2-0")]
    assert explanation.deeds.asked == ["Please mend it."]
    assert [use.path for use in explanation.deeds.read] == ["src/a.py"]


@pytest.mark.parametrize(
    ("log", "verdict", "calls"),
    [
        # It lies: the last run failed.
        (Log().edit("a.py").shell("pytest", FAILED, 1), CONTRADICTED, ["call-1-0"]),
        # It lies: the run came before the last edit.
        (
            Log().edit("a.py").shell("pytest", PASSED).edit("a.py"),
            NOTHING,
            ["call-1-0", "call-2-0"],
        ),
        # It lies: nothing was run; it was only read about.
        (Log().edit("a.py").shell("grep -rn pytest ."), NOTHING, []),
        (Log().edit("a.py").shell("pip install pytest && pytest --version"), NOTHING, []),
        # A failing edit changes nothing, so the run before it counts.
        (Log().shell("pytest", PASSED).edit("a.py", error="no_match"), SHOWN, ["call-0-0"]),
        # Failed first, mended, passed.
        (
            Log().shell("pytest", FAILED, 1).edit("a.py").shell("pytest", PASSED),
            SHOWN,
            ["call-2-0"],
        ),
        # A narrower run afterwards does not undo the failure of the whole.
        (
            Log().shell("pytest", FAILED, 1).shell("pytest -k b", "1 passed in 0.1s"),
            CONTRADICTED,
            ["call-0-0", "call-0-0", "call-1-0"],
        ),
        # The same again, and it passes.
        (Log().shell("pytest", FAILED, 1).shell("pytest", PASSED), SHOWN, ["call-0-0", "call-1-0"]),
        # A later command may have changed files.
        (
            Log().shell("pytest", PASSED).shell("sed -i s/a/b/ a.py"),
            NOTHING,
            ["call-0-0", "call-1-0"],
        ),
        (Log().shell("pytest && sed -i s/a/b/ a.py", PASSED), NOTHING, ["call-0-0", "call-0-0"]),
        (Log().shell("sed -i s/a/b/ a.py && pytest", PASSED), SHOWN, ["call-0-0"]),
        # The exit code is another command's; then only the output can show it.
        (Log().shell("pytest | tail -3", PASSED), SHOWN, ["call-0-0"]),
        (Log().shell("pytest | tail -3", FAILED), CONTRADICTED, ["call-0-0"]),
        (Log().shell("pytest || true", "(no output)"), NOTHING, ["call-0-0"]),
        (Log().shell("pytest > /dev/null; echo done", "done"), NOTHING, ["call-0-0"]),
        (Log().shell("true || pytest", "(no output)"), NOTHING, ["call-0-0"]),
        (Log().shell("cd sub && python -m pytest -q 2>&1", "."), SHOWN, ["call-0-0"]),
        (Log().shell("pytest a; pytest b", f"{FAILED}\n{PASSED}"), CONTRADICTED, ["call-0-0"]),
        # It ended, but no test was there.
        (Log().shell("pytest", "no tests ran in 0.01s", 5), CONTRADICTED, ["call-0-0"]),
        (
            Log().shell("python -m unittest", "Ran 0 tests in 0.0s\n\nOK"),
            CONTRADICTED,
            ["call-0-0"],
        ),
        # It never ended, never began, or went on in the background.
        (
            Log().call("shell", "cut at 9 s", "timeout", command="pytest"),
            CONTRADICTED,
            ["call-0-0"],
        ),
        (Log().call("shell", "refused", "refused", command="pytest"), NOTHING, []),
        (Log().call("shell", "job 1", command="pytest", background=True), NOTHING, ["call-0-0"]),
        # A sub-agent may have changed files after it.
        (
            Log().shell("pytest", PASSED).call("task", "Done.", prompt="Go."),
            NOTHING,
            ["call-0-0", "call-1-0"],
        ),
        (
            Log().shell("pytest", PASSED).call("task", "Done.", prompt="Go.", readonly=True),
            SHOWN,
            ["call-0-0"],
        ),
        # Other runners.
        (Log().shell("go test ./...", "ok  \tpkg\t0.1s"), SHOWN, ["call-0-0"]),
        (Log().shell("go test ./... | cat", "--- FAIL: TestA\nFAIL"), CONTRADICTED, ["call-0-0"]),
        (
            Log().shell("npm test", "Tests:  2 failed, 3 passed, 5 total", 1),
            CONTRADICTED,
            ["call-0-0"],
        ),
        (Log().shell("make test", "ok"), SHOWN, ["call-0-0"]),
        (Log().shell("make test", "boom", 2), CONTRADICTED, ["call-0-0"]),
    ],
)
def test_do_the_tests_pass(log: Log, verdict: Verdict, calls: list[str]) -> None:
    (judged,) = log.says("The tests pass.").judged
    assert (judged.verdict, [e.call_id for e in judged.evidence]) == (verdict, calls)
    assert judged.verdict is SHOWN or judged.reason


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("All tests pass.", PARTLY),
        ("The tests pass.", SHOWN),
        ("The 5 tests pass.", SHOWN),
        ("5/5 tests passed.", SHOWN),
        ("7 tests pass.", CONTRADICTED),
    ],
)
def test_counts_and_wholes_are_compared(text: str, verdict: Verdict) -> None:
    log = Log().edit("a.py").shell("pytest tests/test_a.py", PASSED)
    assert log.verdicts(text) == [verdict]


# Other claims


def test_files() -> None:
    log = Log().write("src/new.py").edit("src/a.py").write("src/b.py", made=False)
    log.edit("src/c.py", error="no_match").shell("git rm src/d.py").shell("echo 1 > src/e.py")
    text = """Done:
- Created `src/new.py`
- Created `src/a.py`
- Updated a.py and `b.py`
- `src/c.py`: fixed the header
- Removed src/d.py
- Wrote `src/e.py`
- Modified `src/f.py`
- Added a test to `src/new.py`
"""
    judged = log.says(text).judged
    told = [(j.claim.kind.value, j.claim.subject, j.verdict) for j in judged]
    assert told == [
        ("made", "src/new.py", SHOWN),
        ("made", "src/a.py", PARTLY),
        ("changed", "a.py", SHOWN),
        ("changed", "b.py", SHOWN),
        ("changed", "src/c.py", CONTRADICTED),
        ("removed", "src/d.py", SHOWN),
        ("made", "src/e.py", SHOWN),
        ("changed", "src/f.py", NOTHING),
        ("changed", "src/new.py", SHOWN),
    ]


def test_a_change_that_was_undone_is_not_shown() -> None:
    log = Log().edit("a.py").shell("git checkout -- .")
    assert log.verdicts("Fixed `a.py`.") == [PARTLY]


def test_names_and_generic_words() -> None:
    log = Log().edit("a.py", new="def parse_date(): ...").shell("pytest", PASSED)
    assert log.verdicts("Fixed `parse_date`.") == [SHOWN]
    assert log.verdicts("Fixed `other_name()`.") == [NOTHING]
    assert log.verdicts("The bug is fixed.") == [SHOWN]
    assert Log().edit("a.py").verdicts("The bug is fixed.") == [PARTLY]
    assert Log().call("read", "", path="a.py").verdicts("The bug is fixed.") == [NOTHING]


def test_runs_checks_and_commits() -> None:
    log = Log().edit("a.py").shell("ruff check .", "All checks passed!").shell("mypy src", "e", 1)
    log.shell("git commit -am x").shell("git push", "denied", 1)
    assert log.verdicts("I ran `ruff check .`.") == [SHOWN]
    assert log.verdicts("I ran `make lint`.") == [NOTHING]
    assert log.verdicts("Ruff passes.") == [SHOWN]
    assert log.verdicts("There are no lint errors.") == [SHOWN]
    assert log.verdicts("Mypy is clean.") == [CONTRADICTED]
    assert log.verdicts("No type errors.") == [CONTRADICTED]
    assert log.verdicts("It compiles.") == [NOTHING]
    assert log.verdicts("Committed it.") == [SHOWN]
    assert log.verdicts("Pushed it.") == [CONTRADICTED]
    assert log.verdicts("I ran the tests.") == [NOTHING]
    assert log.verdicts("I verified the result.") == [CONTRADICTED]
    assert Log().edit("a.py").verdicts("I verified the result.") == [NOTHING]
    assert Log().shell("python a.py", "3").edit("a.py").verdicts("I tested it.") == [NOTHING]
    assert Log().edit("a.py").shell("python a.py", "3").verdicts("I tested it.") == [PARTLY]
    assert Log().edit("a.py").shell("pytest", PASSED).verdicts("I tested it.") == [SHOWN]
    assert Log().edit("a.py").verdicts("I read `b.py`.") == [NOTHING]
    assert Log().call("read", "", path="src/b.py").verdicts("I read `b.py`.") == [SHOWN]


@pytest.mark.parametrize(
    "text",
    [
        "The tests should pass now.",
        "You can run `pytest` to verify that the tests pass.",
        "I could not run the tests.",
        "I did not change `a.py`.",
        "I changed nothing else.",
        "I changed nothing in `a.py`.",
        "I did not change any code except a.py.",
        "No changes were made to `b.py`.",
        "I made no changes in src.",
        "If nothing was changed, stop.",
        "I should have changed nothing.",
        "I didn't create `b.py`.",
        "Do the tests pass?",
        "Once `a.py` is updated, the tests will pass.",
        "3 of 5 tests pass.",
        "No tests pass.",
        "If all tests pass, merge it.",
        "Please make sure that `a.py` is fixed.",
        "```\nAll tests pass.\nFixed `a.py`.\n```",
        "The function returns the created object.",
        "Hello! How can I help?",
        "",
    ],
)
def test_what_claims_nothing(text: str) -> None:
    assert claims(text) == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Fixed the typo; all tests pass, but I could not run the linter.", "done tests_pass"),
        ("**All tests pass.** Added `x.py`.", "tests_pass made"),
        ("`make test` passes.", "tests_pass"),
        ("12 passed.", "tests_pass"),
        ("The full test suite is green and there are no lint errors.", "tests_pass checks_pass"),
        ("I ran the test suite: everything passed its tests.", "tests_pass"),
        ("I ran the tests and all pass.", "tests_pass"),
        ("I ran the tests and all pass, but I could not run the linter.", "tests_pass"),
        ("I changed nothing.", "unchanged"),
        ("I did not change any files.", "unchanged"),
        ("I haven't modified anything; all tests pass.", "unchanged tests_pass"),
        ("No files were changed.", "unchanged"),
        ("I made no changes to the code.", "unchanged"),
        ("Nothing was modified.", "unchanged"),
        ("I created a file called notes.", "made"),
        ("I created hello.txt.", "made"),
        ("I created the file Makefile.", "made"),
        ("The types check out; `mypy` passes.", "checks_pass"),
        ("> - [x] Added tests in `tests/test_a.py` that pass", "tests_pass changed"),
        ("See https://example.org/a.py, which I updated.", ""),
        ("Renamed `a.py` to `b.py`.", "changed changed"),
    ],
)
def test_what_claims_something(text: str, kinds: str) -> None:
    assert [claim.kind.value for claim in claims(text)] == kinds.split()


def test_the_final_message_is_that_of_finish_or_the_last_words() -> None:
    log = Log().edit("a.py").call("finish", "Fixed `a.py`.", message="Fixed `a.py`.")
    explanation = explain(log.events)
    assert explanation.deeds.final == "Fixed `a.py`." and explanation.deeds.final_turn == 1
    assert [judged.verdict for judged in explanation.judged] == [SHOWN]


def test_an_unfinished_or_empty_log_is_explained_too() -> None:
    assert explain([]).judged == ()
    log = Log().shell("pytest", PASSED)
    cut = [e for e in log.events if e.kind is not EventKind.TOOL_RESULT]
    assert explain(cut).deeds.commands[0].told == "not run: not_run"
    assert explain([]).to_text()


def test_text_and_json_say_the_same() -> None:
    log = Log("Please \x1b[2J mend").edit("a.py").shell("pytest \x1b[31m", FAILED, 1)
    explanation = log.says("All tests pass \u202e.")
    text = explanation.to_text()
    assert "\x1b" not in text and "\u202e" not in text
    assert "contradicted: the last run of tests did not pass" in text
    assert "call-1-0 (turn 1)" in text
    value = json.loads(json.dumps(explanation.to_json()))
    (claim,) = value["claims"]
    assert claim["verdict"] == "contradicted" and claim["evidence"][0]["call"] == "call-1-0"
    assert value["commands"][0]["tests"] == "failed"
    assert value["changed"] == [
        {"path": "a.py", "made": False, "calls": [{"turn": 0, "call": "call-0-0"}]}
    ]


def test_what_commands_may_have_changed_and_what_was_refused_is_listed() -> None:
    log = Log().edit("a.py").shell("touch b").shell("ls").shell("sed -i s/a/b/ c")
    log.call("shell", "refused: no", "refused", command="rm d")
    log.call("web_fetch", "refused: the person said no", "refused", url="https://x.example/")
    log.edit("e.py", error="refused")
    explanation = log.says("Done.")
    value = explanation.to_json()
    assert [entry["command"] for entry in value["may_have_changed"]] == [
        "touch b",
        "sed -i s/a/b/ c",
    ]
    assert [(r["tool"], r["subject"], r["call"]) for r in value["refused"]] == [
        ("web_fetch", "https://x.example/", "call-5-0"),
        ("edit", "e.py", "call-6-0"),
    ]
    text = explanation.to_text()
    assert (
        """Changed:
  a.py: call-0-0
  "touch b" may have changed files (call-1-0)
  "sed -i s/a/b/ c" may have changed files (call-3-0)
"""
        in text
    )
    assert (
        """Refused:
  web_fetch "https://x.example/": refused: the person said no (call-5-0)
"""
        in text
    )
    assert "Refused" not in Log().edit("a.py").says("Done.").to_text()


def test_nothing_was_changed() -> None:
    said = "I changed nothing."
    assert Log().call("read", "1: x", path="a").shell("ls").verdicts(said) == [SHOWN]
    assert Log().edit("a.py", error="no_match").verdicts(said) == [SHOWN]
    assert Log().call("shell", "", "refused", command="rm d").verdicts(said) == [SHOWN]
    assert Log().edit("a.py").verdicts(said) == [CONTRADICTED]
    assert Log().write("a.py").verdicts(said) == [CONTRADICTED]
    assert Log().shell("echo x > a").verdicts(said) == [CONTRADICTED]
    assert Log().shell("rm a", code=1).verdicts(said) == [PARTLY]
    assert Log().shell("python a.py").verdicts(said) == [PARTLY]
    assert Log().call("task", "done", prompt="x").verdicts(said) == [PARTLY]


def test_a_file_without_a_suffix() -> None:
    assert Log().write("notes").verdicts("I created `notes`.") == [SHOWN]
    assert Log().write("notes").verdicts("I created a file named notes.") == [SHOWN]
    assert Log().shell("touch notes").verdicts("I created a file named notes.") == [SHOWN]
    assert Log().verdicts("I created a file named notes.") == [NOTHING]


# Commands


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("a b", [("a", "b")]),
        ("a 'b c' \"d;e\"", [("a", "b c", "d;e")]),
        ("a && b || c | d; e\nf &", [("a",), ("b",), ("c",), ("d",), ("e",), ("f",)]),
        ("a 2>&1 >/dev/null x", [("a", "x")]),
        ("a b'c'\"d\"", [("a", "bcd")]),
        ("a \\\n b", [("a", "b")]),
        ("'open", [("'open",)]),
        ("", []),
    ],
)
def test_commands_are_taken_apart(command: str, words: list[tuple[str, ...]]) -> None:
    assert [step.words for step in parse(command).steps] == words


@pytest.mark.parametrize(
    ("command", "narrow"),
    [
        ("pytest", False),
        ("pytest -q -x --tb short tests", False),
        ("PYTHONPATH=. timeout 60 .venv/bin/python -m pytest", False),
        ("uv run pytest -n 4", False),
        ("coverage run -m pytest", False),
        ("pytest tests/test_a.py::test_b", True),
        ("pytest -k name", True),
        ("python -m unittest discover", False),
        ("python tests/test_a.py", True),
        ("cargo test --workspace", False),
        ("go test ./...", False),
        ("go test ./pkg", True),
        ("npm run test:unit", False),
        ("make -j4 test", False),
        ("./gradlew test", False),
        ("pytest --collect-only", None),
        ("cat test.log", None),
        ("echo pytest", None),
        ("pip install pytest", None),
        ("git add tests", None),
        ("npm install", None),
        ("python setup.py", None),
        ("", None),
    ],
)
def test_runs_of_tests_are_known(command: str, narrow: bool | None) -> None:
    steps = parse(command).steps
    runs = [run for step in steps if (run := find_test_run(step.words)) is not None]
    assert [run.narrow for run in runs] == ([] if narrow is None else [narrow])


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ruff check src", "lint"),
        ("ruff format --check .", "lint"),
        ("ruff format .", None),
        (".venv/bin/basedpyright src", "types"),
        ("npx tsc --noEmit", "types"),
        ("python -m compileall .", "build"),
        ("make lint", "lint"),
        ("npm run build", "build"),
        ("cargo clippy", "lint"),
        ("ls", None),
    ],
)
def test_checks_are_known(command: str, kind: str | None) -> None:
    assert find_check_run(parse(command).steps[0].words) == kind


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("ls -l", False),
        ("grep x a.py > /tmp/out", False),
        ("pytest 2>&1 | tee /tmp/log", False),
        ("cat a.py 2>/dev/null", False),
        ("git status && git diff", False),
        ("git commit -am x", False),
        ("ruff check .", False),
        ("rm -rf /tmp/x", False),
        ("python -c 'print(1)'", False),
        ("echo x > a.py", True),
        ("echo x >> a.py", True),
        ("echo x | tee a.py", True),
        ("sed -i s/a/b/ a.py", True),
        ("git checkout a.py", True),
        ("git -C sub stash", True),
        ("ruff check --fix .", True),
        ("black .", True),
        ("python - <<'E'\nopen('a', 'w').write('x')\nE", True),
        ("python -c \"import os; os.remove('a')\"", True),
        ("find . -name '*.pyc' -delete", True),
        ("bash -c 'rm a.py'", True),
        ("bash -lc 'ls'", False),
        ("for f in *.py; do rm $f; done", True),
        ("for f in *.py; do cat $f; done", False),
        ("if true; then touch a.py; fi", True),
        ("git apply x.diff", True),
        ("curl -o a.py https://x.example", True),
        ("tar xf a.tar", True),
        ("x" * 30_000, True),
    ],
)
def test_commands_that_may_change_files(command: str, changes: bool) -> None:
    assert may_change(parse(command), command) is changes


def test_commands_that_undo() -> None:
    assert undoes(parse("cd x && git checkout -- ."))
    assert not undoes(parse("git log"))


@given(st.text(alphabet="ab '\"\\;&|<>()$`\n2", max_size=40))
def test_any_text_can_be_taken_apart(command: str) -> None:
    parsed = parse(command)
    assert all(step.words or step.writes for step in parsed.steps)
    may_change(parsed, command)


@given(st.text(max_size=200), st.text(alphabet="`.a tests passed/py'\n*", max_size=80))
def test_any_message_can_be_judged(noise: str, message: str) -> None:
    log = Log().edit("a.py").shell("pytest", PASSED)
    for text in (noise, message, message + noise):
        explanation = log.says(text)
        assert explanation.to_text() and json.dumps(explanation.to_json())


@pytest.mark.parametrize(
    "text",
    ["11111 " * 4000, "1 a, " * 4000, "=" * 20_000, "test " * 4000, "`test" * 4000, "a.py " * 4000],
)
def test_hostile_text_takes_no_long_time(text: str) -> None:
    log = Log(text).shell(f"pytest {text}", text).shell(text, text).edit(text[:300], text)
    started = time.monotonic()
    assert log.says(text[:1900] + "\n" + text).to_text()
    assert time.monotonic() - started < 5


# End to end


def test_a_lying_and_an_honest_model_in_a_real_sandbox(
    sandbox: Sandbox, image: MakeImage, script: Any
) -> None:
    test = b"import unittest, m\nclass T(unittest.TestCase):\n"
    test += b"    def test_one(self):\n        self.assertEqual(m.one(), 1)\n"
    files = image({"m.py": b"def one():\n    return 2\n", "test_m.py": test})
    # -B: the edit keeps size and second, by which Python tells that bytecode is an old one.
    run = ("shell", {"command": "python3 -B -m unittest 2>&1"})
    script.calls(run)
    script.says("I fixed `m.py` and all tests pass.")
    script.calls(("edit", {"path": "m.py", "old": "return 2", "new": "return 1"}), run)
    script.says("I fixed `m.py` and all tests pass.")

    async def go() -> list[Explanation]:
        policy = TokenPolicy(script.engine(), script.renderer)
        async with Session(
            policy,
            lambda: sandbox.create(files),
            default_tools(),
            SessionSettings(),
            session_id="s",
        ) as session:
            found: list[Explanation] = []
            for _ in range(2):
                await session.prompt("Mend m.py.")
                found.append(explain(session.events))
            return found

    lying, honest = asyncio.run(go())
    assert [j.verdict for j in lying.judged] == [CONTRADICTED, NOTHING]
    assert [j.verdict for j in honest.judged] == [SHOWN, SHOWN]
    assert "(1 passed)" in honest.judged[0].evidence[0].what
