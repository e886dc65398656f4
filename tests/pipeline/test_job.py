"""The main job on a tiny model and a small repository: whole, and killed again and again."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from little_library import Corner

from etude.errors import EtudeError
from etude.pipeline.checkpoints import Checkpoints
from etude.pipeline.report import write_report
from etude.pipeline.run import Run
from etude.store import RunStore
from etude.tasks.library import load
from etude.tasks.task import Split

ETUDE = [sys.executable, "-c", "from etude.cli.app import main; main()"]


def start(corner: Corner, *words: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, ETUDE_CACHE=str(corner.cache))
    return subprocess.Popen(
        [*ETUDE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 150) -> str:
    out, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def whole(corner: Corner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run from start to end without interruption: folder and what was printed."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    words = ["practice", str(corner.source), "--recipe", str(corner.recipe), "--run", str(run)]
    return run, finish(start(corner, *words))


@pytest.mark.timeout(240)
def test_the_job_reaches_its_report(whole: tuple[Path, str]) -> None:
    run, printed = whole
    assert "before" in printed and "after warm-up" in printed and "after practice" in printed
    page = (run / "report.html").read_text()
    assert page.count("<svg") >= 4
    fetched = re.findall(r"(?:src|href)\s*=\s*\"(?!#)[^\"]*|@import|url\((?!#)[^)]*", page)
    assert not fetched, f"the page is not self-contained: {fetched[:3]}"
    assert (run / "models" / "final" / "model.safetensors").exists()


@pytest.mark.timeout(240)
def test_every_planned_rollout_is_there_once(whole: tuple[Path, str]) -> None:
    run, _ = whole
    library = load(run / "tasks")
    heldout = [task for task in library.tasks if task.split is Split.HELDOUT]
    store = RunStore(run)
    for name in ("before", "warmup", "after"):
        rows = store.rollouts(f"eval-{name}")
        assert Counter(row.key.task_id for row in rows) == {task.id: 2 for task in heldout}
        assert all(row.score is not None for row in rows)
    assert all(row.score == 1.0 for row in store.rollouts("expert"))
    assert len(store.rollouts("practice")) % 6 == 0


@pytest.mark.timeout(240)
def test_a_report_can_be_made_while_another_process_holds_the_run(whole: tuple[Path, str]) -> None:
    run, _ = whole
    with Run.resume(run), Run.look(run) as looked:
        assert write_report(looked) == run / "report.html"
        with pytest.raises(EtudeError, match="another process"):
            Run.resume(run)


@pytest.mark.timeout(240)
def test_heldout_functions_are_in_no_training_text(whole: tuple[Path, str]) -> None:
    """Neither in pretraining windows nor in a transcript of warm-up or practice."""
    run, _ = whole
    with Run.resume(run) as opened:
        from etude.pipeline.corpus import pretraining_sequences

        library = load(run / "tasks")
        model = Path(opened.recipe.model)
        windows = pretraining_sequences(library.repository, opened.recipe, model)
        from etude.models.dialects.hermes import HermesRenderer

        renderer = HermesRenderer.from_folder(model)
        texts = ["".join(renderer.decode(list(window.ids)) for window in windows)]
        for phase in ("expert", "practice"):
            for row in opened.store.rollouts(phase):
                for segment in opened.store.rollout(row.key).segments:
                    texts.append(renderer.decode(list(segment.prompt_ids)))
                    if phase == "expert":
                        texts.append(renderer.decode(list(segment.completion_ids)))
    assert len(texts) > 3
    heldout = {t.function for t in library.tasks if t.split is Split.HELDOUT}
    trained = {t.function for t in library.tasks if t.split is not Split.HELDOUT}
    assert heldout and not heldout & trained
    source = (library.repository.root / "smallib/core.py").read_text()
    tree = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for function in heldout:
        node = tree[function.rsplit("::", 1)[-1]]
        # The signature and the docstring are the function's own; `return result` is not.
        own = [f"def {node.name}(", f"Return the {node.name} of"]
        assert all(line in source for line in own)
        for text in texts:
            assert not any(line in text for line in own), f"{function} leaked"


@pytest.mark.timeout(300)
def test_killed_again_and_again_it_ends_the_same(
    corner: Corner, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """SIGKILL at random moments. No stored rollout is ever touched again, none is made twice, no
    prompt is trained on twice, and nothing of the killed processes stays behind."""
    run = tmp_path / "killed"
    rng = random.Random(4)
    words = ["practice", str(corner.source), "--recipe", str(corner.recipe), "--run", str(run)]
    seen: dict[str, str] = {}
    kills = 0
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        process = start(corner, *words)
        patience = rng.uniform(4, 9) if kills < 5 else 150
        try:
            out, _ = process.communicate(timeout=patience)
            assert process.returncode == 0, out
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
        for name, digest in seen.items():
            assert hashlib.sha256((run / name).read_bytes()).hexdigest() == digest
        for path in (run / "rollouts").glob("*.zst"):
            seen[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest()
        if (run / "recipe.json").exists():
            words = ["practice", "--resume", str(run)]
    assert kills >= 2, "the run was never interrupted; the test shows nothing"
    killed, unharmed = RunStore(run), RunStore(whole[0])
    for phase in ("eval-before", "expert", "eval-warmup", "eval-after"):
        assert {str(r.key) for r in killed.rollouts(phase)} == {
            str(r.key) for r in unharmed.rollouts(phase)
        }
    newest = Checkpoints(run / "checkpoints").newest()
    assert newest is not None and newest.final
    trained = newest.ledger["trained"]
    assert len(trained) == len(set(trained))
    assert len(killed.metrics("practice")) == len(unharmed.metrics("practice"))


@pytest.mark.timeout(240)
def test_a_finished_run_resumes_to_nothing(corner: Corner, whole: tuple[Path, str]) -> None:
    run, _ = whole
    before = sorted((run / "rollouts").iterdir())
    out = finish(start(corner, "practice", "--resume", str(run)))
    assert "after practice" in out
    assert sorted((run / "rollouts").iterdir()) == before


def test_a_run_folder_is_not_overwritten(corner: Corner, whole: tuple[Path, str]) -> None:
    run, _ = whole
    process = start(corner, "practice", str(corner.source), "--run", str(run))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "--resume" in out


@pytest.mark.timeout(240)
def test_a_context_in_which_no_task_can_be_answered_is_told(
    corner: Corner, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """Before anything is sampled, not as a held-out score of 0."""
    recipe = tmp_path / "small.toml"
    recipe.write_text(corner.recipe.read_text().replace("max_context = 1024", "max_context = 128"))
    run = tmp_path / "run"
    words = ["practice", str(corner.source), "--recipe", str(recipe), "--run", str(run)]
    process = start(corner, *words)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 2, out
    last = out.strip().splitlines()[-1]
    assert last.startswith("etude: no held-out task can be answered in 128 tokens")
    assert "[engine] max_context" in last and not list((run / "rollouts").iterdir())


def test_the_report_as_json(corner: Corner, whole: tuple[Path, str]) -> None:
    run, _ = whole
    data = json.loads(finish(start(corner, "report", str(run), "--json")))
    assert set(data["scores"]) == {"before", "warmup", "after"}
    assert data["scores"]["before"]["tasks"] == 3
    assert "after - warmup" in data["gains"]


def test_chat_with_the_result(corner: Corner, whole: tuple[Path, str]) -> None:
    """The trained model answers in the terminal; the folder that it works on stays as it was."""
    run, _ = whole
    before = {path: path.read_bytes() for path in corner.source.rglob("*.py")}
    environment = dict(os.environ, ETUDE_CACHE=str(corner.cache))
    done = subprocess.run(
        [*ETUDE, "chat", "--model", str(run), "--folder", str(corner.source)],
        input="Say something.\n",
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"models/final on {corner.source}" in done.stdout
    assert re.search(r"\[(finished|length|context_full|turn_limit)\]", done.stdout)
    assert {path: path.read_bytes() for path in corner.source.rglob("*.py")} == before
