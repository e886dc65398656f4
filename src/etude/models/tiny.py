"""From-scratch models of one or two million parameters, for tests and for trying things out.

They are normal Hugging Face folders: their own byte-level BPE with ChatML tokens, a config and
random weights. They know nothing, but every part of the machine works on them as on a large one.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Kind = Literal["dense", "moe"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT_LENGTH = 2048
_TRAINING_MODULES = ("textwrap", "heapq", "bisect", "statistics", "shlex", "graphlib", "csv")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(folder: Path, kind: Kind = "dense", seed: int = 0, vocab: int = 2048) -> Path:
    """Write a tiny model into `folder` (made if missing) and return it.

    `dense` is a Llama of 1.3 M parameters, `moe` a Qwen3-MoE of 1.7 M with 8 experts, 2 per
    token. The same arguments give the same files on the same Python.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(vocab)
    config = _config(kind, tokenizer.get_vocab_size())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "model_max_length": CONTEXT_LENGTH,
                "chat_template": _CHAT_TEMPLATE,
            },
            indent=2,
        )
    )
    return folder


def train_tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE of `vocab` tokens (at least 300), learnt from modules of Python's own
    library; digits are split, as in SmolLM2."""
    if vocab < 300:
        raise ValueError("a byte-level vocabulary needs at least 300 tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / f"{name}.py").read_text("utf-8") for name in _TRAINING_MODULES]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _config(kind: Kind, vocab: int) -> PreTrainedConfig:
    """The initial standard deviation is 1/sqrt(width), so that attention matters from the start:
    with the usual 0.02 a model this narrow hardly looks at its context."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    shared: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.09,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "dense":
        return LlamaConfig(num_hidden_layers=5, **shared)
    return Qwen3MoeConfig(
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **shared,
    )
