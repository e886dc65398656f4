"""From stored rollouts to the rows of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.evaluation.statistics import Estimate, mean, paired_difference, pass_at_k, ratio
from etude.store import RolloutRow


@dataclass(frozen=True)
class Score:
    """What one policy did on a set of tasks.

    `pass_1` is over all tasks, `pass_k` over those whose `k` samples were all measured; `valid` is
    the share of rollouts whose edit was accepted, `correct_given_valid` the share of those that
    passed. `unmeasured` rollouts are left out of all of them. `per_task` is pass@1 by task id.
    """

    tasks: int
    k: int
    pass_1: Estimate
    pass_k: Estimate
    valid: Estimate
    correct_given_valid: Estimate
    mean_tokens: float
    unmeasured: int
    per_task: dict[str, float]


def score(rows: Sequence[RolloutRow], seed: int = 0) -> Score:
    """Score the rollouts of one evaluation. Raises ValueError when none was measured."""
    groups: dict[str, list[RolloutRow]] = defaultdict(list)
    for row in rows:
        if row.score is not None:
            groups[row.key.task_id].append(row)
    if not groups:
        raise ValueError("no rollout of this evaluation was measured")
    ordered = [groups[name] for name in sorted(groups)]
    k = max(len(group) for group in ordered)
    solved = [sum(row.score == 1.0 for row in group) for group in ordered]
    valid = [sum(row.valid_call for row in group) for group in ordered]
    sizes = [len(group) for group in ordered]
    passed = [s / n for s, n in zip(solved, sizes, strict=True)]
    return Score(
        tasks=len(ordered),
        k=k,
        pass_1=mean(passed, seed),
        pass_k=mean(
            [pass_at_k(s, n, k) for s, n in zip(solved, sizes, strict=True) if n == k], seed
        ),
        valid=ratio(valid, sizes, seed),
        correct_given_valid=ratio(solved, valid, seed),
        mean_tokens=float(np.mean([row.sampled for group in ordered for row in group])),
        unmeasured=sum(row.score is None for row in rows),
        per_task=dict(zip(sorted(groups), passed, strict=True)),
    )


def gain(after: Score, before: Score, seed: int = 0) -> Estimate:
    """Difference in pass@1, paired over the tasks that both measured."""
    common = sorted(after.per_task.keys() & before.per_task.keys())
    return paired_difference(
        [after.per_task[name] for name in common], [before.per_task[name] for name in common], seed
    )
