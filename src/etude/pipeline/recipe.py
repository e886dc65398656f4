"""A recipe: everything that a run was asked to do, in one file. Reading one imports no torch."""

from __future__ import annotations

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from etude.agent.settings import SessionSettings
from etude.agent.tools import tools_named
from etude.errors import EtudeError
from etude.inference.settings import EngineSettings
from etude.reward.settings import RewardSettings
from etude.rl.settings import PracticeSettings
from etude.tasks.settings import MakerSettings, PrepareSettings
from etude.tasks.task import Split
from etude.training.settings import PretrainSettings, TrainerSettings


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Section):
    """How long a supervised phase trains: `epochs` over its data, `minutes` at most. The learning
    rate follows the epochs, so a phase that the ceiling cuts short ends before it has decayed
    (the report says so). `tokens_per_step` is the size of one optimiser step."""

    epochs: PositiveFloat = 2.0
    minutes: PositiveFloat = 5.0
    learning_rate: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    tokens_per_step: PositiveInt = 2048
    warmup_share: float = Field(default=0.1, ge=0, le=1)


class EvaluationSettings(_Section):
    """Held-out evaluation: `samples` rollouts of each held-out task, sampled as in practice."""

    samples: PositiveInt = 4


class Concurrency(_Section):
    """How many rollouts are in flight, and how many graders run beside them."""

    rollouts: PositiveInt = 64
    graders: PositiveInt = 2


class Recipe(_Section):
    """One run of the main job. Every section has the defaults of its package."""

    name: str = "practice"
    description: str = ""
    source: str = ""
    model: str = "smollm2-135m"
    seed: int = Field(default=0, ge=0)
    sandbox: str = "bubblewrap"
    tools: tuple[str, ...] = ("read", "edit", "write", "grep", "shell", "finish")
    """What a rollout is told of. A small model on a CPU pays for each line in every prompt, so
    recipes of one-edit tasks name `edit` alone."""
    prepare: PrepareSettings = PrepareSettings()
    maker: MakerSettings = MakerSettings()
    engine: EngineSettings = EngineSettings()
    session: SessionSettings = SessionSettings()
    concurrency: Concurrency = Concurrency()
    reward: RewardSettings = RewardSettings()
    trainer: TrainerSettings = TrainerSettings()
    windows: PretrainSettings = PretrainSettings()
    pretrain: Budget = Budget()
    warmup: Budget = Budget(minutes=3.0)
    practice: PracticeSettings = PracticeSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        if not model.strip():
            raise ValueError("name a model: a folder, a hub id or a registered name")
        return model

    @field_validator("tools")
    @classmethod
    def _known(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        try:
            tools_named(tools)
        except EtudeError as error:
            raise ValueError(str(error)) from error
        if "edit" not in tools:
            raise ValueError("name `edit` among them: it is what the warm-up shows")
        return tools

    @model_validator(mode="after")
    def _every_split_is_filled(self) -> Self:
        """Each split has a use, save that of a practice without steps."""
        maker, needed = self.maker, list(Split)
        if self.practice.steps == 0:
            needed.remove(Split.PRACTICE)
        for split in needed:
            if not any(getattr(wanted, split.value) for wanted in maker.wanted.values()):
                rungs = " or ".join(f"maker.wanted.{rung}.{split}" for rung in maker.wanted)
                raise ValueError(
                    f"{rungs or 'maker.wanted'} must ask for a task: every run needs {split} tasks"
                )
        shares = {
            Split.WARMUP: (maker.warmup_fraction, "maker.warmup_fraction must be above 0"),
            Split.HELDOUT: (maker.heldout_fraction, "maker.heldout_fraction must be above 0"),
            Split.PRACTICE: (
                1 - maker.warmup_fraction - maker.heldout_fraction,
                "maker.warmup_fraction and maker.heldout_fraction must leave some for practice",
            ),
        }
        for split in needed:
            share, sentence = shares[split]
            if share <= 0:
                raise ValueError(sentence)
        return self

    def with_choices(self, *, source: str = "", model: str = "", seed: int | None = None) -> Recipe:
        """The same recipe with what was chosen on the command line. Folders become absolute, so
        that a run can be resumed from anywhere; one seed rules the tasks and the windows too.
        Raises EtudeError for a seed below 0."""
        seed = self.seed if seed is None else seed
        if seed < 0:
            raise EtudeError(f"the seed is {seed}; give 0 or more")
        return self.model_copy(
            update={
                "source": _absolute(source or self.source),
                "model": _absolute(model or self.model),
                "seed": seed,
                "maker": self.maker.model_copy(update={"seed": seed}),
                "windows": self.windows.model_copy(update={"seed": seed}),
            }
        )

    @classmethod
    def from_toml(cls, path: Path) -> Recipe:
        """Read a recipe. Raises EtudeError that names the file and the first wrong entry."""
        try:
            data = tomllib.loads(path.read_text())
        except OSError as error:
            raise EtudeError(f"cannot read the recipe {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise EtudeError(f"the recipe {path} is no valid TOML: {error}") from error
        return cls._validated(data, str(path))

    def to_json(self) -> str:
        """The whole recipe for `from_json`, infinities too: pydantic's own JSON makes them null,
        which for a cap means something else."""
        return json.dumps(self.model_dump(mode="json"), indent=2)

    @classmethod
    def from_json(cls, path: Path) -> Recipe:
        """Read the frozen recipe of a run."""
        try:
            return cls._validated(json.loads(path.read_text()), str(path))
        except (OSError, ValueError) as error:
            raise EtudeError(f"{path} is damaged: {error}") from error

    @classmethod
    def preset(cls, name: str) -> Recipe:
        """A recipe that ships with Etude. Raises EtudeError that lists them."""
        if name not in presets():
            known = ", ".join(sorted(presets()))
            raise EtudeError(f"there is no preset {name!r}; choose one of: {known}")
        return cls._validated(tomllib.loads(presets()[name]), f"preset {name}")

    @classmethod
    def _validated(cls, data: Any, where: str) -> Recipe:
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            reason = first["msg"]
            if first["type"] == "extra_forbidden":
                reason = "there is no such setting"
            reason = reason.removeprefix("Value error, ")
            raise EtudeError(": ".join(part for part in (where, field, reason) if part)) from error


def _absolute(name: str) -> str:
    """A folder by its absolute path; any other name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name and path.is_dir() else name


def presets() -> dict[str, str]:
    """TOML text of the recipes that ship with Etude, by name."""
    folder = resources.files("etude.recipes")
    return {
        entry.name.removesuffix(".toml"): entry.read_text()
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
