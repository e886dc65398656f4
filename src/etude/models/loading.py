"""Loading a Hugging Face folder as a plain transformers model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tokenizers import Tokenizer

from etude.errors import EtudeError
from etude.models.dialects.choose import renderer_for
from etude.models.renderer import Renderer
from etude.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DType = Literal["bfloat16", "float32"]
Attention = Literal["sdpa", "eager"]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode, its tokenizer and its chat dialect."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    renderer: Renderer


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises EtudeError when the folder is no model."""
    path = folder / "config.json"
    if not path.is_file():
        raise EtudeError(f"{folder} is no Hugging Face model folder: it holds no config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise EtudeError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise EtudeError(f"{path} names no model_type, so it is no model's config")
    return cast(dict[str, Any], config)


def load(folder: Path, dtype: DType = "bfloat16", attention: Attention = "sdpa") -> LoadedModel:
    """Load `folder`; nothing is downloaded, no code from the folder is run.

    Each call gives a model with a config of its own, so that choosing another attention for one
    does not change the other. Raises EtudeError when the folder holds no usable causal model.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = read_config(folder)
    renderer = renderer_for(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise EtudeError(
            f"cannot load {folder} as a causal language model of type {config['model_type']}: "
            f"{reason}"
        ) from error
    model.eval()
    return LoadedModel(model, load_tokenizer(folder), renderer)
