"""Scores with intervals. The unit of resampling is the task: samples of one task are not
independent of one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased probability that at least one of k samples is right, 1 − C(n−c, k) / C(n, k)
    (Chen et al. 2021, arXiv:2107.03374). Raises ValueError when k exceeds the samples."""
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} of {correct} out of {samples} is undefined")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def bootstrap(
    tasks: int,
    statistic: Callable[[NDArray[np.int64]], float],
    *,
    seed: int = 0,
    draws: int = 2000,
) -> Estimate:
    """Percentile bootstrap over task indices. `statistic` gets an index array (tasks,) that may
    repeat; draws for which it is NaN (nothing to divide by) are left out."""
    if tasks < 1:
        raise ValueError("no tasks to estimate from")
    rng = np.random.default_rng(seed)
    values = np.array([statistic(rng.integers(0, tasks, tasks)) for _ in range(draws)])
    values = values[~np.isnan(values)]
    point = statistic(np.arange(tasks))
    if not len(values):
        return Estimate(point, float("nan"), float("nan"))
    low, high = np.percentile(values, [2.5, 97.5])
    return Estimate(point, float(low), float(high))


def mean(per_task: Sequence[float] | Float64, seed: int = 0) -> Estimate:
    """Mean over tasks."""
    values = np.asarray(per_task, dtype=np.float64)
    return bootstrap(len(values), lambda index: float(values[index].mean()), seed=seed)


def ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Estimate:
    """Sum over sum, over tasks: the share of right answers among valid calls, say."""
    top, bottom = np.asarray(above, np.float64), np.asarray(below, np.float64)

    def statistic(index: NDArray[np.int64]) -> float:
        total = bottom[index].sum()
        return float(top[index].sum() / total) if total else float("nan")

    return bootstrap(len(top), statistic, seed=seed)


def paired_difference(after: Sequence[float], before: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of after − before over the same tasks in the same order."""
    if len(after) != len(before):
        raise ValueError("paired samples differ in length")
    return mean(np.asarray(after, np.float64) - np.asarray(before, np.float64), seed)
