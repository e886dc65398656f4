"""What one optimiser step reports."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from etude.records import Float32
from etude.training.batch import Sequence
from etude.training.forest import Pass
from etude.training.head import EdgeScores
from etude.training.losses import StreamLosses, TokenStreams


@dataclass(frozen=True)
class StepMetrics:
    """One step. Losses are the three terms of `etude.training.batch`; `grad_norm` is before
    clipping. `entropy` (nats) is the mean over all weighted tokens of the whole distribution
    they were predicted from. `log_omega_*` are of |log pi - log pi_sampler|, uncapped, over
    tokens with a policy weight and a recorded log-prob; 0 when there are none. `nodes` counts
    what was computed, `tokens` what plain forward passes of every sequence would have."""

    step: int
    lr: float
    loss: float
    policy_loss: float
    cross_entropy: float
    distillation: float
    grad_norm: float
    entropy: float
    log_omega_mean: float
    log_omega_p99: float
    log_omega_max: float
    omega_capped: float
    """Share of those tokens whose omega was cut at the cap."""
    sequences: int
    tokens: int
    nodes: int
    passes: int
    policy_tokens: int
    cross_entropy_tokens: int
    distillation_tokens: int
    seconds: float


@dataclass
class Tally:
    """Sums over the passes of one step."""

    batch: Seq[Sequence]
    policy: float = 0.0
    cross_entropy: float = 0.0
    distillation: float = 0.0
    passes: int = 0
    nodes: int = 0
    edges: int = 0
    entropy: float = 0.0
    gaps: list[Float32] = field(default_factory=list[Float32])

    @property
    def loss(self) -> float:
        """The loss so far."""
        return self.policy + self.cross_entropy + self.distillation

    def add_losses(self, losses: StreamLosses) -> None:
        """Count one run of tokens."""
        self.policy += float(losses.policy.detach())
        self.cross_entropy += float(losses.cross_entropy.detach())
        self.distillation += float(losses.distillation.detach())

    def add_pass(self, group: Pass, scores: EdgeScores, streams: TokenStreams) -> None:
        """Count one pass; `streams` are those of its edges, in the order of `scores`."""
        self.passes += 1
        self.nodes += group.nodes
        self.edges += len(scores.logprobs)
        self.entropy += float(scores.entropy.sum())
        known = (streams.policy != 0) & ~streams.sampler_logprobs.isnan()
        gap: Tensor = scores.logprobs[known] - streams.sampler_logprobs[known]
        self.gaps.append(gap.float().numpy())

    def finish(
        self, step: int, lr: float, grad_norm: float, cap: float | None, seconds: float
    ) -> StepMetrics:
        """The metrics of the step."""
        gaps = np.concatenate(self.gaps) if self.gaps else np.zeros(0, np.float32)
        size = np.abs(gaps) if len(gaps) else np.zeros(1, np.float32)
        capped = float((gaps > np.log(cap)).mean()) if cap is not None and len(gaps) else 0.0
        return StepMetrics(
            step=step,
            lr=lr,
            loss=self.loss,
            policy_loss=self.policy,
            cross_entropy=self.cross_entropy,
            distillation=self.distillation,
            grad_norm=grad_norm,
            entropy=self.entropy / max(self.edges, 1),
            log_omega_mean=float(size.mean()),
            log_omega_p99=float(np.quantile(size, 0.99)),
            log_omega_max=float(size.max()),
            omega_capped=capped,
            sequences=len(self.batch),
            tokens=sum(len(s.ids) for s in self.batch),
            nodes=self.nodes,
            passes=self.passes,
            policy_tokens=sum(int(np.count_nonzero(s.policy)) for s in self.batch),
            cross_entropy_tokens=sum(int(np.count_nonzero(s.cross_entropy)) for s in self.batch),
            distillation_tokens=sum(int(np.count_nonzero(s.distillation)) for s in self.batch),
            seconds=seconds,
        )
