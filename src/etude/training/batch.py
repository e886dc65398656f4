"""What the trainer eats: sequences with three aligned weight streams. No algorithm in here.

The loss of one global step is, over all tokens t of all sequences::

    L =   sum_t policy[t]        * -log pi(t) * omega(t)   / policy_denominator
        + sum_t cross_entropy[t] * -log pi(t)              / sum_t [cross_entropy[t] != 0]
        + sum_t distillation[t]  * d(t)                    / sum_t [distillation[t] != 0]

`omega` is the truncated importance ratio of the policy at the start of the step against the
sampler, where `sampler_logprobs` is known, else 1. `d` is the sampled-token estimator of the
reverse KL to the teacher, stopgrad(log pi - log pi_teacher) * log pi. An algorithm (Dr.GRPO, GRPO,
CISPO, GSPO) is a way to fill the streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.records import Float32, Int32


@dataclass(frozen=True, eq=False)
class Sequence:
    """One token sequence, every array (T,). A weight at t belongs to the prediction of `ids[t]`
    from `ids[:t]`; weights at 0 must be zero. `sampler_logprobs` and `teacher_logprobs` are NaN
    where unknown. Log-probs are those of logits / `temperature`.

    Raises ValueError when the arrays do not agree.
    """

    ids: Int32
    policy: Float32
    cross_entropy: Float32
    distillation: Float32
    sampler_logprobs: Float32
    teacher_logprobs: Float32
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "policy",
            "cross_entropy",
            "distillation",
            "sampler_logprobs",
            "teacher_logprobs",
        ):
            array = getattr(self, name)
            if len(array) != len(self.ids):
                raise ValueError(f"sequence: {name} is not aligned with ids")
        for name in ("policy", "cross_entropy", "distillation"):
            if len(self.ids) and getattr(self, name)[0] != 0:
                raise ValueError(f"sequence: the first token has no prediction, {name}[0] != 0")


@dataclass(frozen=True, eq=False)
class Batch:
    """All sequences of one global optimiser step."""

    sequences: tuple[Sequence, ...]
    policy_denominator: float = 1.0
