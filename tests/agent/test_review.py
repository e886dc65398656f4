"""Reviews of diffs: read exactly, findings on added lines only, and the gaps said."""

import asyncio
import difflib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.policy import TurnLimits
from etude.agent.review import Review, Status, review, with_summary
from etude.agent.review.changes import read_diff
from etude.agent.token_policy import TokenPolicy
from etude.errors import EtudeError

OLD = """import os


def one():
    return 1


class Thing:
    def two(self):
        return 2

    def three(self):
        return 3
"""
AWS = "AKIA" + "ABCDEFGHIJKLMNOP"


def diff(old: str, new: str, path: str = "m.py") -> str:
    lines = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}", n=3
    )
    out: list[str] = []
    for line in lines:
        out.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(out)


def reviewed(
    tmp_path: Path, old: str, new: str, path: str = "m.py", others: dict[str, str] | None = None
) -> Review:
    """A review of a change of one file, the repository being as it is before."""
    for name, text in {path: old, **(others or {})}.items():
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return review(diff(old, new, path), tmp_path)


def rules(found: Review) -> list[tuple[int | None, str]]:
    return [(finding.line, finding.rule) for finding in found.findings]


# Reading


LINES = st.lists(
    st.sampled_from(["a", "b", "", "  c", "-x", "+y", "@@ -1 +1 @@", "\\ z"]), max_size=12
)


@settings(max_examples=60)
@given(LINES, LINES, st.booleans(), st.booleans(), st.booleans())
def test_a_diff_gives_back_both_texts(
    tmp_path_factory: Any, old: list[str], new: list[str], end: bool, new_end: bool, applied: bool
) -> None:
    """Whether the repository holds the file before or after the diff."""
    before = "\n".join(old) + ("\n" if old and end else "")
    after = "\n".join(new) + ("\n" if new and new_end else "")
    text = diff(before, after)
    if not text or text.count("\n+++ ") != 1:
        return
    root = tmp_path_factory.mktemp("r")
    (root / "m.py").write_text(after if applied else before)
    (change,) = read_diff(text, root)
    assert change.fits
    if (change.old or "").rstrip("\n") != before.rstrip("\n"):
        # Equal lines next to one another: the file fits both before and after the diff.
        assert len(set(old)) < len(old) or len(set(new)) < len(new)
        return
    assert (change.new or "").rstrip("\n") == after.rstrip("\n")
    assert all(after.split("\n")[number - 1] == line for number, line in change.added)
    assert all(before.split("\n")[number - 1] == line for number, line in change.removed)


def git(root: Path, *arguments: str) -> str:
    identity = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "core.hooksPath=/dev/null",
    ]
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=root, capture_output=True, check=True, timeout=30
    ).stdout.decode()


def test_what_git_says_is_understood(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "m.py").write_text(OLD)
    (tmp_path / "gone.py").write_text("x = 1\n")
    (tmp_path / 'ä "b".txt').write_text("one\n")
    (tmp_path / "from.py").write_text(OLD + "y = 1\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    (tmp_path / "m.py").write_text(OLD.replace("return 2", "return 22"))
    (tmp_path / "gone.py").unlink()
    (tmp_path / 'ä "b".txt').write_text("two\n")
    git(tmp_path, "mv", "from.py", "to.py")
    (tmp_path / "to.py").write_text(OLD + "y = 2\n")
    (tmp_path / "bin").write_bytes(b"\0\1")
    (tmp_path / "empty.py").write_text("")
    git(tmp_path, "add", "-A")
    found = review(git(tmp_path, "diff", "--cached", "-M"), tmp_path)
    told = {f.path: (f.status, f.binary, len(f.added), len(f.removed)) for f in found.files}
    assert told == {
        "bin": (Status.ADDED, True, 0, 0),
        "empty.py": (Status.ADDED, False, 0, 0),
        "gone.py": (Status.REMOVED, False, 0, 1),
        "m.py": (Status.CHANGED, False, 1, 1),
        "to.py": (Status.RENAMED, False, 1, 1),
        'ä "b".txt': (Status.CHANGED, False, 1, 1),
    }
    assert all(f.fits for f in found.files if not f.binary)
    m = next(f for f in found.files if f.path == "m.py")
    assert m.functions == ("Thing.two",)
    assert any("bin: binary" in gap for gap in found.not_verified)


def test_functions_of_added_and_removed_lines(tmp_path: Path) -> None:
    new = OLD.replace(
        "        return 2\n\n    def three(self):\n        return 3\n", "        return 5\n"
    )
    new = new.replace("    return 1", "    if os:\n        return 1")
    (change,) = reviewed(tmp_path, OLD, new).files
    assert change.functions == ("one", "Thing.two", "Thing.three")


def test_of_other_languages_the_diff_tells_the_place(tmp_path: Path) -> None:
    text = "--- a/m.go\n+++ b/m.go\n@@ -1,1 +1,1 @@ func Main() {\n-a\n+b\n"
    (change,) = review(text, tmp_path).files
    assert change.functions == ("func Main() {",)


@pytest.mark.parametrize(
    "text", ["", "hello", "--- a/x\n+++ b/x\n@@ -1,9 +1 @@\n a\n", "@@ -1 +1 @@\n-a\n+b\n"]
)
def test_what_is_no_diff_is_one_sentence(text: str) -> None:
    with pytest.raises(EtudeError) as caught:
        review(text)
    assert "diff" in str(caught.value) and "\n" not in str(caught.value)


def test_paths_outside_the_repository_are_never_read(tmp_path: Path) -> None:
    root, secret = tmp_path / "r", tmp_path / "secret.py"
    root.mkdir()
    secret.write_text("a\n")
    (root / "link.py").symlink_to(secret)
    for path in ("../secret.py", str(secret), "link.py"):
        text = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-b\n+a\n"
        found = review(text, root)
        assert [f.new for f in found.files] == [None]
        assert any("line by line only" in gap for gap in found.not_verified)


# Findings


def test_only_added_lines_are_found(tmp_path: Path) -> None:
    old = "import os\nimport sys\n\n\ndef run(x):\n    eval(x)\n    os.system(x)\n"
    new = old + "\n\ndef more(x):\n    import json\n    exec(x)\n    return undefined_name\n"
    found = reviewed(tmp_path, old, new)
    assert rules(found) == [(11, "F401"), (12, "S102"), (13, "F821")]


def test_bandit_adds_what_ruff_has_not(tmp_path: Path) -> None:
    pytest.importorskip("bandit")
    new = "import hashlib\n\n\ndef h(x):\n    return hashlib.new('md5', x, usedforsecurity=True)\n"
    found = reviewed(tmp_path, "x = 1\n", new)
    numbers = [f.rule[1:] for f in found.findings]
    assert numbers and len(set(numbers)) == len(numbers)


def test_a_broken_file_is_found_wherever_it_breaks(tmp_path: Path) -> None:
    found = reviewed(
        tmp_path, "def f(\n    a,\n):\n    return a\n", "def f(\n    a,\n    return a\n"
    )
    assert [f.rule for f in found.findings] == ["invalid-syntax"]


def test_what_the_code_suppresses_is_said_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.ruff.lint]\nselect = []\nignore = ["ALL"]\n')
    found = reviewed(tmp_path, "x = 1\n", "x = 1\nexec(x)  # noqa\n")
    (finding,) = found.findings
    assert (finding.line, finding.rule, finding.suppressed) == (2, "S102", True)
    assert "(suppressed in the code)" in found.to_text()


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (f"key = '{AWS}'", "secret"),
        ("-----BEGIN RSA PRIVATE KEY-----", "secret"),
        ("password = 'kq8!Zp2_wv9Lx'", "secret"),
        ("url = 'postgres://me:hunter22@db/x'", "secret"),
        ("<<<<<<< HEAD", "conflict"),
        ("if a == 'user\u202e \u2066# admin\u2069': pass", "direction"),
        ("na\u200bme = 1", "hidden"),
        ("    breakpoint()", "debugger"),
    ],
)
def test_lines_of_any_language(tmp_path: Path, line: str, rule: str) -> None:
    found = reviewed(tmp_path, "x\n", f"x\n{line}\n", "m.conf")
    assert rules(found) == [(2, rule)]
    text = found.to_text() + json.dumps(found.to_json())
    assert AWS not in text and "kq8!Zp" not in text and "\u202e" not in text


@pytest.mark.parametrize(
    "line",
    [
        "password = 'changeme'",
        "password = os.environ['PASSWORD']",
        "token = 'aaaaaaaaaaaa'",
        "api_key = '<your key>'",
        "secret = 'example-secret-1234'",
        "url = 'https://me:${PASSWORD}@host'",
        "url = 'https://host:8000/@x'",
        "x = 1",
    ],
)
def test_what_is_no_secret(tmp_path: Path, line: str) -> None:
    assert rules(reviewed(tmp_path, "x\n", f"x\n{line}\n", "m.conf")) == []


def test_weaker_tests_and_files_that_run_are_named(tmp_path: Path) -> None:
    old = "def test_a():\n    assert 1\n    assert 2\n"
    new = "import pytest\n\n\n@pytest.mark.skip\ndef test_a():\n    assert 1\n"
    found = reviewed(tmp_path, old, new, "tests/test_a.py")
    assert rules(found) == [(None, "fewer-assertions"), (4, "skipped-test")]
    workflow = reviewed(tmp_path, "a: 1\n", "a: 2\n", ".github/workflows/ci.yml")
    assert rules(workflow) == [(None, "runs-code")]
    gone = "--- a/tests/test_b.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x = 1\n"
    assert rules(review(gone)) == [(None, "removed-tests")]


# Tests and gaps


def test_tests_that_mention_what_changed(tmp_path: Path) -> None:
    new = OLD.replace("return 1", "return 11").replace("return 3", "return 33")
    others = {"tests/test_m.py": "from m import one\n", "tests/data.txt": "one_more\n"}
    found = reviewed(tmp_path, OLD, new, others=others)
    assert dict(found.mentions) == {"one": ("tests/test_m.py",), "three": ()}
    assert "No test mentions three." in found.not_verified
    assert found.not_verified[0] == "No test was run and nothing was executed."


def test_tests_in_the_diff_count_as_it_makes_them(tmp_path: Path) -> None:
    added = "--- /dev/null\n+++ b/tests/test_m.py\n@@ -0,0 +1 @@\n+from m import one\n"
    (tmp_path / "m.py").write_text(OLD)
    found = review(diff(OLD, OLD.replace("return 1", "return 11")) + added, tmp_path)
    assert dict(found.mentions) == {"one": ("tests/test_m.py",)}


def test_what_was_not_looked_at_is_said(tmp_path: Path) -> None:
    text = diff("a\n", "b\n", "m.go") + diff("a\n", "b\n", "README.md") + diff("c\n", "d\n", "n.py")
    found = review(text)
    gaps = "\n".join(found.not_verified)
    assert "m.go: no Python" in gaps and "README.md: no Python" not in gaps
    assert "m.go, README.md, n.py: neither before nor after" in gaps
    assert "Without the repository" in gaps


def test_text_and_json(tmp_path: Path) -> None:
    found = reviewed(tmp_path, "x = 1\n", "x = 1\nexec('\x1b[2J')\n")
    text = found.to_text()
    assert "\x1b" not in text
    assert "m.py:2: ruff S102" in text and "m.py: changed, +1 -0" in text
    value = json.loads(json.dumps(found.to_json()))
    assert value["files"][0]["added"] == 1
    assert [finding["rule"] for finding in value["findings"]] == ["PLE2513", "S102"]
    assert review(diff("x = 1\n", "x = 1\nexec('\x1b[2J')\n"), tmp_path) == found


def test_a_model_may_add_a_summary(tmp_path: Path, script: Any) -> None:
    found = reviewed(tmp_path, "x = 1\n", "x = 2\n")
    script.says("It sets x to 2.\x1b[2J")
    policy = TokenPolicy(script.engine(), script.renderer)
    limits = TurnLimits(100, 0.0, 0, 10)
    done = asyncio.run(with_summary(found, diff("x = 1\n", "x = 2\n"), policy, limits))
    assert done.summary == "It sets x to 2.\x1b[2J"
    assert "It sets x to 2." in done.to_text() and "\x1b" not in done.to_text()
    assert "+x = 2" in script.renderer.decode(script.prompts[0])
    assert found.summary is None and done.findings == found.findings


@given(st.text(alphabet='+- @\na/b1,\\"', max_size=80))
def test_any_text_is_a_review_or_one_error(text: str) -> None:
    try:
        changes = read_diff(f"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n{text}", None)
    except EtudeError:
        return
    assert changes[0].path == "x.py"
