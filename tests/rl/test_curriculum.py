"""The curriculum prefers tasks that are neither sure nor hopeless, and never repeats one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rl.curriculum import Curriculum


@given(st.floats(0, 1), st.integers(0, 8), st.integers(0, 8))
def test_variance_is_the_beta_expectation(prior: float, passed: int, failed: int) -> None:
    curriculum = Curriculum({"a": prior}, strength=4.0)
    curriculum.observe("a", passed, passed + failed)
    guess = min(max(prior, 0.02), 0.98)
    draws = np.random.default_rng(0).beta(
        4 * guess + passed, 4 * (1 - guess) + failed, size=200_000
    )
    assert curriculum.variance("a") == pytest.approx(np.mean(draws * (1 - draws)), abs=2e-3)


def test_mixed_tasks_come_first_and_trained_ones_no_more() -> None:
    curriculum = Curriculum({"sure": 0.98, "mixed": 0.4, "hopeless": 0.0}, strength=4.0)
    assert curriculum.choose(1) == ["mixed"]
    curriculum.trained(["mixed"])
    assert "mixed" not in curriculum.choose(3)
    assert len(curriculum.choose(3)) == 2


def test_measurements_outweigh_the_guess() -> None:
    curriculum = Curriculum({"guessed": 0.5, "measured": 0.05}, strength=2.0)
    curriculum.observe("guessed", 8, 8)
    curriculum.observe("measured", 4, 8)
    assert curriculum.choose(2) == ["measured", "guessed"]


def test_a_second_pass_has_to_be_asked_for() -> None:
    curriculum = Curriculum({"a": 0.5}, strength=2.0, passes=2)
    curriculum.trained(["a"])
    assert curriculum.choose(1) == ["a"]
    curriculum.trained(["a"])
    assert curriculum.choose(1) == []


def test_ties_follow_the_seed() -> None:
    names = {f"t{i}": 0.3 for i in range(20)}
    first = Curriculum(names, strength=2.0, seed=1).choose(20)
    assert first == Curriculum(names, strength=2.0, seed=1).choose(20)
    assert first != Curriculum(names, strength=2.0, seed=2).choose(20)
