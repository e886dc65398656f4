"""Settings of the learning loop."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PracticeSettings(BaseModel):
    """One step samples `group_size` rollouts of each of `groups_per_step` tasks, then takes one
    optimiser step on the groups that teach something.

    `steps` is the plan, `minutes` a ceiling; whichever comes first ends practice. The policy
    gradient is divided by the constant `groups_per_step * group_size * tokens_per_rollout`, never
    by what was sampled. `prior_strength` says how many rollouts the likelihood of the reference
    answer counts for when the curriculum guesses a pass rate. `passes` above 1 departs from the
    single epoch: a task may then be trained on that many times.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=10, ge=0)
    minutes: float = Field(default=6.0, gt=0)
    groups_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=2)
    learning_rate: float = Field(default=3e-5, gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=1, ge=0)
    tokens_per_rollout: int = Field(default=64, ge=1)
    prior_strength: float = Field(default=4.0, gt=0)
    passes: int = Field(default=1, ge=1)
