"""Byte-exact access to a byte-level BPE tokenizer, without torch or transformers.

Two needs that the usual tokenizer objects do not meet: plain text must never turn into a special
token, whatever it contains, and every token must be worth an exact number of bytes, so that a
sampled turn can be cut into spans whose token counts add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from etude.errors import EtudeError


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises EtudeError when it has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EtudeError(f"{folder} holds no tokenizer.json; give a Hugging Face model folder")
    # The library reports every unreadable file as a bare Exception.
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise EtudeError(f"{path} is not a readable tokenizer ({error})") from error


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others, in order, for
    the code points from 256 on (the published GPT-2 scheme)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


_PROBE = "x  y\te\u0301\n\n 1 \u00c5\u212b\U0001f98a"
"""A text that a tokenizer which rewrites spaces or characters does not give back."""


def _plain(description: dict[str, Any], added: Mapping[str, int]) -> Tokenizer:
    """The tokenizer without its added tokens, which text then cannot produce, and without a
    normalizer: Qwen's would compose characters, and the model would see another text than stands
    in the file."""
    description["added_tokens"] = []
    description["post_processor"] = None
    description["normalizer"] = None
    # Some vocabularies list the added tokens as well; with `ignore_merges` a whole word is looked
    # up there.
    model = description["model"]
    model["vocab"] = {text: token for text, token in model["vocab"].items() if text not in added}
    merges = cast(list[str | list[str]], model["merges"])
    pairs = ((merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in merges)
    model["merges"] = [
        merge for merge, (a, b) in pairs if added.keys().isdisjoint((a, b, f"{a}{b}"))
    ]
    return Tokenizer.from_str(json.dumps(description))


class ByteTokenizer:
    """A byte-level BPE tokenizer as bytes in, bytes out.

    Raises EtudeError when the tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        description = json.loads(tokenizer.to_str())
        decoder = description.get("decoder") or {}
        if decoder.get("type") != "ByteLevel" or description["model"].get("type") != "BPE":
            raise EtudeError(
                "this model's tokenizer is not byte-level BPE, which token-exact records need; "
                "use a model such as SmolLM2 or Qwen"
            )
        self._added: dict[str, int] = {
            token["content"]: token["id"] for token in description["added_tokens"]
        }
        self._plain = _plain(description, self._added)
        self._bytes = self._table(tokenizer)
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise EtudeError(
                "this model's tokenizer does not give a text back as it was, which token-exact "
                "records need; use a model such as SmolLM2 or Qwen"
            )

    def _table(self, tokenizer: Tokenizer) -> list[bytes]:
        alphabet = _byte_of_character()
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values()) + 1)
        for token, index in vocabulary.items():
            if token in self._added or any(character not in alphabet for character in token):
                table[index] = token.encode()
            else:
                table[index] = bytes(alphabet[character] for character in token)
        return table

    def special(self, content: str) -> int | None:
        """Id of an added token, or None when the tokenizer has none of that content."""
        return self._added.get(content)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; no special token comes out, whatever `text` contains."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, an added token as its content. Ids beyond the vocabulary (a
        padded output layer may sample them) are worth no byte."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, special tokens shown; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(token) for token in ids).decode("utf-8", "replace")
