"""The documentation says what is so: links lead somewhere, figures are those of the results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tables_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_results_have_the_one_shape() -> None:
    metrics = {
        "engine": "group workload tok/s vs transformers generate",
        "harness": "overhead per turn ms",
        "tasks": "valid tasks per minute",
    }
    keys = {"name", "command", "commit", "date", "machine", "settings", "seeds", "rows"}
    for name, metric in metrics.items():
        result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        assert set(result) == keys and result["name"] == name
        assert metric in [row["metric"] for row in result["rows"]]
        for row in result["rows"]:
            assert row["ours"] is not None or row["reason"]


def test_commands_and_options_of_the_pages_exist() -> None:
    """Each `etude …` line of README and docs/agent.md, up to the values of its arguments."""
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "agent.md").read_text()
    lines = re.findall(r"^(?:\.venv/bin/)?etude ([^#\n]+)", text, re.MULTILINE)
    wanted: dict[str, set[str]] = {}
    for line in lines:
        command = re.match(r"(?:tasks |model )?[a-z]+", line)
        options = wanted.setdefault(command[0] if command else "", set())
        options.update(re.findall(r"(?<!\S)--?[a-z][a-z-]*", line))
    assert {"", "practice", "report", "tasks make", "acp", "explain"} <= set(wanted)
    for command, options in wanted.items():
        program = "from etude.cli.app import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *command.split(), "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "200"},
            check=False,
        )
        assert done.returncode == 0, command
        for option in options:
            assert option in done.stdout, f"etude {command} knows no {option}"
