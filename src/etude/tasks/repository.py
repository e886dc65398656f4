"""A prepared repository: pristine files, an environment that runs its tests, and what passed."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from etude.agent.tools.programs import with_tools
from etude.sandbox.protocol import WORKSPACE_ROOT, Image


class Repository(BaseModel):
    """What `prepare` leaves in the cache, as stored in `repository.json` beside the files.

    `key` is a hash of content and preparation. `root` holds the pristine files without history
    and caches, `env` the virtual environment in which the project is installed editable from
    `/workspace`. `source_files` are the Python files that tasks may touch, `test_files` those
    that hold tests, both relative to `root`. `tests` are the ids that passed every time,
    `suite_seconds` the time of one run of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    name: str
    source: str
    root: Path
    env: Path
    source_files: tuple[str, ...]
    test_files: tuple[str, ...]
    tests: tuple[str, ...]
    suite_seconds: float

    @property
    def python(self) -> str:
        """The interpreter as seen inside a sandbox."""
        return str(self.env / "bin" / "python")

    def image(self) -> Image:
        """The image of a workspace on this repository; the environment keeps its host path."""
        return with_tools(
            Image(
                root=self.root,
                readonly={self.env: str(self.env)},
                env={
                    "PATH": f"{self.env / 'bin'}:/usr/local/bin:/usr/bin:/bin",
                    "HOME": WORKSPACE_ROOT,
                    "LANG": "C.UTF-8",
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            )
        )
