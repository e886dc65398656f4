"""Which tasks to practise next: those whose pass rate is most likely neither 0 nor 1.

Each task has a Beta belief about its pass rate. It starts from the likelihood of the reference
answer, which bounds the pass rate from below and costs one forward pass instead of a group of
rollouts, and moves with every rollout that was measured. A group teaches when its rewards differ,
and the variance of one reward is p(1 − p); tasks are taken by its expectation. A task that was
only measured may come again; one that was trained on comes no more (single epoch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_FLOOR = 0.02


class Curriculum:
    """Beliefs about tasks, by task id. `prior` maps ids to a guess of the pass rate."""

    def __init__(
        self, prior: Mapping[str, float], *, strength: float, passes: int = 1, seed: int = 0
    ) -> None:
        self._alpha: dict[str, float] = {}
        self._beta: dict[str, float] = {}
        self._trained: dict[str, int] = {}
        self._passes = passes
        order = sorted(prior)
        np.random.default_rng(seed).shuffle(order)
        for name in order:
            guess = min(max(prior[name], _FLOOR), 1 - _FLOOR)
            self._alpha[name] = strength * guess
            self._beta[name] = strength * (1 - guess)

    def observe(self, task_id: str, passed: int, samples: int) -> None:
        """Take in what a group measured."""
        self._alpha[task_id] += passed
        self._beta[task_id] += samples - passed

    def trained(self, task_ids: Sequence[str]) -> None:
        """These tasks were trained on once (more)."""
        for name in task_ids:
            self._trained[name] = self._trained.get(name, 0) + 1

    def variance(self, task_id: str) -> float:
        """E[p(1 − p)] under the belief, in [0, 1/4]: ab / ((a+b)(a+b+1)) for Beta(a, b)."""
        a, b = self._alpha[task_id], self._beta[task_id]
        return a * b / ((a + b) * (a + b + 1))

    def choose(self, count: int) -> list[str]:
        """The `count` most promising tasks (fewer when fewer are left), best first. Ties go by
        the seed's order."""
        left = [n for n in self._alpha if self._trained.get(n, 0) < self._passes]
        return sorted(left, key=lambda name: -self.variance(name))[:count]
