"""A session on the real engine: what the ledger says is what the model computed."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import tools_named
from etude.inference.engine import TorchEngine
from etude.inference.protocol import Sampling
from etude.inference.settings import EngineSettings
from etude.models.dialects.hermes import HermesRenderer
from etude.models.tiny import make_tiny
from etude.records import Trajectory
from etude.sandbox.protocol import Image, Sandbox

TEMPERATURE = 0.8


def test_joined_routes_and_logprobs_equal_one_pass_over_the_chain(tmp_path: Path) -> None:
    """Three chat turns on a tiny mixture of experts, against one fresh engine that reads the
    whole chain at once."""
    folder = make_tiny(tmp_path / "moe", kind="moe")
    settings = EngineSettings(dtype="float32", threads=1, max_batch=2)

    async def go() -> tuple[Trajectory, np.ndarray]:
        engine = TorchEngine(folder, settings)
        session = Session(
            TokenPolicy(engine, HermesRenderer.from_folder(folder)),
            fail,
            tools_named(["finish"]),
            SessionSettings(max_turn_tokens=12, temperature=TEMPERATURE, seed=3),
            session_id="s",
        )
        for text in ("One.", "Two.", "Three."):
            await session.prompt(text)
        trajectory = await session.trajectory()
        await engine.close()
        (segment,) = trajectory.segments
        ids = [*segment.prompt_ids.tolist(), *segment.completion_ids.tolist()]
        fresh = TorchEngine(folder, settings)
        once = await fresh.generate(ids, Sampling(max_tokens=1))
        await fresh.close()
        assert once.experts is not None
        return trajectory, once.experts

    async def fail() -> None:
        raise AssertionError("no tool is ever called")

    trajectory, experts = asyncio.run(go())
    (segment,) = trajectory.segments
    assert len(segment.turns) == 3
    assert segment.temperature == TEMPERATURE
    assert segment.experts is not None
    assert (segment.experts[-1] == 65535).all()
    np.testing.assert_array_equal(segment.experts[:-1], experts[: len(segment.experts) - 1])
    assert trajectory.usage.cached_tokens > 0
    ids = np.concatenate([segment.prompt_ids, segment.completion_ids])
    expected = plain_logprobs(folder, ids)[len(segment.prompt_ids) - 1 :]
    np.testing.assert_allclose(
        segment.logprobs[segment.mask], expected[segment.mask], atol=1e-4, rtol=0
    )


def plain_logprobs(folder: Path, ids: np.ndarray) -> np.ndarray:
    """log-softmax(logits / T) of each next token, by a plain transformers forward."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1].float() / TEMPERATURE
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])
    return chosen[:, 0].numpy()


@pytest.mark.slow
def test_the_real_model_works_in_a_real_workspace(
    sandbox: Sandbox, image: Callable[[Mapping[str, bytes]], Image]
) -> None:
    """Not whether it is any good: whether its turns are recorded, run and replayed."""
    from etude.models.pull import model_folder

    folder = model_folder("smollm2-135m")
    source = image({"calc.py": b"def double(x):\n    return GAP\n"})

    async def go() -> list[Trajectory]:
        engine = TorchEngine(folder, EngineSettings(max_batch=8, max_context=1024))
        renderer = HermesRenderer.from_folder(folder)

        async def rollout(seed: int) -> Trajectory:
            session = Session(
                TokenPolicy(engine, renderer),
                lambda: sandbox.create(source),
                tools_named(["read", "edit", "finish"]),
                SessionSettings(max_turns=3, max_turn_tokens=64, seed=seed),
                session_id=str(seed),
            )
            return await session.run(
                "calc.py: an expression is missing, marked GAP. Put it back.\n\n"
                "1: def double(x):\n2:     return GAP\n"
            )

        done = await asyncio.gather(*(rollout(seed) for seed in range(8)))
        await engine.close()
        return list(done)

    for trajectory in asyncio.run(go()):
        (segment,) = trajectory.segments
        usage = trajectory.usage
        assert segment.sampled == (
            usage.thinking_tokens + usage.tool_call_tokens + usage.final_message_tokens
        )
        assert len(segment.turns) == usage.turns <= 3
        assert np.isfinite(segment.logprobs[segment.mask]).all()
