"""Settings of preparation and of the task makers; imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from etude.tasks.task import Rung


class PrepareSettings(BaseModel):
    """How a repository is fetched and prepared. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fetch_timeout: PositiveFloat = 300.0
    install_timeout: PositiveFloat = 900.0
    suite_timeout: PositiveFloat = 600.0
    """Deadline of one run of the whole suite."""
    max_source_bytes: PositiveInt = 512 << 20
    """Ceiling of the unpacked source."""
    max_files: PositiveInt = 50_000
    extra_requirements: tuple[str, ...] = ()
    """What the tests need beyond what the repository itself declares."""
    workers: PositiveInt = 2
    order_seed: NonNegativeInt = 1
    """Order of the second run of the suite."""
    hash_seed: int = Field(default=4242, ge=0, lt=1 << 32)
    """PYTHONHASHSEED of the third run."""


class Wanted(BaseModel):
    """Number of tasks wanted for one rung, by split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    warmup: NonNegativeInt = 40
    practice: NonNegativeInt = 100
    heldout: NonNegativeInt = 60


class MakerSettings(BaseModel):
    """Feature deletion: what to remove, how to split, when to stop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    wanted: dict[Rung, Wanted] = Field(default_factory=lambda: {Rung.EXPRESSION: Wanted()})
    warmup_fraction: float = Field(default=0.2, ge=0, le=1)
    """Share of functions for warm-up transcripts; practice gets what the other two leave."""
    heldout_fraction: float = Field(default=0.3, ge=0, le=1)
    max_per_function: PositiveInt = 12
    """Tasks of one rung taken from one function, so that no function dominates."""
    min_chars: PositiveInt = 3
    max_chars: PositiveInt = 80
    """Length of a removed expression."""
    max_statement_lines: PositiveInt = 8
    max_body_lines: PositiveInt = 25
    max_test_share: float = Field(default=0.5, gt=0, le=1)
    """A line that more than this share of the tests runs is no feature but the trunk."""
    lines_before: NonNegativeInt = 10
    lines_after: NonNegativeInt = 6
    max_window_chars: PositiveInt = 800
    """Size of the file's window in the prompt; about 220 tokens of a small model."""
    checks: bool = True
    """Attach held-out checks recorded from the reference."""
    workers: PositiveInt = 2
    test_timeout: PositiveFloat = 10.0
    """Deadline of one validation run, beside what the suite itself takes."""
    max_seconds: PositiveFloat = 600.0
    """When to stop looking, whatever is still wanted."""
