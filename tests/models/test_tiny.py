from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.models.tiny import Kind, make_tiny


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_is_a_normal_folder_and_deterministic(tmp_path: Path, kind: Kind) -> None:
    first, second = (make_tiny(tmp_path / name, kind, seed=3) for name in ("a", "b"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(first)
    tokenizer = AutoTokenizer.from_pretrained(first)
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 2_000_000
    assert len(tokenizer) == model.config.vocab_size == 2048
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_looks_at_its_context(tmp_path: Path, kind: Kind) -> None:
    """Else the engine's tests on it would prove little: another first token must move the
    logits at the end far beyond rounding."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path, kind))
    ids = torch.arange(100, 150)[None]
    other = ids.clone()
    other[0, 3] = 77
    with torch.inference_mode():
        change = (model(ids).logits[0, -1] - model(other).logits[0, -1]).abs().max()
    assert change > 1e-2


def test_making_one_leaves_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    make_tiny(tmp_path)
    assert torch.equal(state, torch.get_rng_state())
