"""Settings of the reward."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RewardSettings(BaseModel):
    """`valid_call` is added when an edit of the workspace succeeded, so that a model which
    cannot solve anything yet can still learn to act."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    valid_call: float = 0.1
