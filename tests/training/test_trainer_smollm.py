"""The trainer on the real model: log-probs against plain passes, and how fast it is."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.errors import EtudeError
from etude.training.batch import Batch, Sequence
from etude.training.settings import TrainerSettings
from etude.training.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder() -> Path:
    from etude.models.pull import model_folder

    try:
        return model_folder("smollm2-135m")
    except EtudeError as error:
        pytest.skip(str(error))


def group(prompt: int, answer: int, size: int) -> list[Sequence]:
    """A group of `size` answers to one prompt, of random ordinary tokens."""
    rng = np.random.default_rng(0)
    head = rng.integers(20, 40_000, prompt)
    result: list[Sequence] = []
    for number in range(size):
        ids = np.concatenate([head, rng.integers(20, 40_000, answer)]).astype(np.int32)
        sampled = np.arange(len(ids)) >= prompt
        zeros = np.zeros(len(ids), np.float32)
        unknown = np.full(len(ids), np.nan, np.float32)
        weights = np.where(sampled, 1.0 - 2 * (number % 2), 0).astype(np.float32)
        sampler = np.where(sampled, -12.0, np.nan).astype(np.float32)
        result.append(Sequence(ids, weights, zeros, zeros, sampler, unknown))
    return result


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 1.0)])
def test_logprobs_of_a_group_equal_plain_passes(folder: Path, dtype: str, bound: float) -> None:
    sequences = group(120, 20, 4)
    trainer = Trainer(folder, TrainerSettings.model_validate({"dtype": dtype}))
    ours = trainer.logprobs(sequences)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sequence, logprobs in zip(sequences, ours, strict=True):
        ids = torch.from_numpy(sequence.ids).long()[None]
        with torch.inference_mode():
            plain = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        expected = plain[torch.arange(ids.shape[1] - 1), ids[0, 1:]].numpy()
        gap = np.abs(logprobs[1:] - expected)
        print(f"{dtype}: mean {gap.mean():.2e}, max {gap.max():.2e}")
        assert gap.max() < bound
        assert gap.mean() < bound / 10


def test_throughput(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, TrainerSettings())
    windows = []
    for sequence in group(1, 511, 2):
        weights = np.ones(512, np.float32)
        weights[0] = 0
        zeros, unknown = np.zeros(512, np.float32), np.full(512, np.nan, np.float32)
        windows.append(Sequence(sequence.ids, zeros, weights, zeros, unknown, unknown))
    trainer.step(Batch(tuple(windows)), lr=0.0)
    for name, batch in (
        ("cross-entropy 2 x 512", Batch(tuple(windows))),
        ("group of 8, 350 + 55", Batch(tuple(group(350, 55, 8)), policy_denominator=440.0)),
    ):
        cpu = time.process_time()
        metrics = trainer.step(batch, lr=1e-6)
        print(
            f"{name}: {metrics.seconds:.2f} s, {time.process_time() - cpu:.2f} CPU-s,"
            f" {metrics.tokens / metrics.seconds:.0f} tok/s as if each sequence ran alone,"
            f" {metrics.nodes / metrics.seconds:.0f} computed"
        )
        assert np.isfinite(metrics.loss)
        assert metrics.nodes <= metrics.tokens
    began = time.monotonic()
    trainer.save(tmp_path)
    print(f"save: {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    trainer.load(tmp_path)
    print(f"load: {time.monotonic() - began:.1f} s")
