import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from etude.inference.protocol import Finish, Sampling
from etude.inference.scripted import ScriptedEngine
from etude.records import PolicyVersion
from etude.weights.update import Update


def seeded(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    return [prompt[-1], sampling.seed, 9, 5]


def test_says_what_the_script_says() -> None:
    engine = ScriptedEngine(seeded, version=PolicyVersion(1, 4))
    seen: list[int] = []
    sampling = Sampling(seed=3, stop_ids=(9,))
    completion = asyncio.run(engine.generate([7, 8], sampling, seen.append))
    assert completion.ids.tolist() == seen == [8, 3, 9]
    assert completion.finish is Finish.STOP
    assert completion.logprobs.tolist() == [0.0] * 3
    assert np.all(completion.policy_versions == PolicyVersion(1, 4).encode())


@pytest.mark.parametrize(
    ("max_tokens", "context", "ids", "finish"),
    [
        (2, 100, [8, 3], Finish.LENGTH),
        (100, 5, [8, 3, 9], Finish.CONTEXT),
        (100, 100, [8, 3, 9, 5], Finish.LENGTH),
    ],
)
def test_is_cut_where_a_model_would_be(
    max_tokens: int, context: int, ids: list[int], finish: Finish
) -> None:
    engine = ScriptedEngine(seeded, context_length=context)
    completion = asyncio.run(engine.generate([7, 8], Sampling(seed=3, max_tokens=max_tokens)))
    assert (completion.ids.tolist(), completion.finish) == (ids, finish)


def test_refuses_what_a_model_would_refuse() -> None:
    engine = ScriptedEngine(seeded, context_length=2)
    with pytest.raises(ValueError, match="empty"):
        asyncio.run(engine.generate([], Sampling()))
    with pytest.raises(ValueError, match="no room"):
        asyncio.run(engine.generate([7, 8], Sampling()))


def test_can_be_paused_updated_and_cancelled() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(lambda _p, _s: list(range(1000)), seconds_per_token=0.001)
        seen: asyncio.Queue[int] = asyncio.Queue()
        sampling = Sampling(max_tokens=1000)
        task = asyncio.create_task(engine.generate([1], sampling, seen.put_nowait))
        await seen.get()
        await engine.pause()
        count = seen.qsize()
        await asyncio.sleep(0.05)
        assert seen.qsize() == count
        await engine.apply(Update(PolicyVersion(0, 1), {}))
        await engine.resume()
        for _ in range(count + 3):
            await seen.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.version == PolicyVersion(0, 1)

    asyncio.run(asyncio.wait_for(scenario(), 20))
