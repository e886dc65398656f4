"""`etude sessions`, `explain`, `export`, `review`, `approve`."""

from __future__ import annotations

import json
import subprocess

import pytest
from cli_place import Place

EDIT = {"calls": [["edit", {"path": "a.py", "old": "hello = 1", "new": "hello = 2"}]]}
LIE = {"text": "I changed a.py. All tests pass."}


@pytest.fixture
def held(place: Place) -> Place:
    """One session was held."""
    done = place.run("-p", "do \x1b[2Jit", "--model", place.script(EDIT, LIE), "--mode", "auto")
    assert done.returncode == 0, done.stderr
    return place


def test_a_session_is_listed_explained_and_exported(held: Place) -> None:
    name = held.sessions()[-1].stem
    listed = held.run("sessions")
    assert name in listed.stdout and "\x1b" not in listed.stdout
    (info,) = json.loads(held.run("sessions", "--json").stdout)
    assert info["id"] == name and info["first"] == "do \x1b[2Jit"
    assert info["project"] == str(held.project)
    explained = held.run("explain", name[:17])
    assert "a.py" in explained.stdout and "nothing in the record shows this" in explained.stdout
    claims = json.loads(held.run("explain", "last", "--json").stdout)["claims"]
    assert {claim["kind"] for claim in claims} >= {"tests_pass"}
    atif = json.loads(held.run("export", "last", "--format", "atif").stdout)
    assert atif["session_id"] == name and atif["schema_version"] == "ATIF-v1.8"
    out = held.root / "out.md"
    assert held.run("export", name, "--out", str(out)).returncode == 0
    assert "All tests pass" in out.read_text()
    again = held.run("export", name, "--out", str(out))
    assert again.returncode == 2 and "exists already" in again.stderr


def test_sessions_of_another_folder_are_not_listed(held: Place) -> None:
    other = held.root / "other"
    other.mkdir()
    held.project = other
    assert json.loads(held.run("sessions", "--json").stdout) == []
    assert len(json.loads(held.run("sessions", "--all", "--json").stdout)) == 1
    assert held.run("explain", "last").returncode == 2


def test_review_of_a_diff_and_of_the_working_tree(place: Place) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=place.project, check=True, timeout=30)
    empty = place.run("review")
    assert empty.returncode == 2 and "nothing to review" in empty.stderr
    # What the repository's own configuration would run, does not run on this machine.
    spy = place.root / "spy"
    config = f'[core]\n\tfsmonitor = "touch {spy};"\n[diff]\n\texternal = "touch {spy};"\n'
    with (place.project / ".git" / "config").open("a") as file:
        file.write(config)
    (place.project / "a.py").write_text("hello = 1\n\n\ndef added(x):\n    return undefined\n")
    done = place.run("review", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["files"][0]["path"] == "a.py" and answer["files"][0]["added"] == 4
    assert not spy.exists()
    diff = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-hello = 1\n+hello = 2\n"
    told = place.run("review", "-", stdin=diff)
    assert told.returncode == 0 and "a.py" in told.stdout and "Not verified" in told.stdout
    summed = place.run("review", "-", "--model", place.script({"text": "Fine."}), stdin=diff)
    assert "Fine." in summed.stdout
    wrong = place.run("review", "-", stdin="no diff at all")
    assert wrong.returncode == 2 and len(wrong.stderr.strip().splitlines()) == 1


def test_what_a_project_brings_waits_for_approval_of_its_exact_content(place: Place) -> None:
    """Case 21: headless included."""
    marker = place.root / "ran"
    settings = place.project / ".etude" / "settings.toml"
    settings.parent.mkdir()
    hook = f'[[hooks]]\nevent = "before_tool"\ncommand = ["/bin/sh", "-c", "touch {marker}"]\n'
    settings.write_text(hook + '[permissions]\nallow = ["shell"]\n')
    read = {"calls": [["read", {"path": "a.py"}]]}
    words = ["-p", "x", "--model", place.script(read, {"text": "Read."})]
    done = place.run(*words)
    assert done.returncode == 0 and "etude approve" in done.stderr
    assert not marker.exists()
    listed = place.run("approve")
    assert f"touch {marker}" in listed.stdout
    waiting = {
        one["kind"]: one for one in json.loads(place.run("approve", "--json").stdout)["pending"]
    }
    assert set(waiting) == {"hook", "allow rules"}
    assert place.run("approve", "ffff").returncode == 2
    settings.write_text(settings.read_text().replace("touch", "touch -c /nowhere;touch"))
    stale = place.run("approve", waiting["hook"]["id"])
    assert stale.returncode == 2, "what was shown is not what would be approved"
    waiting = {
        one["kind"]: one for one in json.loads(place.run("approve", "--json").stdout)["pending"]
    }
    assert place.run("approve", waiting["hook"]["id"]).returncode == 0
    assert place.run(*words).returncode == 0
    assert marker.exists()


def test_a_session_in_which_nobody_said_anything_is_not_there(held: Place) -> None:
    """As one that was killed leaves it."""
    (log,) = held.sessions()
    before = held.run("sessions", "--json").stdout
    empty = log.with_name("29990101-000000-0000.jsonl")
    empty.write_text(log.read_text().splitlines(keepends=True)[0])
    assert held.run("sessions", "--json").stdout == before
    other = held.script({"text": "Gone on."}, name="other")
    done = held.run("-p", "x", "--resume", "last", "--model", other, "--json")
    assert json.loads(done.stdout)["session"] == log.stem, done.stderr
