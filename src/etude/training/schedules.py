"""Learning rates as functions of progress: the share of the step or token budget used, in [0, 1].

Each returns a factor in [0, 1] of the peak rate. Progress is a fraction so that a run bounded by
time or tokens decays fully, whatever number of steps it turns out to make.
"""

from __future__ import annotations

import math


def _warm(progress: float, warmup: float) -> float | None:
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must lie in [0, 1], not {progress}")
    if progress < warmup:
        return progress / warmup
    return None


def constant(progress: float, *, warmup: float = 0.0) -> float:
    """Linear warm-up over the first `warmup` of the budget, then 1."""
    warm = _warm(progress, warmup)
    return 1.0 if warm is None else warm


def cosine(progress: float, *, warmup: float = 0.0, floor: float = 0.0) -> float:
    """Warm-up, then half a cosine from 1 to `floor` (arXiv 1608.03983)."""
    warm = _warm(progress, warmup)
    if warm is not None:
        return warm
    done = (progress - warmup) / (1 - warmup) if warmup < 1 else 1.0
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
