"""The run folder: one place on disk from which a run can always go on.

::

    RUN/recipe.json      what was asked for, frozen at the start
    RUN/run.db           state, metrics and one row per rollout
    RUN/rollouts/        one file per rollout
    RUN/tasks/           the tasks and the repository they came from
    RUN/checkpoints/     trainer states; the newest complete one counts
    RUN/models/final     the trained model, a Hugging Face folder
    RUN/report.html      what it came to
"""

from __future__ import annotations

import errno
import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO

from etude.errors import EtudeError
from etude.pipeline.recipe import Recipe
from etude.store import RunStore, write_atomically


class Run:
    """An open run; what changes it is one process at a time. Use as a context manager."""

    def __init__(
        self, folder: Path, recipe: Recipe, lock: IO[str] | None, *, readonly: bool = False
    ) -> None:
        self.folder = folder
        self.recipe = recipe
        self.store = RunStore(folder, readonly=readonly)
        self._lock = lock

    @classmethod
    def create(cls, folder: Path, recipe: Recipe) -> Run:
        """Start a new run. Raises EtudeError when the folder is in use already."""
        cls.check_new(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EtudeError(f"cannot make the run folder {folder}: {error.strerror}") from error
        lock = _lock(folder)
        write_atomically(folder / "recipe.json", recipe.to_json().encode())
        return cls(folder, recipe, lock)

    @staticmethod
    def check_new(folder: Path) -> None:
        """Raise EtudeError when the folder holds a run already."""
        if (folder / "recipe.json").exists():
            raise EtudeError(
                f"{folder} already holds a run: continue it with `etude practice --resume {folder}`"
                " or name another folder with --run"
            )

    @classmethod
    def resume(cls, folder: Path) -> Run:
        """Open a run that was started before. Raises EtudeError when there is none, it cannot be
        written, or another process is at it."""
        recipe = _recipe(folder)
        return cls(folder, recipe, _lock(folder))

    @classmethod
    def look(cls, folder: Path) -> Run:
        """Open a run in order to report on it, be another process at it or not, even in a folder
        that cannot be written. Raises EtudeError when there is none."""
        recipe = _recipe(folder)
        files = (folder, folder / "rollouts", folder / "run.db")
        readonly = not all(os.access(file, os.W_OK) for file in files if file.exists())
        return cls(folder, recipe, None, readonly=readonly)

    def path(self, *parts: str) -> Path:
        """A path inside the run; its parent folder exists."""
        path = self.folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.store.close()
        if self._lock is not None:
            self._lock.close()


def default_folder(source: str, now: datetime | None = None) -> Path:
    """`runs/<source>-<UTC time>` below the working folder."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    local = Path(source).expanduser()
    name = local.resolve().name if local.is_dir() else source.rstrip("/").rsplit("/", 1)[-1]
    name = name.removesuffix(".git")
    clean = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return Path("runs") / f"{clean}-{stamp}"


def _recipe(folder: Path) -> Recipe:
    path = folder / "recipe.json"
    if not path.is_file():
        raise EtudeError(f"{folder} is no run folder: it has no recipe.json")
    return Recipe.from_json(path)


def _lock(folder: Path) -> IO[str]:
    try:
        lock = (folder / "lock").open("w")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EtudeError(
            f"{folder} cannot be written ({error.strerror}), so the run in it cannot go on"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise EtudeError(f"another process is working on {folder}; stop it first") from error
    return lock
