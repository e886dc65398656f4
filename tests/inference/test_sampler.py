import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference.sampler import sample


def draw(
    logits: torch.Tensor, temperature: float, uniforms: list[float]
) -> tuple[list[int], list[float]]:
    rows = logits[None].expand(len(uniforms), -1)
    return sample(
        rows,
        torch.full((len(uniforms),), temperature),
        torch.tensor(uniforms, dtype=torch.float64),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("vocab", [7, 256, 700])
def test_the_distribution_is_softmax(vocab: int, temperature: float) -> None:
    """Chi-square over the likelier tokens, the rest pooled; 20,000 draws, fixed seed."""
    count = 20_000
    logits = torch.randn(vocab, generator=torch.manual_seed(vocab)) * 2
    uniforms = np.random.default_rng(1).random(count)
    ids, _ = draw(logits, temperature, uniforms.tolist())
    expected = (logits.double() / temperature).softmax(-1).numpy() * count
    seen = np.bincount(ids, minlength=vocab)
    big = expected >= 10
    seen, expected = (np.append(a[big], a[~big].sum()) for a in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    chi = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # Wilson-Hilferty: the cube root of chi-square/freedom is nearly normal; 4 sigma.
    spread = math.sqrt(2 / (9 * freedom))
    assert ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / spread < 4


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.integers(1, 1200),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0]),
    uniforms=st.lists(
        st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 999),
)
def test_agrees_with_a_slow_reference(
    vocab: int, scale: float, temperature: float, uniforms: list[float], seed: int
) -> None:
    """Float64, one loop: the drawn token's interval holds u up to rounding, the log-prob is that
    of the full softmax, and a token of no weight is never drawn."""
    logits = torch.randn(vocab, generator=torch.manual_seed(seed)) * scale
    ids, logprobs = draw(logits, temperature, uniforms)
    scores = logits.double() / (temperature or 1.0)
    exact = scores.log_softmax(-1)
    rounding = 1e-5 + 1e-6 * float(scores.abs().max())
    for token, logprob, u in zip(ids, logprobs, uniforms, strict=True):
        assert logprob == pytest.approx(exact[token].item(), abs=rounding)
        if temperature == 0:
            assert token == int(logits.argmax())
        else:
            below = float(exact[:token].exp().sum())
            assert below - rounding <= u <= below + math.exp(exact[token]) + rounding
            assert math.exp(exact[token]) > 0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, 300, generator=torch.manual_seed(0))
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0])
    uniforms = torch.rand(5, dtype=torch.float64, generator=torch.manual_seed(1))
    together = sample(logits, temperatures, uniforms)
    for row in range(5):
        part = slice(row, row + 1)
        alone = sample(logits[part], temperatures[part], uniforms[part])
        assert alone.ids[0] == together.ids[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-6)


def test_not_a_number_is_reported_not_hidden() -> None:
    logits = torch.full((1, 300), math.nan)
    drawn = sample(logits, torch.ones(1), torch.zeros(1, dtype=torch.float64))
    assert math.isnan(drawn.logprobs[0])
