"""Algorithms as weights: pure functions that fill the policy stream. The trainer knows none.

At one optimiser step per batch Dr.GRPO, GRPO, CISPO and GSPO differ only in these numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


def group_advantages(rewards: Float, *, divide_by_std: bool = False, eps: float = 1e-6) -> Float:
    """Advantage of every chain of one group, (G,) from rewards (G,).

    A_i = R_i - mean(R) (Dr.GRPO, arXiv 2503.20783); with `divide_by_std` divided by std(R) + eps
    as in GRPO (arXiv 2402.03300). Equal rewards give exactly 0. A rollout that was not measured
    has no reward and must be left out before.

    Raises ValueError for a reward that is not finite.
    """
    if not np.isfinite(rewards).all():
        raise ValueError("a reward is not finite; leave rollouts without a verdict out")
    if len(rewards) == 0 or (rewards == rewards[0]).all():
        # The mean of equal floats may differ from them in the last bit.
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + eps) if divide_by_std else centred


def kl_k1(
    logprobs: NDArray[np.float32], reference_logprobs: NDArray[np.float32], beta: float
) -> NDArray[np.float32]:
    """Per-token reward of the KL penalty, (T,): -beta * (log pi - log pi_ref), a constant to the
    gradient. Added to the advantage after the group mean. 0 where either log-prob is NaN."""
    gap = logprobs - reference_logprobs
    return (-beta * np.where(np.isnan(gap), 0.0, gap)).astype(np.float32)
