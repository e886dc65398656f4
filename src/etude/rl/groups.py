"""Groups: the siblings of one prompt, their advantages, and the batch they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.records import Trajectory
from etude.training.algorithms import group_advantages
from etude.training.batch import Batch
from etude.training.policy import policy_sequences


@dataclass(frozen=True, eq=False)
class Group:
    """Measured rollouts of one task. The baseline is taken over chains, never over segments."""

    task_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        """Reward of each rollout."""
        return [t.outcome.reward for t in self.trajectories if t.outcome.reward is not None]

    @property
    def passed(self) -> int:
        """Rollouts that passed their tests."""
        verdicts = [t.outcome.verdict for t in self.trajectories]
        return sum(v is not None and v.score == 1.0 for v in verdicts)

    @property
    def teaches(self) -> bool:
        """Whether any weight stream is non-zero: here, whether the rewards differ."""
        return len(set(self.rewards)) > 1


def make_group(task_id: str, trajectories: Sequence[Trajectory]) -> Group:
    """A group of those rollouts that were measured; the others say nothing about the model."""
    return Group(task_id, tuple(t for t in trajectories if t.outcome.reward is not None))


def make_batch(groups: Sequence[Group], denominator: float) -> Batch:
    """Policy-gradient batch of all groups that teach. `denominator` is the recipe's constant."""
    sequences = [
        sequence
        for group in groups
        if group.teaches
        for trajectory, advantage in zip(
            group.trajectories, group_advantages(np.asarray(group.rewards)), strict=True
        )
        for sequence in policy_sequences(trajectory, float(advantage))
    ]
    return Batch(tuple(sequences), policy_denominator=denominator)
