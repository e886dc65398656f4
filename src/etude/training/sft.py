"""Fine-tuning sequences out of transcripts that are worth imitating."""

from __future__ import annotations

import numpy as np

from etude.records import Segment, Trajectory
from etude.training.batch import Sequence


def sft_sequences(trajectory: Trajectory) -> list[Sequence]:
    """One sequence per segment: cross-entropy weight 1 on every sampled token, 0 on prompts, tool
    output and synthetic text. A segment in which nothing was sampled gives none.

    Raises ValueError for a trajectory without a token ledger.
    """
    if not trajectory.segments:
        raise ValueError(f"session {trajectory.session_id} has no token ledger to train on")
    return [_sequence(segment) for segment in trajectory.segments if segment.sampled]


def _sequence(segment: Segment) -> Sequence:
    prompt = np.zeros(len(segment.prompt_ids), np.float32)
    weights = np.concatenate([prompt, segment.mask.astype(np.float32)])
    zeros, unknown = np.zeros_like(weights), np.full_like(weights, np.nan)
    # Imitation is of the plain distribution, whatever temperature the transcript was sampled at.
    return Sequence(
        ids=np.concatenate([segment.prompt_ids, segment.completion_ids]).astype(np.int32),
        policy=zeros,
        cross_entropy=weights,
        distillation=zeros,
        sampler_logprobs=unknown,
        teacher_logprobs=unknown,
    )
