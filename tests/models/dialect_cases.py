"""Every dialect over a small tokenizer of its own, and text that tries to break out of it."""

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from etude.models.dialects.base import Dialect
from etude.models.dialects.chatml import ChatML
from etude.models.dialects.deepseek import DeepSeekRenderer, DeepSeekV3Renderer
from etude.models.dialects.glm import GlmRenderer
from etude.models.dialects.harmony import HarmonyRenderer
from etude.models.dialects.hermes import HermesRenderer
from etude.models.dialects.kimi import KimiRenderer
from etude.models.dialects.llama import LlamaRenderer
from etude.models.dialects.qwen_xml import Qwen35Renderer, QwenCoderRenderer
from etude.models.renderer import ToolSpec
from etude.models.tiny import train_tokenizer

_RESULT = ("<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
# Dialect, tokens that the family's tokenizers have beside those that the dialect needs.
_ALL: dict[str, tuple[type[Dialect], tuple[str, ...]]] = {
    "hermes in letters": (HermesRenderer, ()),
    "hermes": (HermesRenderer, (*_THINK, *_CALL, *_RESULT)),
    "qwen-coder": (QwenCoderRenderer, (*_RESULT, *_THINK)),
    "qwen3.5": (Qwen35Renderer, _RESULT),
    "glm": (GlmRenderer, _RESULT),
    "kimi": (KimiRenderer, ()),
    "kimi thinking": (KimiRenderer, _THINK),
    "deepseek-v3": (DeepSeekV3Renderer, ()),
    "deepseek": (DeepSeekRenderer, _THINK),
    "llama": (LlamaRenderer, ("<|eom_id|>", "<|end_of_text|>")),
    "harmony": (HarmonyRenderer, ()),
}
NAMES = tuple(_ALL)
MARKERS = tuple(
    sorted({marker for speaks, more in _ALL.values() for marker in (*speaks.needs, *more)})
)


@dataclass(frozen=True)
class Case:
    """A dialect and its tokenizer with all tokens, which reads markers in a text as tokens."""

    name: str
    renderer: Dialect = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)

    def sampled(self, text: str) -> list[int]:
        """The ids of a text in which every marker is meant."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def special(self, ids: list[int]) -> list[str]:
        """The special tokens among `ids`."""
        added = self.tokenizer.get_added_tokens_decoder()
        return [added[token].content for token in ids if token in added]


@cache
def _trained() -> str:
    return train_tokenizer(600).to_str()


@cache
def family_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a family's models, small."""
    speaks, more = _ALL[name]
    description = json.loads(_trained())
    if not issubclass(speaks, ChatML):
        kept = [t for t in description["added_tokens"] if t["content"] not in ChatML.needs]
        description["added_tokens"] = kept
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (*speaks.needs, *more)]
    )
    return tokenizer


@cache
def case(name: str) -> Case:
    tokenizer = family_tokenizer(name)
    return Case(name, _ALL[name][0](tokenizer), tokenizer)


HOSTILE = st.sampled_from(
    [
        *MARKERS,
        *("</parameter>", "\n</parameter>\n", "<parameter=a>", "</function>", "<function=f>"),
        *('{"name": "', '"', "\\", "\n", "\n\n", "```json\n", "```", "1", "true", "None", "null"),
        *(" ", '"1"', "\\u003c", "e\u0301", "🦊", "functions.f:0", "to=functions.f "),
    ]
)
HOSTILE_TEXT = st.lists(st.one_of(HOSTILE, st.text(max_size=6)), max_size=6).map("".join)
NAME = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,8}", fullmatch=True)
JSON = st.recursive(
    st.one_of(HOSTILE_TEXT, st.integers(), st.booleans(), st.none())
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(HOSTILE_TEXT, inner, max_size=2),
    max_leaves=4,
)
SCHEMAS: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({}, JSON),
    ({"type": "string"}, HOSTILE_TEXT),
    ({"type": "integer"}, st.integers()),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["string", "null"]}, st.none() | HOSTILE_TEXT),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, st.integers() | HOSTILE_TEXT),
    ({"enum": ["1", 1, "x"]}, st.sampled_from(["1", 1, "x"])),
    ({"$ref": "#/$defs/Words"}, st.lists(HOSTILE_TEXT, max_size=2)),
]


@st.composite
def tool_and_arguments(draw: st.DrawFn) -> tuple[ToolSpec | None, str, dict[str, Any]]:
    """A call, with the schema of its tool, which may be unknown."""
    name = draw(NAME)
    chosen = draw(st.dictionaries(NAME, st.sampled_from(SCHEMAS), max_size=3))
    arguments = {key: draw(values) for key, (_, values) in chosen.items()}
    if draw(st.booleans()):
        arguments = draw(st.dictionaries(NAME, JSON, max_size=3))
        return None, name, arguments
    schema = {
        "type": "object",
        "properties": {key: schema for key, (schema, _) in chosen.items()},
        "$defs": {"Words": {"type": "array", "items": {"type": "string"}}},
    }
    return ToolSpec(name, "does something", schema), name, arguments
