"""The loss of a global step on flat per-token tensors. It knows no model, row or algorithm.

Formulas: `etude.training.batch`. Because one optimiser step is made per batch, the policy at the
start of the step is the policy itself, so pi_old = stopgrad(pi) and the PPO ratio rho is 1, where
GRPO's, CISPO's and REINFORCE's gradients coincide.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.training.batch import Batch, Sequence


@dataclass(frozen=True, eq=False)
class TokenStreams:
    """What the loss needs of N tokens, every tensor (N,) float32; NaN where a log-prob of the
    sampler or the teacher is unknown."""

    policy: Tensor
    cross_entropy: Tensor
    distillation: Tensor
    sampler_logprobs: Tensor
    teacher_logprobs: Tensor

    def select(self, places: Tensor) -> TokenStreams:
        """The tokens at `places` (M,) int64."""
        return TokenStreams(
            self.policy[places],
            self.cross_entropy[places],
            self.distillation[places],
            self.sampler_logprobs[places],
            self.teacher_logprobs[places],
        )


@dataclass(frozen=True)
class Denominators:
    """One divisor per stream for the whole global step."""

    policy: float
    cross_entropy: float
    distillation: float


@dataclass(frozen=True, eq=False)
class StreamLosses:
    """The three terms of the loss, scalars; `omega` (N,) is detached, 1 where not applied."""

    policy: Tensor
    cross_entropy: Tensor
    distillation: Tensor
    omega: Tensor

    @property
    def total(self) -> Tensor:
        """The loss."""
        return self.policy + self.cross_entropy + self.distillation


def token_streams(sequences: Seq[Sequence]) -> TokenStreams:
    """All tokens of `sequences`, one after the other."""

    def join(name: str) -> Tensor:
        arrays: list[NDArray[np.float32]] = [getattr(s, name) for s in sequences]
        joined = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
        return torch.from_numpy(joined.astype(np.float32, copy=False))

    return TokenStreams(
        join("policy"),
        join("cross_entropy"),
        join("distillation"),
        join("sampler_logprobs"),
        join("teacher_logprobs"),
    )


def denominators(batch: Batch) -> Denominators:
    """The divisors of a batch. The counts are of the whole step, so that they do not depend on
    how it is cut up; an empty stream gets 1.

    Raises ValueError if the policy denominator is not positive.
    """
    if not batch.policy_denominator > 0:
        raise ValueError(f"policy_denominator must be positive, not {batch.policy_denominator}")
    count_ce = sum(int(np.count_nonzero(s.cross_entropy)) for s in batch.sequences)
    count_distil = sum(int(np.count_nonzero(s.distillation)) for s in batch.sequences)
    return Denominators(batch.policy_denominator, max(count_ce, 1), max(count_distil, 1))


def importance(logprobs: Tensor, sampler_logprobs: Tensor, cap: float | None) -> Tensor:
    """omega = min(exp(stopgrad(log pi_old - log pi_sampler)), cap), (N,), detached; 1 where the
    sampler's log-prob is unknown or `cap` is None (arXiv 2505.24034, truncated importance)."""
    if cap is None:
        return torch.ones_like(logprobs)
    log_omega = logprobs.detach() - sampler_logprobs.to(logprobs.dtype)
    log_omega = torch.where(log_omega.isnan() & sampler_logprobs.isnan(), 0.0, log_omega)
    return log_omega.exp().clamp(max=cap)


def stream_losses(
    logprobs: Tensor, streams: TokenStreams, divisors: Denominators, cap: float | None
) -> StreamLosses:
    """The loss of N tokens with `logprobs` (N,) differentiable. Sums over any partition of the
    step's tokens add up to the loss of the step.

    Raises ValueError where a token with a distillation weight has no teacher log-prob.
    """
    omega = importance(logprobs, streams.sampler_logprobs, cap)
    policy = -(streams.policy * omega * logprobs).sum() / divisors.policy
    cross_entropy = -(streams.cross_entropy * logprobs).sum() / divisors.cross_entropy
    taught = streams.distillation != 0
    if bool((taught & streams.teacher_logprobs.isnan()).any()):
        raise ValueError("a token with a distillation weight has no teacher log-prob")
    gap = logprobs.detach() - torch.where(taught, streams.teacher_logprobs, 0.0)
    distillation = (streams.distillation * gap * logprobs).sum() / divisors.distillation
    return StreamLosses(policy, cross_entropy, distillation, omega)
