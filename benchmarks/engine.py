"""The embedded engine against transformers on the main job's load: groups of one prompt each.

Run `python benchmarks/engine.py`; `--quick` makes a small run that only proves the script works.
The requests are the same on both sides: same prompts, same number of sampled tokens for each, so
neither wins by stopping early. `generate` gets all of them as one left-padded batch, as a user
would; `generate_batch` is the library's own continuous batching.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers import GenerationConfig

import shape
from etude.inference.engine import TorchEngine
from etude.inference.forward import native_bfloat16
from etude.inference.protocol import Sampling
from etude.inference.settings import EngineSettings
from etude.models.loading import load
from etude.models.pull import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0


@dataclass(frozen=True)
class Load:
    """Prompts (a common head, then a text of their own), samples of each, tokens to sample."""

    prompts: list[list[int]]
    samples: int
    new_tokens: int

    @property
    def sampled(self) -> int:
        """Tokens that one run samples."""
        return len(self.prompts) * self.samples * self.new_tokens


def make_load(quick: bool) -> Load:
    """8 groups of 8 over prompts of about 350 tokens, 55 sampled each: the demo's shape."""
    groups, samples, length, new = (2, 2, 60, 6) if quick else (8, 8, 350, 55)
    random = np.random.default_rng(SEED)
    head = random.integers(20, 49_000, length // 3).tolist()
    spread = length // 12
    prompts = [
        head
        + random.integers(
            20, 49_000, length - len(head) + random.integers(-spread, spread)
        ).tolist()
        for _ in range(groups)
    ]
    return Load(prompts, samples, new)


def ours_groups(engine: TorchEngine, load_: Load, seed: int) -> float:
    """Sampled tokens per second, prompts included. A first token of its own keeps each run from
    finding what an earlier one left in the cache."""

    async def run() -> float:
        began = time.perf_counter()
        await asyncio.gather(
            *(
                engine.generate(
                    [20 + seed, *prompt],
                    Sampling(max_tokens=load_.new_tokens, seed=1000 * seed + number),
                )
                for prompt in load_.prompts
                for number in range(load_.samples)
            )
        )
        return load_.sampled / (time.perf_counter() - began)

    return asyncio.run(run())


def their_groups(model: PreTrainedModel, load_: Load) -> float:
    """The same by `generate`: one left-padded batch, `num_return_sequences` per prompt."""
    width = max(map(len, load_.prompts))
    ids = torch.zeros(len(load_.prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(load_.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=load_.new_tokens,
        min_new_tokens=load_.new_tokens,
        num_return_sequences=load_.samples,
        pad_token_id=0,
        eos_token_id=2,
    )
    generator: Any = model
    seconds = shape.timed(
        lambda: generator.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    )
    return load_.sampled / seconds


def ours_prefill(engine: TorchEngine, tokens: int, seed: int) -> float:
    """Prompt tokens per second of one request that samples a single token."""
    prompt = np.random.default_rng(seed).integers(20, 49_000, tokens).tolist()
    seconds = shape.timed(lambda: asyncio.run(engine.generate(prompt, Sampling(max_tokens=1))))
    return tokens / seconds


def their_prefill(model: PreTrainedModel, tokens: int, seed: int) -> float:
    """The same by the plain model: forward with a cache, logits of the last token."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(20, 49_000, (1, tokens)))
    with torch.inference_mode():
        seconds = shape.timed(lambda: model(ids, use_cache=True, logits_to_keep=1))
    return tokens / seconds


def main() -> None:
    """Measure and write `results/engine.json` (a quick run only prints)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny load, nothing written")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = model_folder(options.model)
    dtype = "bfloat16" if native_bfloat16() else "float32"
    load_ = make_load(options.quick)
    settings = EngineSettings(dtype=dtype, max_context=1024)
    engine = TorchEngine(folder, settings)
    model = load(folder, dtype).model
    torch.manual_seed(SEED)
    tokens = 64 if options.quick else 512
    seeds = iter(range(1, 1000))
    ours_groups(engine, make_load(True), next(seeds))  # warm both sides
    their_groups(model, make_load(True))
    groups = shape.alternate(
        lambda: ours_groups(engine, load_, next(seeds)),
        lambda: their_groups(model, load_),
        options.repeats,
    )
    prefill = shape.alternate(
        lambda: ours_prefill(engine, tokens, next(seeds)),
        lambda: their_prefill(model, tokens, next(seeds)),
        options.repeats,
    )
    peer = f"transformers {transformers.__version__}"
    rows = [
        shape.compared(
            "group workload tok/s vs transformers generate", "tok/s", groups, peer=peer, goal=3.0
        ),
        shape.compared("prefill ratio", "tok/s", prefill, peer=f"{peer} forward", goal=0.9),
        shape.not_measured(
            "group workload tok/s vs transformers generate_batch",
            "tok/s",
            "the peer's continuous batching is not yet part of this script",
        ),
        shape.not_measured(
            "single stream tok/s vs llama.cpp", "tok/s", "no llama.cpp build on this machine"
        ),
    ]
    if options.quick:
        for row in rows:
            print(row)
    else:
        facts = {
            "model": options.model,
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "groups": len(load_.prompts),
            "samples": load_.samples,
            "prompt_tokens": [len(prompt) for prompt in load_.prompts],
            "sampled_tokens_each": load_.new_tokens,
            "prefill_tokens": tokens,
            "engine": settings.model_dump(),
            "peer": f"{peer}, torch {torch.__version__}, sdpa, one left-padded batch",
            "repeats": options.repeats,
        }
        print(shape.write("engine", rows, facts, [SEED]))
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
