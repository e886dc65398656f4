"""What scanners find on the added lines of a diff.

The scanners read text; nothing of the repository is run and none of its settings are read, so it
cannot tell them what to overlook. What a comment in the code would suppress is reported as such.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.agent.review.changes import FileChange, Status

_RUFF_RULES = "E9,F,B,PLE,S"
_SECONDS = 60
_TEST_PATH = re.compile(
    r"(?:^|/)(?:tests?|specs?|__tests__)/|(?:^|/)(?:test_|conftest)|[_.](?:test|spec)\."
)


@dataclass(frozen=True)
class Finding:
    """One finding. `line` is that of the new file, None where it is about the whole file. `tool`
    found it by its `rule`. `suppressed`: a comment on the line tells the tool to overlook it."""

    path: str
    line: int | None
    tool: str
    rule: str
    message: str
    suppressed: bool = False


def is_test(path: str) -> bool:
    """Whether a file is one of tests, by its path."""
    return _TEST_PATH.search(path) is not None


def scan(files: Sequence[FileChange]) -> tuple[list[Finding], list[str]]:
    """(findings, what could not be checked), in the order of the files."""
    findings: list[Finding] = []
    unchecked: list[str] = []
    for file in files:
        findings += _lines(file)
        findings += _whole(file)
    sources = [
        f for f in files if f.python and f.new is not None and f.status is not Status.REMOVED
    ]
    if sources:
        for tool in (_ruff, _bandit):
            found, missing = tool(sources)
            known = {(f.path, f.line, re.sub(r"\D", "", f.rule)) for f in findings}
            # ruff carries bandit's rules under the same numbers.
            findings += [
                f for f in found if (f.path, f.line, re.sub(r"\D", "", f.rule)) not in known
            ]
            unchecked += [missing] if missing else []
    order = {file.path: number for number, file in enumerate(files)}
    findings.sort(key=lambda f: (order[f.path], f.line or 0, f.tool, f.rule))
    return findings, unchecked


# Lines of any language

_SECRETS: tuple[tuple[str, str], ...] = (
    ("AWS key", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("private key", r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    ("GitHub token", r"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{40,}"),
    ("GitLab token", r"\bglpat-[A-Za-z0-9_-]{20,}"),
    ("Slack token", r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    ("Google key", r"\bAIza[0-9A-Za-z_-]{35}"),
    ("API key", r"\bsk-(?:[a-z]+-)*[A-Za-z0-9_]{20,}"),
    ("Stripe key", r"\b[rs]k_live_[A-Za-z0-9]{16,}"),
    ("signed token", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    ("password in an address", r"\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]+:[^\s/:@'\"{}$<]{4,}@"),
)
_ASSIGNED = re.compile(
    r"""(?:password|passwd|secret|token|api_?key|private_?key|credential)\w*["']?\s*[:=]\s*
    ["'](?P<value>[^"'\s]{8,})["']""",
    re.VERBOSE | re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"example|change|placeholder|dummy|fake|test|sample|your|xxx|\*\*\*|\.\.\.|<|\$\{|\{\{|%\(|none|null",
    re.IGNORECASE,
)
_BITS = 3.0
"""A value of fewer bits per character is taken for a word."""
_TURNING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_HIDDEN = re.compile("[\u200b-\u200d\u2060\ufeff\u00ad]")
_LEFT_OVER = re.compile(r"^\s*(?:breakpoint\(\)|import pdb\b|pdb\.set_trace\(|debugger;?\s*$)")
_SKIPPED = re.compile(
    r"@(?:pytest\.mark\.|unittest\.)(?:skip|xfail|expectedFailure)|\bpytest\.skip\(|\bself\.skipTest\("
    r"|\b(?:it|test|describe)\.(?:skip|only)\(|\bt\.Skip\(|#\[ignore\]|@(?:Disabled|Ignore)\b"
)
_MARKER = re.compile(r"^(?:<{7} |>{7} |={7}$)")
_LONGEST_LINE = 20_000


def _lines(file: FileChange) -> Iterator[Finding]:
    for number, full in file.added:
        line = full[:_LONGEST_LINE]

        def at(rule: str, message: str, tool: str = "text", number: int = number) -> Finding:
            return Finding(file.path, number, tool, rule, message)

        secret = _secret(line)
        if secret:
            yield at("secret", secret, "secrets")
        if _MARKER.match(line):
            yield at("conflict", "a marker of an unresolved merge")
        if _TURNING.search(line):
            yield at("direction", "characters that turn the direction of writing hide what is run")
        elif _HIDDEN.search(line):
            yield at("hidden", "characters that cannot be seen")
        if _LEFT_OVER.search(line):
            yield at("debugger", "a call of the debugger was left in")
        if _SKIPPED.search(line) and is_test(file.path):
            yield at("skipped-test", "a test is skipped, or the others are", "tests")


def _secret(line: str) -> str:
    """What kind of secret a line holds, with only its beginning, or ''."""
    for name, pattern in _SECRETS:
        match = re.search(pattern, line)
        if match is not None:
            return f"looks like a secret ({name}): {match.group()[:4]}..."
    match = _ASSIGNED.search(line)
    if match is None:
        return ""
    value = match["value"]
    if _PLACEHOLDER.search(value) or _entropy(value) < _BITS:
        return ""
    return f"looks like a secret in the code: {value[:2]}..."


def _entropy(text: str) -> float:
    """Bits per character."""
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)


# Whole files

_RUNS = re.compile(
    r"^\.github/workflows/|^\.gitlab-ci|^\.circleci/|(?:^|/)(?:Jenkinsfile|Dockerfile|Makefile|setup\.py"
    r"|conftest\.py|sitecustomize\.py|\.pre-commit-config\.yaml|\.envrc|build\.rs|package\.json)$"
    r"|\.pth$|^\.husky/|^\.vscode/tasks\.json$"
)
_ASSERTS = re.compile(r"\bassert\w*\b|\bexpect\(|\brequire\.\w+\(|\bpytest\.raises\(")


def _whole(file: FileChange) -> Iterator[Finding]:
    if file.status is not Status.REMOVED and _RUNS.search(file.path):
        message = "this file runs by itself: on build machines, at installation or with every test"
        yield Finding(file.path, None, "paths", "runs-code", message)
    if not is_test(file.path):
        return
    if file.status is Status.REMOVED:
        yield Finding(file.path, None, "tests", "removed-tests", "a file of tests is removed")
        return
    gone = sum(len(_ASSERTS.findall(text)) for _, text in file.removed)
    come = sum(len(_ASSERTS.findall(text)) for _, text in file.added)
    if gone > come:
        message = f"{gone - come} assertions fewer than before"
        yield Finding(file.path, None, "tests", "fewer-assertions", message)


# Python


def _ruff(files: Sequence[FileChange]) -> tuple[list[Finding], str]:
    if importlib.util.find_spec("ruff") is None:
        return [], "ruff is not installed, so no Python file was checked by it"
    options = ["check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero"]
    options += [
        "--output-format",
        "json",
        "--select",
        _RUFF_RULES,
        "--target-version",
        "py313",
        ".",
    ]
    found, fault = _run("ruff", options, files)
    if fault:
        return [], fault
    findings: list[Finding] = []
    for item in found if isinstance(found, list) else []:
        file = files[_number(item["filename"])]
        row, rule = int(item["location"]["row"]), str(item["code"] or "invalid-syntax")
        broken = rule == "invalid-syntax" or rule.startswith("E9")
        if rule == "S101" and is_test(file.path):
            continue
        # A broken file is broken by the diff wherever the parser notices it.
        if broken or row in dict(file.added):
            findings.append(_finding(file, row, "ruff", rule, str(item["message"])))
    return findings, ""


def _bandit(files: Sequence[FileChange]) -> tuple[list[Finding], str]:
    """Bandit is an extra; without it ruff's copies of its rules remain."""
    if importlib.util.find_spec("bandit") is None:
        return [], ""
    options = ["-q", "-f", "json", "--exit-zero", "--ignore-nosec", "-r", "."]
    found, fault = _run("bandit", options, files)
    if fault:
        return [], fault
    findings: list[Finding] = []
    for item in found["results"] if isinstance(found, dict) else []:
        file = files[_number(item["filename"])]
        row, rule = int(item["line_number"]), str(item["test_id"])
        if row in dict(file.added) and not (rule == "B101" and is_test(file.path)):
            findings.append(_finding(file, row, "bandit", rule, str(item["issue_text"])))
    return findings, ""


def _run(tool: str, options: Sequence[str], files: Sequence[FileChange]) -> tuple[Any, str]:
    """(what the tool printed as JSON, what went wrong or ''). The files get names of our own, and
    the tool neither the environment's settings nor the repository's."""
    with tempfile.TemporaryDirectory(prefix="etude-review-") as folder:
        for number, file in enumerate(files):
            suffix = ".pyi" if file.path.endswith(".pyi") else ".py"
            text = (file.new or "").encode("utf-8", "surrogateescape")
            (Path(folder) / f"f{number:05}{suffix}").write_bytes(text)
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-m", tool, *options],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
            return json.loads(done.stdout), ""
        except subprocess.TimeoutExpired:
            return None, f"{tool} did not end within {_SECONDS} s, so nothing was checked by it"
        except (OSError, ValueError):
            return None, f"{tool} failed, so nothing was checked by it"


def _number(filename: str) -> int:
    return int(Path(filename).stem.removeprefix("f"))


def _finding(file: FileChange, row: int, tool: str, rule: str, message: str) -> Finding:
    line = dict(file.added).get(row, "")
    suppressed = re.search(r"#\s*(?:noqa|nosec|ruff:\s*noqa)", line) is not None
    return Finding(file.path, row, tool, rule, message, suppressed)
