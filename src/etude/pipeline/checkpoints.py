"""Checkpoints of a run: trainer state and ledger in one folder that appears by one rename.

Whatever is said to be trained is in the same folder as the weights that were trained on it, so the
two can never disagree.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import EtudeError
from etude.machine import free_bytes
from etude.store import write_atomically
from etude.training.trainer import Trainer

_MANIFEST = "manifest.json"
_PHASES = ("pretrain", "warmup", "practice")
BYTES_PER_PARAMETER = 12
"""Master weight and two moments, float32."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete one. `step` counts the finished steps of its phase; `final` says that the phase
    is over; `ledger` is whatever the phase keeps (practice: the tasks trained on)."""

    folder: Path
    phase: str
    step: int
    final: bool
    ledger: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run; only the newest is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            shutil.rmtree(leftover)

    def newest(self) -> Checkpoint | None:
        """The latest checkpoint in the order of phases and steps, or None."""
        found = [self._read(path) for path in self._folder.iterdir() if path.name[0] != "."]
        found.sort(key=lambda c: (_PHASES.index(c.phase), c.step, c.final))
        return found[-1] if found else None

    def step(self, phase: str) -> int:
        """Finished steps of a phase, 0 when it has no checkpoint."""
        newest = self.newest()
        return newest.step if newest is not None and newest.phase == phase else 0

    def over(self, phase: str) -> bool:
        """Whether a phase is over: it has its final checkpoint, or a later phase has any."""
        newest = self.newest()
        if newest is None or _PHASES.index(newest.phase) < _PHASES.index(phase):
            return False
        return newest.phase != phase or newest.final

    def commit(
        self,
        trainer: Trainer,
        phase: str,
        step: int,
        *,
        final: bool = False,
        ledger: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, then drop the older ones. Raises EtudeError when the disk has no
        room; the older checkpoint then stays."""
        name = f"{phase}-{step:06d}" + ("-final" if final else "")
        if (self._folder / name).exists():
            return
        need = BYTES_PER_PARAMETER * trainer.parameters
        if free_bytes(self._folder) < need * 1.05:
            raise EtudeError(
                f"no space for a checkpoint in {self._folder}: it takes {need / 2**30:.1f} GiB and"
                f" {free_bytes(self._folder) / 2**30:.1f} GiB are free; free some and resume"
            )
        temporary = self._folder / f".{name}.{os.getpid()}.tmp"
        trainer.save(temporary)
        manifest = {"phase": phase, "step": step, "final": final, "ledger": dict(ledger or {})}
        write_atomically(temporary / _MANIFEST, json.dumps(manifest).encode())
        temporary.replace(self._folder / name)
        for folder in list(self._folder.iterdir()):
            if folder.name != name:
                # Renamed first: one that is half deleted must not pass for a damaged checkpoint.
                doomed = folder.with_name(f".{folder.name}.tmp")
                shutil.rmtree(folder.replace(doomed))

    def _read(self, folder: Path) -> Checkpoint:
        try:
            data = json.loads((folder / _MANIFEST).read_text())
            return Checkpoint(folder, data["phase"], data["step"], data["final"], data["ledger"])
        except (OSError, ValueError, KeyError) as error:
            raise EtudeError(
                f"the checkpoint {folder} is damaged ({error}); start a new run, or put the folder"
                " back from a backup"
            ) from error
