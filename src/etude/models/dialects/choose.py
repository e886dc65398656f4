"""Which dialect a model folder speaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from etude.errors import EtudeError
from etude.models.dialects.base import Dialect
from etude.models.dialects.deepseek import DeepSeekRenderer, DeepSeekV3Renderer
from etude.models.dialects.glm import GlmRenderer
from etude.models.dialects.harmony import HarmonyRenderer
from etude.models.dialects.hermes import HermesRenderer
from etude.models.dialects.kimi import KimiRenderer
from etude.models.dialects.llama import LlamaRenderer
from etude.models.dialects.qwen_xml import Qwen35Renderer, QwenCoderRenderer
from etude.models.renderer import Renderer
from etude.models.tokenizer import load_tokenizer


@dataclass(frozen=True)
class _Family:
    """A dialect and how to know it: the tokens it needs, and what its chat template says."""

    speaks: type[Dialect]
    models: str
    template: Callable[[str], bool] = lambda _template: True


# The first that fits is taken, so the more particular ones stand before the others.
_FAMILIES = {
    "harmony": _Family(HarmonyRenderer, "gpt-oss"),
    "kimi": _Family(KimiRenderer, "Kimi-K2"),
    "glm": _Family(
        GlmRenderer, "GLM-4.5 and 4.6", lambda text: not text or "\\n<think></think>" in text
    ),
    "deepseek-v3": _Family(DeepSeekV3Renderer, "DeepSeek-V3", lambda text: "```json" in text),
    "deepseek": _Family(DeepSeekRenderer, "DeepSeek-V3.1", lambda text: "```json" not in text),
    "llama": _Family(LlamaRenderer, "Llama 3.1 to 3.3"),
    "qwen3.5": _Family(
        Qwen35Renderer, "Qwen3.5", lambda text: "<function=" in text and "<think>" in text
    ),
    "qwen-coder": _Family(QwenCoderRenderer, "Qwen3-Coder", lambda text: "<function=" in text),
    "hermes": _Family(HermesRenderer, "Qwen2.5, Qwen3, SmolLM2 and other ChatML models"),
}
DIALECTS = tuple(_FAMILIES)
"""Names that `renderer_for` takes."""
# Their tokenizers look like a family's, but they write calls in another way.
_OTHERS = {"deepseek_v32", "glm_moe_dsa"}


def renderer_for(folder: Path, dialect: str | None = None) -> Renderer:
    """The renderer of a Hugging Face folder: the dialect of that name, or the one that its
    tokenizer and chat template speak. Loads neither weights nor torch.

    Raises EtudeError for an unknown name, a family without a dialect here, a tokenizer that lacks
    the dialect's tokens, and a folder that is no model.
    """
    if dialect is not None:
        if dialect not in _FAMILIES:
            raise EtudeError(f"unknown dialect {dialect!r}; dialects: {', '.join(DIALECTS)}")
        return _FAMILIES[dialect].speaks(load_tokenizer(folder))
    tokenizer = load_tokenizer(folder)
    name = dialect_of(folder, tokenizer)
    if name is None:
        known = "; ".join(f"{name} ({family.models})" for name, family in _FAMILIES.items())
        raise EtudeError(
            f"{folder} ({_model_type(folder)}) speaks no chat dialect that is known here; choose "
            f"one with --dialect if it was trained on it: {known}"
        )
    return _FAMILIES[name].speaks(tokenizer)


def dialect_of(folder: Path, tokenizer: Tokenizer) -> str | None:
    """The name of the dialect that a folder's model speaks, or None."""
    if _model_type(folder) in _OTHERS:
        return None
    tokens = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    template = chat_template(folder)
    for name, family in _FAMILIES.items():
        if tokens.issuperset(family.speaks.needs) and family.template(template):
            return name
    return None


def chat_template(folder: Path) -> str:
    """The folder's chat template, that for tools where there are several; "" without one.

    Raises EtudeError when its file cannot be read."""
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text("utf-8")
        path = folder / "tokenizer_config.json"
        if not path.is_file():
            return ""
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EtudeError(f"{path} cannot be read ({error})") from error
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):
        each = (one for one in cast(list[object], template) if isinstance(one, dict))
        pairs = (cast(dict[str, object], one) for one in each)
        named = {str(one.get("name")): str(one.get("template")) for one in pairs}
        template = named.get("tool_use", named.get("default", ""))
    return template if isinstance(template, str) else ""


def _model_type(folder: Path) -> str:
    """`model_type` of the folder's config.json; "no config.json" when it says none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return "no config.json"
    found = cast(dict[str, object], config).get("model_type") if isinstance(config, dict) else None
    return str(found or "no model_type")
