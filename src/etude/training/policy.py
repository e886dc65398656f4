"""Policy-gradient sequences out of rollouts. Which advantage a chain gets is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from etude.records import Float32, Segment, Trajectory
from etude.training.batch import Sequence


def policy_sequences(
    trajectory: Trajectory,
    advantage: float,
    token_rewards: Seq[Float32] | None = None,
) -> list[Sequence]:
    """One sequence per segment: `advantage` on every sampled token of the whole chain, nothing on
    prompts, tool output and synthetic text; the sampler's log-probs come from the ledger.

    `token_rewards`, one array (P + C,) per segment, is added on sampled tokens only, such as
    `algorithms.kl_k1`. Raises ValueError for a trajectory without a token ledger, which can be
    evaluated but not trained on.
    """
    if not trajectory.segments:
        raise ValueError(f"session {trajectory.session_id} has no token ledger to train on")
    extra = token_rewards if token_rewards is not None else [None] * len(trajectory.segments)
    return [
        _sequence(segment, advantage, reward)
        for segment, reward in zip(trajectory.segments, extra, strict=True)
    ]


def _sequence(segment: Segment, advantage: float, reward: Float32 | None) -> Sequence:
    prompt = len(segment.prompt_ids)
    sampled = np.concatenate([np.zeros(prompt, np.bool_), segment.mask])
    weights = np.where(sampled, advantage, 0.0)
    if reward is not None:
        weights = weights + np.where(sampled, reward, 0.0)
    zeros = np.zeros(len(sampled), np.float32)
    unknown = np.full(len(sampled), np.nan, np.float32)
    return Sequence(
        ids=np.concatenate([segment.prompt_ids, segment.completion_ids]).astype(np.int32),
        policy=weights.astype(np.float32),
        cross_entropy=zeros,
        distillation=zeros,
        sampler_logprobs=np.concatenate([unknown[:prompt], segment.logprobs]).astype(np.float32),
        teacher_logprobs=unknown,
        temperature=segment.temperature,
    )
