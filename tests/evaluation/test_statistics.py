"""Statistics against brute force and known coverage."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.evaluation.score import gain, score
from etude.evaluation.statistics import mean, paired_difference, pass_at_k, ratio
from etude.records import StopReason
from etude.store import RolloutKey, RolloutRow


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(
    case: tuple[int, int], data: st.DataObject
) -> None:
    samples, correct = case
    k = data.draw(st.integers(1, samples))
    right = [True] * correct + [False] * (samples - correct)
    subsets = list(combinations(right, k))
    assert pass_at_k(correct, samples, k) == pytest.approx(
        sum(any(s) for s in subsets) / len(subsets)
    )


def test_pass_at_k_refuses_more_than_was_sampled() -> None:
    with pytest.raises(ValueError, match="undefined"):
        pass_at_k(1, 4, 5)


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        estimate = mean(rng.binomial(4, 0.3, 60) / 4, seed=trial)
        hits += estimate.low <= 0.3 <= estimate.high
    assert 0.88 <= hits / 200 <= 0.99


def test_ratio_of_sums_and_its_undefined_draws() -> None:
    assert ratio([1, 0, 2], [2, 0, 2]).value == pytest.approx(0.75)
    assert np.isnan(ratio([0, 0], [0, 0]).value)


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(80)
    before, after = hard, hard + 0.05
    paired = paired_difference(list(after), list(before))
    assert paired.low == pytest.approx(0.05) and paired.high == pytest.approx(0.05)
    with pytest.raises(ValueError, match="length"):
        paired_difference([1.0], [1.0, 2.0])


def row(task: str, sample: int, value: float | None, valid: bool) -> RolloutRow:
    return RolloutRow(
        RolloutKey("e", 0, task, sample), value, value, valid, StopReason.FINISHED, 10, 0.1
    )


def test_score_splits_valid_from_correct_and_leaves_out_the_unmeasured() -> None:
    rows = [
        row("a", 0, 1.0, True),
        row("a", 1, 0.0, True),
        row("b", 0, 0.0, False),
        row("b", 1, 0.0, True),
        row("b", 2, None, False),
        row("c", 0, 0.0, True),
    ]
    result = score(rows)
    assert result.pass_1.value == pytest.approx(0.5 / 3)
    assert result.pass_k.value == 0.5 and result.k == 2, "task c lacks a sample"
    assert result.valid.value == 0.8
    assert result.correct_given_valid.value == 0.25
    assert result.unmeasured == 1 and result.tasks == 3
    assert gain(result, result).value == 0.0
    with pytest.raises(ValueError, match="measured"):
        score([row("a", 0, None, False)])
