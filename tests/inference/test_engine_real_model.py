"""The embedded engine on the real model, against the plain model's forward pass."""

import asyncio

import numpy as np
import pytest
import torch

from etude.inference.engine import TorchEngine
from etude.inference.protocol import Sampling
from etude.inference.settings import EngineSettings
from etude.models.dialects.hermes import HermesRenderer
from etude.models.loading import DType, load
from etude.models.pull import model_folder

TASKS = (
    "Write a Python function that reverses a list.",
    "Explain what a generator is, in two sentences.",
    "Fix the bug in `def add(a, b): return a - b`. Answer with the corrected function only.",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_match_the_plain_model(dtype: DType) -> None:
    folder = model_folder("smollm2-135m")
    renderer = HermesRenderer.from_folder(folder)
    system = "You are a careful programmer. " + "Think first, then answer in few words. " * 8
    prompts = [renderer.open(system, [], task) for task in TASKS]
    cases = [
        (prompt, Sampling(seed=seed, max_tokens=40, stop_ids=renderer.stop_ids))
        for prompt in prompts
        for seed in range(6)
    ]

    async def scenario() -> np.ndarray:
        engine = TorchEngine(folder, EngineSettings(dtype=dtype, max_context=256))
        try:
            done = await asyncio.gather(*(engine.generate(*case) for case in cases))
        finally:
            await engine.close()
        model = load(folder, dtype).model
        errors: list[np.ndarray] = []
        for (prompt, _), completion in zip(cases, done, strict=True):
            ids = torch.tensor([prompt + completion.ids.tolist()])
            with torch.inference_mode():
                logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            rows = torch.arange(len(completion.ids))
            exact = logits.log_softmax(-1)[rows, torch.from_numpy(completion.ids).long()]
            errors.append(np.abs(exact.numpy() - completion.logprobs))
        return np.concatenate(errors)

    error = asyncio.run(scenario())
    assert len(error) > 200
    print(
        f"{dtype}: mean {error.mean():.2g}, p99 {np.quantile(error, 0.99):.2g}, {error.max():.2g}"
    )
    if dtype == "float32":
        assert error.max() < 1e-4
    else:
        assert error.mean() < 0.06
        assert np.quantile(error, 0.99) < 0.25
