"""The reward of a finished rollout, as a sum of named terms."""

from __future__ import annotations

from etude.records import Outcome
from etude.reward.settings import RewardSettings


def breakdown(outcome: Outcome, settings: RewardSettings) -> dict[str, float] | None:
    """Terms of the reward by name, or None when the outcome was not measured: a failure of the
    infrastructure says nothing about the model and must not become a zero."""
    if outcome.verdict is None or outcome.verdict.score is None:
        return None
    return {
        "tests": outcome.verdict.score,
        "valid_call": settings.valid_call * outcome.valid_call,
    }


def reward(outcome: Outcome, settings: RewardSettings) -> float | None:
    """Sum of the terms, or None when not measured."""
    terms = breakdown(outcome, settings)
    return None if terms is None else sum(terms.values())
