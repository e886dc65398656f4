"""The embedded engine against the plain model: same numbers, whatever runs beside."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import EtudeError
from etude.inference.engine import EngineError, TorchEngine
from etude.inference.protocol import Completion, Finish, Sampling
from etude.inference.settings import EngineSettings
from etude.models.loading import load
from etude.models.tiny import Kind, make_tiny
from etude.records import PolicyVersion
from etude.weights.update import Update

SETTINGS = EngineSettings(
    dtype="float32", threads=1, max_batch=8, retained_slots=2, max_context=157, prefill_chunk=16
)
Use = Callable[[TorchEngine], Awaitable[None]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("moe"), "moe")


@pytest.fixture(params=["dense", "moe"])
def folder(request: pytest.FixtureRequest) -> Path:
    kind: Kind = request.param
    return request.getfixturevalue(kind)


def with_engine(folder: Path, use: Use, settings: EngineSettings = SETTINGS) -> TorchEngine:
    """Run `use` on a fresh engine, within a minute, and close it."""

    async def scenario() -> TorchEngine:
        engine = TorchEngine(folder, settings)
        try:
            await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.close()
        return engine

    return asyncio.run(scenario())


def prompt(seed: int, length: int, head: list[int] | None = None) -> list[int]:
    tail = np.random.default_rng(seed).integers(3, 2000, length).tolist()
    return [*(head or []), *tail]


@functools.cache
def plain(folder: Path) -> torch.nn.Module:
    return load(folder, "float32").model


def reference(folder: Path, ids: list[int], done: Completion, temperature: float) -> np.ndarray:
    """Log-probs of the completion by one plain forward pass of an untouched model."""
    with torch.inference_mode():
        logits = plain(folder)(torch.tensor([ids + done.ids.tolist()])).logits[0, len(ids) - 1 : -1]
    scores = (logits / (temperature or 1.0)).log_softmax(-1)
    return scores.gather(1, torch.tensor(done.ids, dtype=torch.long)[:, None])[:, 0].numpy()


def test_logprobs_are_the_plain_model_s(folder: Path) -> None:
    """Groups of several prompts with a common head, prompts shorter and longer than a chunk,
    several temperatures, more requests than slots."""
    head = prompt(0, 20)
    prompts = [prompt(n, n, head) for n in (1, 5, 16, 50)] + [[7], prompt(9, 40)]
    cases = [
        (ids, Sampling(temperature, max_tokens=12 + k, seed=k))
        for ids in prompts
        for k, temperature in enumerate((1.0, 0.7, 0.0))
    ]

    async def use(engine: TorchEngine) -> None:
        done = await asyncio.gather(*(engine.generate(*case) for case in cases))
        for (ids, sampling), completion in zip(cases, done, strict=True):
            assert len(completion.ids) == sampling.max_tokens
            assert completion.finish is Finish.LENGTH
            assert completion.prompt_tokens == len(ids)
            exact = reference(folder, ids, completion, sampling.temperature)
            assert np.abs(exact - completion.logprobs).max() < 1e-4
        assert any(completion.cached_tokens for completion in done)

    with_engine(folder, use)


def test_a_result_does_not_depend_on_the_crowd(folder: Path) -> None:
    ids = prompt(1, 30)
    sampling = Sampling(max_tokens=30, seed=5)

    async def use(engine: TorchEngine) -> None:
        alone = await engine.generate(ids, sampling)
        crowd = [engine.generate(prompt(n, 3 * n), Sampling(seed=n)) for n in range(2, 9)]
        others = [asyncio.ensure_future(one) for one in crowd]
        await asyncio.sleep(0.01)
        beside = await engine.generate(ids, sampling)
        for task in others:
            task.cancel()
        assert beside.ids.tolist() == alone.ids.tolist()
        assert np.abs(beside.logprobs - alone.logprobs).max() < 1e-5
        other = await engine.generate(ids, Sampling(max_tokens=30, seed=6))
        assert other.ids.tolist() != alone.ids.tolist()

    with_engine(folder, use)


def test_groups_attend_to_their_prompt_together(folder: Path) -> None:
    """Groups whose prompts are long enough that the prompt is read once per step for all their
    rows, among requests that share nothing, while members end at different times."""
    prompts = [prompt(1, 70), prompt(2, 90), prompt(3, 6)]
    cases = [(ids, Sampling(max_tokens=6 + 9 * k, seed=k)) for ids in prompts for k in range(4)]

    async def use(engine: TorchEngine) -> None:
        done = await asyncio.gather(*(engine.generate(*case) for case in cases))
        for (ids, _), completion in zip(cases, done, strict=True):
            error = np.abs(reference(folder, ids, completion, 1.0) - completion.logprobs)
            assert error.max() < 1e-4

    with_engine(folder, use, SETTINGS.model_copy(update={"max_batch": 12}))


def test_greedy_is_the_plain_model_s_argmax(dense: Path) -> None:
    ids = prompt(3, 25)
    model = load(dense, "float32").model
    expected = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )[0, len(ids) :].tolist()

    async def use(engine: TorchEngine) -> None:
        done = await engine.generate(ids, Sampling(temperature=0, max_tokens=20))
        assert done.ids.tolist() == expected

    with_engine(dense, use)


def test_a_shared_prompt_is_read_once(dense: Path) -> None:
    """Tokens through the model: the whole first prompt, one token for each sibling, only the
    tail for another prompt with the same head, and one for each further sampled token."""
    head = prompt(0, 48)
    first, second = prompt(1, 50, head), prompt(2, 20, head)

    async def use(engine: TorchEngine) -> None:
        group = [engine.generate(first, Sampling(max_tokens=4, seed=n)) for n in range(8)]
        done = await asyncio.gather(*group)
        assert sorted(c.cached_tokens for c in done) == [0] + [len(first) - 1] * 7
        assert engine.counters.tokens_fed == len(first) + 7 + 8 * 3
        later = await engine.generate(second, Sampling(max_tokens=1))
        assert later.cached_tokens == len(head)
        assert engine.counters.tokens_fed == len(first) + 7 + 8 * 3 + 20

    with_engine(dense, use)


def test_groups_with_a_common_head_read_it_once(dense: Path) -> None:
    head = prompt(0, 64)
    prompts = [prompt(n, 10, head) for n in range(1, 4)]

    async def use(engine: TorchEngine) -> None:
        jobs = [engine.generate(p, Sampling(max_tokens=1)) for p in prompts for _ in range(2)]
        done = await asyncio.gather(*jobs)
        assert sum(c.cached_tokens == 0 for c in done) == 1
        assert engine.counters.tokens_fed == 64 + 3 * 10 + 3

    with_engine(dense, use)


def test_the_next_turn_finds_its_session(dense: Path) -> None:
    first = prompt(1, 40)

    async def use(engine: TorchEngine) -> None:
        done = await engine.generate(first, Sampling(max_tokens=10))
        await engine.generate(prompt(2, 30), Sampling(max_tokens=2))
        turn = [*first, *done.ids.tolist(), *prompt(3, 5)]
        following = await engine.generate(turn, Sampling(max_tokens=3))
        assert following.cached_tokens == len(first) + 9
        exact = reference(dense, turn, following, 1.0)
        assert np.abs(exact - following.logprobs).max() < 1e-4

    with_engine(dense, use)


def changed_weights(folder: Path) -> dict[str, torch.Tensor]:
    model = load(folder, "float32").model
    generator = torch.manual_seed(7)
    return {
        name: p + 0.02 * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_weights_change_in_flight(folder: Path, tmp_path: Path, on_update: str) -> None:
    """Every token carries the version that sampled it and that version's log-prob. Recomputing
    is exact; keeping old keys and values is exact for what was sampled before."""
    ids = prompt(1, 40)
    new = changed_weights(folder)
    changed = load(folder, "float32")
    with torch.no_grad():
        for name, parameter in changed.model.named_parameters():
            parameter.copy_(new[name])
    changed.model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = SETTINGS.model_copy(update={"on_update": on_update})

    async def use(engine: TorchEngine) -> None:
        seen: asyncio.Queue[int] = asyncio.Queue()
        job = asyncio.ensure_future(
            engine.generate(ids, Sampling(max_tokens=60, seed=2), seen.put_nowait)
        )
        for _ in range(5):
            await seen.get()
        await engine.pause()
        steps = engine.counters.steps
        await asyncio.sleep(0.05)
        assert engine.counters.steps == steps
        await engine.apply(Update(PolicyVersion(0, 3), new))
        assert engine.version == PolicyVersion(0, 3)
        await engine.resume()
        done = await job
        before = done.policy_versions == PolicyVersion(0, 0).encode()
        after = done.policy_versions == PolicyVersion(0, 3).encode()
        count = int(before.sum())
        assert count >= 5
        assert before[:count].all()
        assert after[count:].all()
        assert after.any()
        error_before = np.abs(reference(folder, ids, done, 1.0) - done.logprobs)
        error_after = np.abs(reference(tmp_path, ids, done, 1.0) - done.logprobs)
        assert error_before[:count].max() < 1e-4
        assert error_before[count:].max() > 1e-2
        if on_update == "recompute":
            assert error_after[count:].max() < 1e-4
        # Nothing that the old weights computed serves a new request.
        fresh = await engine.generate(ids, Sampling(max_tokens=5))
        assert fresh.cached_tokens in ({0} if on_update == "keep" else {len(ids) - 1})
        assert np.abs(reference(tmp_path, ids, fresh, 1.0) - fresh.logprobs).max() < 1e-4

    with_engine(folder, use, settings)


def test_a_wrong_update_changes_nothing(dense: Path) -> None:
    new = changed_weights(dense)
    name = next(iter(new))

    async def use(engine: TorchEngine) -> None:
        before = await engine.generate(prompt(1, 9), Sampling(max_tokens=5))
        for bad in ({**new, "nonsense": torch.zeros(1)}, {**new, name: torch.zeros(1)}):
            with pytest.raises(ValueError, match="the update"):
                await engine.apply(Update(PolicyVersion(0, 1), bad))
        after = await engine.generate(prompt(1, 9), Sampling(max_tokens=5))
        assert engine.version == PolicyVersion(0, 0)
        assert after.logprobs.tolist() == pytest.approx(before.logprobs.tolist(), abs=1e-5)

    with_engine(dense, use)


def test_cancelling_frees_the_slot(dense: Path) -> None:
    settings = SETTINGS.model_copy(update={"max_batch": 1, "retained_slots": 0})

    async def use(engine: TorchEngine) -> None:
        seen: asyncio.Queue[int] = asyncio.Queue()
        first = asyncio.ensure_future(
            engine.generate(prompt(1, 9), Sampling(max_tokens=150), seen.put_nowait)
        )
        queued = asyncio.ensure_future(engine.generate(prompt(2, 9), Sampling(max_tokens=150)))
        await seen.get()
        queued.cancel()
        first.cancel()
        for task in (first, queued):
            with pytest.raises(asyncio.CancelledError):
                await task
        done = await engine.generate(prompt(3, 9), Sampling(max_tokens=5))
        assert len(done.ids) == 5
        assert engine.counters.tokens_sampled < 150

    with_engine(dense, use, settings)


def test_stop_ids_and_a_full_context(dense: Path) -> None:
    async def use(engine: TorchEngine) -> None:
        ids = prompt(1, 150)
        full = await engine.generate(ids, Sampling(max_tokens=999, seed=1))
        assert (full.finish, len(full.ids)) == (Finish.CONTEXT, 7)
        stop = int(full.ids[4])
        place = full.ids.tolist().index(stop) + 1
        cut = await engine.generate(ids, Sampling(max_tokens=999, seed=1, stop_ids=(stop,)))
        assert (cut.finish, cut.ids.tolist()) == (Finish.STOP, full.ids[:place].tolist())
        exact = await engine.generate(ids, Sampling(max_tokens=7, seed=1))
        assert exact.finish is Finish.LENGTH

    with_engine(dense, use)


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], Sampling(), "empty"),
        ([5] * 157, Sampling(), "no room"),
        ([5, 4000], Sampling(), "vocabulary"),
        ([5, -1], Sampling(), "vocabulary"),
        ([5], Sampling(max_tokens=0), "max_tokens"),
        ([5], Sampling(temperature=-1.0), "temperature"),
    ],
)
def test_what_cannot_be_is_refused(
    dense: Path, ids: list[int], sampling: Sampling, message: str
) -> None:
    async def use(engine: TorchEngine) -> None:
        with pytest.raises(ValueError, match=message):
            await engine.generate(ids, sampling)

    with_engine(dense, use)


def test_experts_are_those_of_the_plain_model(moe: Path) -> None:
    """Recorded through sharing, chunks and decoding; the last token was never fed."""
    ids = prompt(1, 40)
    chosen: list[torch.Tensor] = []

    async def use(engine: TorchEngine) -> None:
        jobs = [engine.generate(ids, Sampling(max_tokens=9, seed=n)) for n in range(3)]
        for done in await asyncio.gather(*jobs):
            model = load(moe, "float32").model
            for name, module in model.named_modules():
                if name.endswith("mlp.gate"):
                    module.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
            chosen.clear()
            with torch.inference_mode():
                model(torch.tensor([ids + done.ids.tolist()]))
            expected = torch.stack(chosen, dim=1).numpy()
            assert done.experts is not None
            assert done.experts.shape == expected.shape == (49, 4, 2)
            assert np.array_equal(done.experts[:-1], expected[:-1])
            assert (done.experts[-1] == 65535).all()

    with_engine(moe, use)


def test_a_dead_worker_fails_everyone_at_once(dense: Path) -> None:
    """The failure is real: a weight is replaced by one of a wrong shape behind our back."""

    async def use(engine: TorchEngine) -> None:
        seen: asyncio.Queue[int] = asyncio.Queue()
        sampling = Sampling(max_tokens=150)
        jobs = [
            asyncio.ensure_future(engine.generate(prompt(n, 9), sampling, seen.put_nowait))
            for n in range(12)
        ]
        await seen.get()
        model = engine._model.model
        model.get_output_embeddings().weight = torch.nn.Parameter(torch.zeros(3, 5))
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        for call in (engine.generate([5], Sampling()), engine.pause()):
            with pytest.raises(EngineError, match="stopped"):
                await call

    with_engine(dense, use)


def test_a_standstill_has_a_deadline(dense: Path) -> None:
    settings = SETTINGS.model_copy(update={"stall_timeout_s": 0.5})

    async def use(engine: TorchEngine) -> None:
        await engine.pause()
        with pytest.raises(EngineError, match="no progress"):
            await engine.generate([5], Sampling())
        await engine.resume()
        assert len((await engine.generate([5], Sampling(max_tokens=3))).ids) == 3

    with_engine(dense, use, settings)


def test_closing_fails_what_is_pending(dense: Path) -> None:
    async def scenario() -> None:
        engine = TorchEngine(dense, SETTINGS)
        job = asyncio.ensure_future(engine.generate([5], Sampling(max_tokens=150)))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await job

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_error_of_the_callback_reaches_its_caller_only(dense: Path) -> None:
    def fail(_token: int) -> None:
        raise KeyError("mine")

    async def use(engine: TorchEngine) -> None:
        other = asyncio.ensure_future(engine.generate(prompt(2, 9), Sampling(max_tokens=20)))
        with pytest.raises(KeyError, match="mine"):
            await engine.generate(prompt(1, 9), Sampling(max_tokens=150), fail)
        assert len((await other).ids) == 20

    with_engine(dense, use)


def test_logits_that_are_no_numbers_fail_the_request_not_the_engine(dense: Path) -> None:
    good = dict(load(dense, "float32").model.named_parameters())
    bad = {name: torch.full_like(p, torch.nan) for name, p in good.items()}

    async def use(engine: TorchEngine) -> None:
        await engine.apply(Update(PolicyVersion(0, 1), bad))
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(prompt(1, 9), Sampling(max_tokens=5))
        await engine.apply(Update(PolicyVersion(0, 2), good))
        done = await engine.generate(prompt(2, 9), Sampling(max_tokens=5))
        assert np.isfinite(done.logprobs).all()

    with_engine(dense, use)


def test_a_model_that_the_engine_cannot_run_is_told(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    folder = make_tiny(tmp_path / "m")
    config = MistralConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(EtudeError, match="cannot run model type mistral: a sliding window of 32"):
        TorchEngine(folder, SETTINGS)
