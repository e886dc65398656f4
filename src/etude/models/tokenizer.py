"""Byte-exact access to a byte-level BPE tokenizer, without torch or transformers.

Two needs that the usual tokenizer objects do not meet: plain text must never turn into a special
token, whatever it contains, and every token must be worth an exact number of bytes, so that a
sampled turn can be cut into spans whose token counts add up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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


class ByteTokenizer:
    """A byte-level BPE tokenizer as bytes in, bytes out.

    Raises EtudeError when the tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        description = json.loads(tokenizer.to_str())
        decoder = description.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise EtudeError(
                "this model's tokenizer is not byte-level BPE, which token-exact records need; "
                "use a model such as SmolLM2 or Qwen"
            )
        self._added: dict[str, int] = {
            token["content"]: token["id"] for token in description["added_tokens"]
        }
        # Without its added tokens the tokenizer cannot produce one from text.
        description["added_tokens"] = []
        description["post_processor"] = None
        self._plain = Tokenizer.from_str(json.dumps(description))
        self._bytes = self._table(tokenizer)

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
