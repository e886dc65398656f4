"""The loss, its importance ratio and the weights, in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.training import schedules
from etude.training.algorithms import group_advantages, kl_k1
from etude.training.batch import Batch, Sequence
from etude.training.losses import (
    Denominators,
    TokenStreams,
    denominators,
    importance,
    stream_losses,
)

NAN = float("nan")


def streams(n: int, **given: list[float]) -> TokenStreams:
    def get(name: str, default: float) -> torch.Tensor:
        return torch.tensor(given.get(name, [default] * n), dtype=torch.float64)

    return TokenStreams(
        get("policy", 0.0),
        get("cross_entropy", 0.0),
        get("distillation", 0.0),
        get("sampler_logprobs", NAN),
        get("teacher_logprobs", NAN),
    )


def test_importance_is_capped_and_one_where_unknown() -> None:
    logp = torch.tensor([-1.0, -1.0, -3.0, -2.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([-2.0, -1.5, -1.0, NAN], dtype=torch.float64)
    omega = importance(logp, sampler, 2.0)
    expected = [2.0, math.exp(0.5), math.exp(-2.0), 1.0]
    assert omega.tolist() == pytest.approx(expected, rel=1e-12)
    assert not omega.requires_grad
    assert importance(logp, sampler, None).tolist() == [1.0] * 4
    assert importance(logp, sampler, math.inf)[0].item() == pytest.approx(math.e)


def test_a_nan_of_the_model_is_not_hidden() -> None:
    assert importance(torch.tensor([NAN]), torch.tensor([-1.0]), 2.0).isnan().all()


def test_gradient_of_each_stream_in_closed_form() -> None:
    logp = torch.tensor([-0.5, -1.5, -2.5], dtype=torch.float64, requires_grad=True)
    given = streams(
        3,
        policy=[2.0, -1.0, 0.0],
        cross_entropy=[0.0, 1.0, 3.0],
        distillation=[0.5, 0.0, 1.0],
        sampler_logprobs=[-0.9, 1.0, NAN],
        teacher_logprobs=[-1.0, NAN, -2.0],
    )
    losses = stream_losses(logp, given, Denominators(10.0, 2.0, 4.0), cap=1.2)
    (grad,) = torch.autograd.grad(losses.total, logp)
    assert grad.tolist() == pytest.approx(
        [
            -2.0 * 1.2 / 10 + 0.5 * (-0.5 + 1.0) / 4,
            1.0 * math.exp(-2.5) / 10 - 1.0 / 2,
            -3.0 / 2 + 1.0 * (-2.5 + 2.0) / 4,
        ],
        rel=1e-12,
    )


def test_distillation_without_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="no teacher"):
        stream_losses(torch.zeros(1), streams(1, distillation=[1.0]), Denominators(1, 1, 1), None)


@pytest.mark.parametrize("clip", [0.1, 0.2])
def test_at_equal_policies_grpo_and_cispo_are_reinforce(clip: float) -> None:
    """At rho = omega = 1 the textbook surrogates have REINFORCE's gradient, which is ours."""
    rng = torch.Generator().manual_seed(0)
    logp = -torch.rand(64, generator=rng, dtype=torch.float64) * 3
    advantage = torch.randn(64, generator=rng, dtype=torch.float64)

    def grpo(x: torch.Tensor) -> torch.Tensor:
        rho = (x - x.detach()).exp()
        return -torch.minimum(rho * advantage, rho.clamp(1 - clip, 1 + clip) * advantage).sum()

    def cispo(x: torch.Tensor) -> torch.Tensor:
        rho = (x - x.detach()).exp().clamp(1 - clip, 1 + clip).detach()
        return -(rho * advantage * x).sum()

    def ours(x: torch.Tensor) -> torch.Tensor:
        given = streams(64, policy=advantage.tolist(), sampler_logprobs=logp.tolist())
        return stream_losses(x, given, Denominators(1, 1, 1), cap=2.0).total

    grads = []
    for surrogate in (ours, grpo, cispo):
        leaf = logp.clone().requires_grad_()
        grads.append(torch.autograd.grad(surrogate(leaf), leaf)[0])
    assert torch.allclose(grads[0], -advantage, rtol=1e-12)
    assert torch.allclose(grads[0], grads[1], rtol=1e-12)
    assert torch.allclose(grads[0], grads[2], rtol=1e-12)


def test_denominators_count_the_whole_step() -> None:
    def one(ce: list[float], distil: list[float]) -> Sequence:
        n = len(ce)
        unknown = np.full(n, np.nan, np.float32)
        return Sequence(
            np.arange(n, dtype=np.int32),
            np.zeros(n, np.float32),
            np.array(ce, np.float32),
            np.array(distil, np.float32),
            unknown,
            unknown,
        )

    batch = Batch((one([0, 1, 0.5], [0, 0, 0]), one([0, 2], [0, 3])), policy_denominator=7.0)
    assert denominators(batch) == Denominators(7.0, 3, 1)
    assert denominators(Batch(())) == Denominators(1.0, 1, 1)
    with pytest.raises(ValueError, match="must be positive"):
        denominators(Batch((), policy_denominator=0.0))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=16))
def test_advantages_sum_to_zero_and_keep_differences(rewards: list[float]) -> None:
    values = np.array(rewards)
    advantages = group_advantages(values)
    assert advantages.sum() == pytest.approx(0, abs=1e-9)
    assert advantages - advantages[0] == pytest.approx(values - values[0], abs=1e-9)


@given(st.floats(-5, 5), st.integers(1, 16))
def test_equal_rewards_give_exactly_nothing(reward: float, size: int) -> None:
    for divide in (False, True):
        assert not group_advantages(np.full(size, reward), divide_by_std=divide).any()


def test_grpo_divides_by_the_deviation() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    assert group_advantages(rewards).tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert group_advantages(rewards, divide_by_std=True) == pytest.approx([-1, 1, 1, -1], rel=1e-5)
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(np.array([0.0, np.nan]))


def test_k1_is_a_constant_reward_per_token() -> None:
    reward = kl_k1(np.float32([np.nan, -1, -2]), np.float32([np.nan, -3, -2]), beta=0.1)
    assert reward.tolist() == pytest.approx([0.0, -0.2, 0.0])


@settings(max_examples=50)
@given(st.floats(0, 1), st.floats(0, 0.9), st.floats(0, 1))
def test_schedules_stay_in_range_and_hit_their_ends(
    progress: float, warmup: float, floor: float
) -> None:
    assert -1e-12 <= schedules.cosine(progress, warmup=warmup, floor=floor) <= 1 + 1e-12
    assert schedules.cosine(1.0, warmup=warmup, floor=floor) == pytest.approx(floor, abs=1e-12)
    assert schedules.cosine(warmup, warmup=warmup, floor=floor) == pytest.approx(1.0)
    assert schedules.constant(progress) == 1.0


def test_schedule_shapes() -> None:
    assert schedules.cosine(0.05, warmup=0.1) == pytest.approx(0.5)
    assert schedules.cosine(0.25) == pytest.approx(0.5 + math.sqrt(0.5) / 2)
    with pytest.raises(ValueError, match="progress"):
        schedules.cosine(1.5)
