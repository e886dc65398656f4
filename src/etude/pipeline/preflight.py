"""What would stop a run at once, looked for before its folder is made."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from pathlib import Path

from safetensors import SafetensorError, safe_open

from etude.errors import EtudeError
from etude.machine import free_bytes
from etude.models.dialects.choose import renderer_for
from etude.models.pull import ensure_model
from etude.pipeline.checkpoints import BYTES_PER_PARAMETER
from etude.pipeline.recipe import Recipe
from etude.progress import Progress
from etude.sandbox.registry import open_sandbox

_CHECKPOINTS = 3
"""Two stand beside one another while the newer replaces the older; what a third would take is for
rollouts, tasks and whoever else writes to the disk."""


async def preflight(recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Get the model and see that `folder`, which need not exist, has room and that a sandbox
    starts. Raises EtudeError for whatever is missing; nothing of the run is written."""
    model = await asyncio.to_thread(ensure_model, recipe.model, progress=progress.say)
    await asyncio.to_thread(renderer_for, model)
    check_room(folder, model)
    with closing(await open_sandbox(recipe.sandbox)):
        pass


def check_room(folder: Path, model: Path) -> None:
    """Raise EtudeError unless the disk of the run folder has room for what a run of `model`
    stores; what the run holds already counts as room."""
    weights, parameters = _weights(model)
    need = _CHECKPOINTS * BYTES_PER_PARAMETER * parameters + weights
    stored = sum(_bytes_below(folder / name) for name in ("checkpoints", "models"))
    free = free_bytes(folder)
    if free + stored < need:
        raise EtudeError(
            f"no space for a run in {folder}: checkpoints and the trained model take"
            f" {readable(need - stored)} and {readable(free)} are free; free some or choose"
            " another disk with --run"
        )


def readable(size: int) -> str:
    """Bytes as a person reads them, two digits at least: `5.1 GiB`, `14 MiB`."""
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if size >= 1 << shift:
            value = size / (1 << shift)
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{size / 1024:.0f} KiB"


def _weights(model: Path) -> tuple[int, int]:
    """Bytes and number of a model's parameters, from the heads of its files. (0, 0) where it keeps
    them in another format: each checkpoint looks for its room itself."""
    size = parameters = 0
    for path in sorted(model.glob("*.safetensors")):
        size += path.stat().st_size
        try:
            with safe_open(path, framework="np") as file:
                parameters += sum(
                    math.prod(file.get_slice(name).get_shape()) for name in list(file.keys())
                )
        except (OSError, SafetensorError) as error:
            raise EtudeError(
                f"{path} is damaged ({error}); get the model again or name another one"
            ) from error
    return size, parameters


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
