"""From rollouts, transcripts and repositories to sequences."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.models.tiny import make_tiny, train_tokenizer
from etude.models.tokenizer import ByteTokenizer
from etude.records import Outcome, PolicyVersion, Segment, StopReason, Trajectory, Turn, Usage
from etude.training.batch import Batch
from etude.training.policy import policy_sequences
from etude.training.pretrain import (
    Document,
    WindowStream,
    documents,
    functions,
    mean_loss,
    windows,
    without,
)
from etude.training.settings import PretrainSettings, TrainerSettings
from etude.training.sft import sft_sequences
from etude.training.trainer import Trainer


def segment(prompt: int, mask: list[int], temperature: float = 1.0) -> Segment:
    sampled = np.array(mask, np.bool_)
    edges = np.flatnonzero(np.diff(np.r_[0, mask, 0]))
    return Segment(
        prompt_ids=np.arange(prompt, dtype=np.int32),
        completion_ids=np.arange(100, 100 + len(mask), dtype=np.int32),
        mask=sampled,
        logprobs=np.where(sampled, -0.5, np.nan).astype(np.float32),
        policy_versions=np.where(sampled, PolicyVersion(0, 1).encode(), -1),
        turns=tuple(Turn(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)),
        temperature=temperature,
    )


def trajectory(*segments: Segment) -> Trajectory:
    return Trajectory("s", "t", segments, (), Usage(), Outcome(StopReason.FINISHED))


CHAIN = trajectory(
    segment(3, [1, 1, 0, 0, 1]), segment(5, [1, 0, 1], 0.7), segment(2, [0, 0, 1, 1])
)


def test_a_chain_has_one_advantage_on_sampled_tokens_and_none_on_others() -> None:
    sequences = policy_sequences(CHAIN, -0.75)
    assert len(sequences) == 3
    for sequence, part in zip(sequences, CHAIN.segments, strict=True):
        prompt = len(part.prompt_ids)
        assert sequence.ids.tolist() == [*part.prompt_ids, *part.completion_ids]
        assert not sequence.policy[:prompt].any()
        assert sequence.policy[prompt:].tolist() == np.where(part.mask, -0.75, 0).tolist()
        np.testing.assert_array_equal(sequence.sampler_logprobs[prompt:], part.logprobs)
        assert np.isnan(sequence.sampler_logprobs[:prompt]).all()
        assert not sequence.cross_entropy.any()
        assert not sequence.distillation.any()
        assert sequence.temperature == part.temperature


def test_token_rewards_reach_sampled_tokens_only() -> None:
    part = segment(2, [1, 0, 1])
    extra = np.array([9, 9, 0.25, 9, -0.25], np.float32)
    (sequence,) = policy_sequences(trajectory(part), 1.0, [extra])
    assert sequence.policy.tolist() == [0, 0, 1.25, 0, 0.75]


def test_sft_weighs_sampled_tokens_alone() -> None:
    empty = segment(4, [0, 0])
    sequences = sft_sequences(trajectory(*CHAIN.segments, empty))
    assert len(sequences) == 3
    for sequence, part in zip(sequences, CHAIN.segments, strict=True):
        expected = [*np.zeros(len(part.prompt_ids)), *part.mask.astype(float)]
        assert sequence.cross_entropy.tolist() == expected
        assert not sequence.policy.any()
        assert sequence.temperature == 1.0
    for make in (sft_sequences, lambda t: policy_sequences(t, 1.0)):
        with pytest.raises(ValueError, match="no token ledger"):
            make(trajectory())


SOURCE = '''"""Module."""
import functools


@functools.cache
@property
def secret(x):
    """\x0cA form feed is no line end."""
    return x + 41


class Box:
    @staticmethod
    def hidden():
        return 42


async def kept():
    return 1
'''


def test_cutting_takes_decorators_and_leaves_valid_python() -> None:
    text = without(SOURCE, [(7, 9), (14, 15)])
    ast.parse(text)
    for gone in ("secret", "functools.cache", "property", "41", "hidden", "staticmethod", "42"):
        assert gone not in text
    assert "class Box:\n    pass\n" in text
    assert "async def kept" in text
    assert without(SOURCE, []) == SOURCE


def test_cutting_a_plain_function_leaves_nothing_in_its_place() -> None:
    text = without("a = 1\ndef f():\n    return 2\nb = 3\n", [(2, 3)])
    assert text == "a = 1\nb = 3\n"


def test_documents_and_held_out_functions_share_no_line(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "a.py").write_text(SOURCE)
    (root / "b.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    cut = {"pkg/a.py": [(7, 9)]}
    training = documents(root, ["pkg/a.py", "b.py"], cut)
    assert [d.path for d in training] == ["pkg/a.py", "b.py"]
    assert "é" in training[1].text
    (heldout,) = functions(root, "pkg/a.py", cut["pkg/a.py"])
    assert heldout.text.startswith("@functools.cache\n")
    assert heldout.text.endswith("return x + 41\n")
    assert not set(filter(str.strip, heldout.text.split("\n"))) & set(training[0].text.split("\n"))
    (root / "bad.py").write_bytes(b"x = '\xff'\n")
    for path in ("bad.py", "missing.py"):
        with pytest.raises(EtudeError, match=f"cannot read {path}"):
            documents(root, [path])


TOKENIZER = ByteTokenizer(train_tokenizer(320))
TEXTS = [
    Document(f"repo{n % 2}", f"f{n}.py", f"def f{n}(x):\n    return x + {n}\n" * (n + 1))
    for n in range(6)
]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 70), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_predicts_every_token_once_and_keeps_repositories_apart(
    window: int, seed: int, epoch: int
) -> None:
    stream = WindowStream(TEXTS, TOKENIZER, PretrainSettings(window=window, seed=seed))
    taken = stream.take(epoch * stream.per_epoch, stream.per_epoch)
    assert all(2 <= len(s.ids) <= window for s in taken)
    predicted = sum(int(s.cross_entropy.sum()) for s in taken)
    ends = 2  # one end-of-text token for each repository
    total = ends + sum(len(TOKENIZER.encode(f"# {d.path}\n{d.text}")) for d in TEXTS)
    assert predicted == total - 2  # nothing predicts the first token of a repository
    for sample in taken:
        text = TOKENIZER.decode(sample.ids.tolist())
        marks = {n for n in range(6) if f"# f{n}.py" in text}
        assert len({n % 2 for n in marks}) <= 1


def test_the_stream_is_a_pure_function_of_its_counter() -> None:
    config = PretrainSettings(window=16, seed=1)
    whole = WindowStream(TEXTS, TOKENIZER, config).take(0, 300)
    assert len(whole) > WindowStream(TEXTS, TOKENIZER, config).per_epoch * 2
    resumed = WindowStream(TEXTS, TOKENIZER, config)
    parts = resumed.take(250, 50), resumed.take(0, 117), resumed.take(117, 133)
    pieces = [*parts[1], *parts[2], *parts[0]]
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(whole, pieces, strict=True))


def test_markers_in_a_file_stay_text() -> None:
    stream = WindowStream(
        [Document("r", "a.py", "x = '<|endoftext|>'\n")], TOKENIZER, PretrainSettings()
    )
    (only,) = stream.take(0, 1)
    marker = TOKENIZER.special("<|endoftext|>")
    assert np.flatnonzero(only.ids == marker).tolist() == [len(only.ids) - 1]


def test_pretraining_lowers_the_loss_on_the_text(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "m", vocab=320)
    sequences = windows(TEXTS, model, PretrainSettings(window=64))
    trainer = Trainer(model, TrainerSettings(dtype="float32"))
    before = mean_loss(trainer, sequences)
    metrics = trainer.step(Batch(tuple(sequences)), lr=3e-3)
    assert metrics.cross_entropy == pytest.approx(before, rel=1e-5)
    for _ in range(10):
        trainer.step(Batch(tuple(sequences)), lr=3e-3)
    assert mean_loss(trainer, sequences) < before - 1
    assert windows([], model, PretrainSettings()) == []
    assert np.isnan(mean_loss(trainer, []))
    with pytest.raises(EtudeError, match="no text to train on"):
        WindowStream([], TOKENIZER, PretrainSettings())
