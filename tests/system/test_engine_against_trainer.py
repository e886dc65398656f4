"""What the engine recorded while sampling is what the trainer computes again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from etude.inference.engine import TorchEngine
from etude.inference.protocol import Sampling
from etude.inference.settings import EngineSettings
from etude.models.dialects.hermes import HermesRenderer
from etude.models.pull import model_folder
from etude.models.tiny import make_tiny
from etude.records import Float32
from etude.training.batch import Sequence
from etude.training.settings import TrainerSettings
from etude.training.trainer import Trainer

Dtype = Literal["bfloat16", "float32"]
PROMPTS = (
    "Write a function that returns the first element of a sequence.",
    "def groupby(key, seq):\n    d = {}\n    for item in seq:\n        MISSING\n",
    "x = 1\nif x:\n",
)


def gaps(folder: Path, dtype: Dtype, tokens: int, temperature: float) -> Float32:
    """|log-prob at sampling − log-prob recomputed| of every token of groups of four."""
    renderer = HermesRenderer.from_folder(folder)
    prompts = [renderer.open("Be brief.", [], text) for text in PROMPTS for _ in range(4)]

    async def sample() -> list[tuple[list[int], np.ndarray, np.ndarray]]:
        engine = TorchEngine(folder, EngineSettings(dtype=dtype, max_context=512))
        try:
            done = await asyncio.gather(
                *(
                    engine.generate(p, Sampling(temperature, tokens, renderer.stop_ids, seed))
                    for seed, p in enumerate(prompts)
                )
            )
        finally:
            await engine.close()
        return [(p, c.ids, c.logprobs) for p, c in zip(prompts, done, strict=True)]

    sampled = asyncio.run(sample())
    sequences = []
    for prompt, ids, _ in sampled:
        count = len(prompt) + len(ids)
        zeros, unknown = np.zeros(count, np.float32), np.full(count, np.nan, np.float32)
        joined = np.array([*prompt, *ids], np.int32)
        sequences.append(Sequence(joined, zeros, zeros, zeros, unknown, unknown, temperature))
    trainer = Trainer(folder, TrainerSettings(dtype=dtype))
    again = trainer.logprobs(sequences)
    pairs = zip(sampled, again, strict=True)
    return np.concatenate([np.abs(new[-len(ids) :] - old) for (_, ids, old), new in pairs])


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tiny_models_agree(
    tmp_path: Path, kind: Literal["dense", "moe"], temperature: float
) -> None:
    found = gaps(make_tiny(tmp_path / kind, kind), "float32", 24, temperature)
    assert len(found) > 50 and found.max() < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_agrees() -> None:
    """The bounds of the project: fp32 max < 1e-4; bf16 mean < 0.06 and p99 < 0.25."""
    folder = model_folder("smollm2-135m")
    exact = gaps(folder, "float32", 48, 1.0)
    rough = gaps(folder, "bfloat16", 48, 1.0)
    for name, found in (("fp32", exact), ("bf16", rough)):
        print(
            f"{name}: {len(found)} tokens, mean {found.mean():.2g},"
            f" p99 {np.quantile(found, 0.99):.2g}, max {found.max():.2g}"
        )
    assert exact.max() < 1e-4
    assert rough.mean() < 0.06 and np.quantile(rough, 0.99) < 0.25
