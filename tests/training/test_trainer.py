"""The trainer against slow references: plain forward passes, autograd, torch's own AdamW."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.errors import EtudeError
from etude.models.tiny import make_tiny
from etude.records import PolicyVersion
from etude.training.batch import Batch, Sequence
from etude.training.forest import grow, pack
from etude.training.forward import RowModel
from etude.training.head import edges_of
from etude.training.losses import denominators, stream_losses, token_streams
from etude.training.settings import TrainerSettings
from etude.training.trainer import Trainer

VOCAB = 512
KINDS = ["dense", "moe"]
SLOW_OK = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return {kind: make_tiny(root / kind, kind, seed=3, vocab=VOCAB) for kind in KINDS}


def fp32(**changes: object) -> TrainerSettings:
    return TrainerSettings.model_validate({"dtype": "float32", **changes})


def random_sequence(rng: np.random.Generator, ids: np.ndarray, temperature: float) -> Sequence:
    """All three streams at random, sampler log-probs partly unknown."""
    n = len(ids)

    def weights() -> np.ndarray:
        values = np.where(rng.random(n) < 0.6, rng.normal(size=n), 0).astype(np.float32)
        values[0] = 0
        return values

    sampler = np.where(rng.random(n) < 0.7, -6 + rng.normal(size=n), np.nan).astype(np.float32)
    teacher = (-6 + rng.normal(size=n)).astype(np.float32)
    return Sequence(
        ids.astype(np.int32),
        weights(),
        np.abs(weights()),
        np.abs(weights()),
        sampler,
        teacher,
        temperature,
    )


def random_batch(seed: int) -> Batch:
    """Groups that share prompts and beginnings of answers, and duplicates of whole sequences."""
    rng = np.random.default_rng(seed)
    sequences: list[Sequence] = []
    for _ in range(int(rng.integers(1, 4))):
        ids = rng.integers(0, VOCAB, int(rng.integers(1, 9)))
        for _ in range(int(rng.integers(1, 4))):
            keep = int(rng.integers(1, len(ids) + 1))
            ids = np.concatenate([ids[:keep], rng.integers(0, VOCAB, int(rng.integers(0, 9)))])
            sequences.append(random_sequence(rng, ids, float(rng.choice([1.0, 0.7]))))
    return Batch(tuple(sequences), policy_denominator=float(rng.integers(1, 50)))


def plain_logprobs(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    """The slow reference: one forward pass of one sequence, full-vocabulary log-softmax."""
    ids = torch.from_numpy(sequence.ids).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits / sequence.temperature, -1)
    return logp[torch.arange(ids.shape[1] - 1), ids[0, 1:]]


def reference_gradients(
    model: torch.nn.Module, batch: Batch, cap: float | None
) -> dict[str, torch.Tensor]:
    """Autograd through plain passes of every sequence on its own."""
    model.zero_grad()
    divisors = denominators(batch)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in batch.sequences:
        logp = plain_logprobs(model, sequence)
        streams = token_streams([sequence]).select(torch.arange(1, len(sequence.ids)))
        total = total + stream_losses(logp, streams, divisors, cap).total
    total.backward()
    return {
        name: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        for name, p in model.named_parameters()
    }


def error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, against the norm of the whole gradient."""
    scale = torch.stack([g.double().norm() for g in reference.values()]).norm().clamp(min=1e-12)
    return float(max((ours[n].double() - g.double()).norm() / scale for n, g in reference.items()))


def rows_gradients(
    model: torch.nn.Module, batch: Batch, row_nodes: int, head_rows: int
) -> dict[str, torch.Tensor]:
    """The trainer's inner loop on a model of any dtype, here float64."""
    forward = RowModel(model, head_rows)  # pyright: ignore
    streams, divisors = token_streams(batch.sequences), denominators(batch)
    wanted = [
        (s.policy != 0) | (s.cross_entropy != 0) | (s.distillation != 0) for s in batch.sequences
    ]
    model.zero_grad()
    head_grad = torch.zeros_like(forward.head_weight)
    rows = grow(
        [s.ids for s in batch.sequences],
        wanted,
        [s.temperature for s in batch.sequences],
        row_nodes=row_nodes,
        attention_cost=forward.attention_cost,
    )
    for group in pack(rows, row_nodes=row_nodes, overhead=8):
        edges = edges_of(group)
        mine = streams.select(edges.places)

        def objective(logp: torch.Tensor, run: slice) -> torch.Tensor:
            leaf = logp.detach().requires_grad_()
            with torch.enable_grad():
                part = mine.select(torch.arange(run.start, run.stop))  # noqa: B023
                loss = stream_losses(leaf, part, divisors, 2.0).total
            return torch.autograd.grad(loss, leaf)[0]

        forward.backward(group, edges, objective, head_grad)
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        if p is forward.head_weight:
            grads[name] += head_grad
    return grads


@pytest.fixture(scope="module")
def doubles(folders: dict[str, Path]) -> dict[str, torch.nn.Module]:
    # Only the eager experts know float64.
    return {
        kind: AutoModelForCausalLM.from_pretrained(
            folders[kind],
            dtype=torch.float64,
            attn_implementation="sdpa",
            experts_implementation="eager",
        ).eval()
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW_OK)
@given(
    seed=st.integers(0, 10**6),
    row_nodes=st.integers(4, 80),
    head_rows=st.sampled_from([1, 5, 64]),
)
def test_gradient_equals_float64_reference_however_it_is_cut(
    doubles: dict[str, torch.nn.Module], kind: str, seed: int, row_nodes: int, head_rows: int
) -> None:
    batch = random_batch(seed)
    model = doubles[kind]
    reference = reference_gradients(model, batch, 2.0)
    assert error(rows_gradients(model, batch, row_nodes, head_rows), reference) < 1e-6


@pytest.fixture(scope="module")
def trainers(folders: dict[str, Path]) -> dict[str, Trainer]:
    return {kind: Trainer(folders[kind], fp32(row_nodes=24)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW_OK)
@given(seed=st.integers(0, 10**6))
def test_float32_trainer_equals_plain_passes(
    trainers: dict[str, Trainer], kind: str, seed: int
) -> None:
    trainer, batch = trainers[kind], random_batch(seed)
    model = copy.deepcopy(trainer.forward.model).train(False)
    with torch.no_grad():
        expected = [plain_logprobs(model, s).numpy() for s in batch.sequences]
    for ours, theirs in zip(trainer.logprobs(batch.sequences), expected, strict=True):
        assert np.isnan(ours[0])
        np.testing.assert_allclose(ours[1:], theirs, rtol=1e-5)
    for p in model.parameters():
        p._post_accumulate_grad_hooks = None
    reference = reference_gradients(model, batch, 2.0)
    trainer.clear()
    trainer.accumulate(batch)
    assert error(trainer.gradients(), reference) < 2e-5
    trainer.clear()


def group(advantages: list[float], seed: int = 0) -> Batch:
    """One prompt, one answer for each advantage, as a rollout batch has them."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 12)
    sequences = []
    for advantage in advantages:
        answer = rng.integers(0, VOCAB, 8)
        n = 20
        sampled = np.arange(n) >= 12
        zero, unknown = np.zeros(n, np.float32), np.full(n, np.nan, np.float32)
        sequences.append(
            Sequence(
                np.concatenate([prompt, answer]).astype(np.int32),
                np.where(sampled, advantage, 0).astype(np.float32),
                zero,
                zero,
                np.where(sampled, -6.0, np.nan).astype(np.float32),
                unknown,
            )
        )
    return Batch(tuple(sequences), policy_denominator=32.0)


def cross_entropy(seed: int, n: int = 24, count: int = 3) -> Batch:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        unknown, zero = np.full(n, np.nan, np.float32), np.zeros(n, np.float32)
        weights = np.ones(n, np.float32)
        weights[0] = 0
        ids = rng.integers(0, VOCAB, n).astype(np.int32)
        sequences.append(Sequence(ids, zero, weights, zero, unknown, unknown))
    return Batch(tuple(sequences))


def test_a_group_of_equal_rewards_changes_nothing(folders: dict[str, Path]) -> None:
    trainer = Trainer(folders["dense"], fp32())
    before = trainer.update(PolicyVersion(0, 0)).tensors
    metrics = trainer.step(group([0.0] * 4), lr=1.0)
    assert (metrics.passes, metrics.grad_norm, trainer.steps) == (0, 0.0, 0)
    after = trainer.update(PolicyVersion(0, 1)).tensors
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_metrics_of_a_policy_step(folders: dict[str, Path]) -> None:
    trainer = Trainer(folders["dense"], fp32())
    batch = group([0.75, -0.25, 0.0, -0.5])
    logprobs = np.concatenate([lp[12:] for lp in trainer.logprobs(batch.sequences)])
    used = np.repeat([True, True, False, True], 8)
    gaps = np.abs(logprobs + 6)[used]
    metrics = trainer.step(batch, lr=1e-3)
    assert metrics.log_omega_mean == pytest.approx(gaps.mean(), rel=1e-4)
    assert metrics.log_omega_max == pytest.approx(gaps.max(), rel=1e-4)
    assert metrics.log_omega_p99 == pytest.approx(np.quantile(gaps, 0.99), rel=1e-4)
    assert metrics.entropy == pytest.approx(np.log(VOCAB), rel=0.1)  # nearly uniform
    assert (metrics.policy_tokens, metrics.tokens, metrics.nodes) == (24, 80, 12 + 3 * 7)
    advantages = np.repeat([0.75, -0.25, 0.0, -0.5], 8)
    omega = np.minimum(np.exp(logprobs + 6), 2)
    assert metrics.loss == pytest.approx(-(advantages * omega * logprobs).sum() / 32, rel=1e-4)


def test_masters_follow_torch_adamw(folders: dict[str, Path]) -> None:
    settings = fp32(weight_decay=0.1, max_grad_norm=0.5)
    trainer = Trainer(folders["dense"], settings)
    model = AutoModelForCausalLM.from_pretrained(folders["dense"], dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.eps,
        foreach=False,
    )
    for step in range(5):
        batch, lr = cross_entropy(step), 1e-3 * (step + 1)
        trainer.step(batch, lr)
        reference_gradients(model, batch, None)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for g in optimizer.param_groups:
            g["lr"] = lr
        optimizer.step()
    theirs = dict(model.named_parameters())
    for name, ours in trainer.update(PolicyVersion(0, 5)).tensors.items():
        torch.testing.assert_close(ours, theirs[name].detach(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_and_continuing_is_bitwise_the_same(
    folders: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    settings = TrainerSettings.model_validate({"dtype": dtype})
    straight = Trainer(folders["dense"], settings)
    for step in range(2):
        straight.step(cross_entropy(step), lr=1e-3)
    straight.save(tmp_path / "state")
    straight.step(cross_entropy(2), lr=1e-3)
    resumed = Trainer(folders["dense"], settings)
    resumed.step(cross_entropy(9), lr=1e-2)  # must leave no trace
    resumed.load(tmp_path / "state")
    assert resumed.steps == 2
    resumed.step(cross_entropy(2), lr=1e-3)
    ours, theirs = (t.update(PolicyVersion(0, 3)).tensors for t in (resumed, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    straight.save(tmp_path / "state", sync=True)  # overwrites in one rename
    resumed.save(tmp_path / "other")
    name = "trainer.safetensors"
    assert (tmp_path / "state" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    state = load_file(tmp_path / "state" / name)
    assert len(state) == 3 * len(theirs)
    for key, tensor in straight.update(PolicyVersion(0, 3)).tensors.items():
        assert torch.equal(state[f"master/{key}"].to(tensor.dtype), tensor)
    assert [p.name for p in (tmp_path / "state").iterdir()] == [name]


def test_small_steps_reach_the_masters_below_bfloat16_resolution(folders: dict[str, Path]) -> None:
    trainer = Trainer(folders["dense"], TrainerSettings(dtype="bfloat16"))
    losses = [trainer.step(cross_entropy(0), lr=2e-5).loss for _ in range(40)]
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_thirty_steps_overfit_a_batch(folders: dict[str, Path], kind: str) -> None:
    trainer = Trainer(folders[kind], TrainerSettings(dtype="bfloat16"))
    losses = [trainer.step(cross_entropy(0, count=2), lr=1e-2).loss for _ in range(30)]
    assert losses[0] > 5.5
    assert losses[-1] < 0.2


def test_policy_gradient_raises_what_was_rewarded(folders: dict[str, Path]) -> None:
    trainer = Trainer(folders["dense"], fp32(importance_cap=None))
    batch = group([1.0, -1.0])
    before = [np.nansum(lp[12:]) for lp in trainer.logprobs(batch.sequences)]
    trainer.step(batch, lr=1e-3)
    after = [np.nansum(lp[12:]) for lp in trainer.logprobs(batch.sequences)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_a_bad_step_is_refused_and_leaves_the_weights(folders: dict[str, Path]) -> None:
    trainer = Trainer(folders["dense"], fp32())
    trainer.step(cross_entropy(0), lr=1e-3)
    before = trainer.update(PolicyVersion(0, 0)).tensors
    bad = cross_entropy(1)
    bad.sequences[0].cross_entropy[3] = np.inf
    with pytest.raises(EtudeError, match="step 2 gave a loss of inf"):
        trainer.step(bad, lr=1e-3)
    after = trainer.update(PolicyVersion(0, 0)).tensors
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(g.any() for g in trainer.gradients().values())
    assert np.isfinite(trainer.step(cross_entropy(1), lr=1e-3).loss)
    assert trainer.steps == 2


def test_an_update_is_not_touched_by_later_steps(folders: dict[str, Path]) -> None:
    trainer = Trainer(folders["dense"], fp32())
    update = trainer.update(PolicyVersion(1, 7))
    kept = {name: t.clone() for name, t in update.tensors.items()}
    trainer.step(cross_entropy(0), lr=1e-2)
    assert update.version == PolicyVersion(1, 7)
    assert all(torch.equal(kept[name], t) for name, t in update.tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_export_is_a_normal_model_folder(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    trainer = Trainer(folders[kind], TrainerSettings(dtype="bfloat16"))
    trainer.step(cross_entropy(0), lr=1e-2)
    for _ in range(2):  # the second replaces the first
        trainer.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    ours = trainer.update(PolicyVersion(0, 1)).tensors
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].detach()) for name in ours)
    text = "def f(x):\n    return x + 10"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(folders[kind])(text).input_ids
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_bad_folders_and_states_get_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="no Hugging Face model folder"):
        Trainer(tmp_path, fp32())
    trainer = Trainer(folders["dense"], fp32())
    with pytest.raises(EtudeError, match="cannot read the trainer's state"):
        trainer.load(tmp_path)
    Trainer(folders["moe"], fp32()).save(tmp_path / "moe")
    with pytest.raises(EtudeError, match="another model"):
        trainer.load(tmp_path / "moe")
    state = tmp_path / "moe" / "trainer.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(EtudeError, match="cannot read the trainer's state"):
        trainer.load(tmp_path / "moe")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EtudeError, match="cannot save the trainer's state"):
        trainer.save(tmp_path / "file")
