"""What all dialects share: markers that are tokens, text that never is, turns read one way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer

from etude.errors import EtudeError
from etude.models.dialects.spans import text_of
from etude.models.renderer import ParsedTurn, ToolCall, ToolSpec
from etude.models.stream import Cutter, Piece, TurnReader
from etude.models.tokenizer import ByteTokenizer, load_tokenizer


@dataclass(frozen=True)
class Marker:
    """A piece of the dialect itself: one special token where the tokenizer has it, else text."""

    content: str


Part = str | Marker


class Dialect(ABC):
    """A `Renderer` over a byte-level tokenizer. A subclass says what stands where.

    Chat templates that forget earlier thinking, trim a message or rewrite the end of a turn are
    followed only within what is new: tokens that were sampled or shown stay as they are.

    Raises EtudeError when the tokenizer lacks a token that the dialect needs.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Special tokens without which the dialect cannot be spoken."""
    hint: ClassVar[str] = "use a model of this family"
    stops: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a turn, those that the tokenizer has; the first is the usual one."""
    meant: ClassVar[tuple[str, ...]] = ()
    """Tokens that mean something inside a sampled turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = ByteTokenizer(tokenizer)
        for content in self.needs:
            if self._tokens.special(content) is None:
                raise EtudeError(f"this model's tokenizer has no {content} token; {self.hint}")
        ends = (self._tokens.special(content) for content in self.stops)
        self._stop_ids = tuple(end for end in ends if end is not None)
        ids = ((self._tokens.special(content), content) for content in self.meant)
        self._markers = {token: content for token, content in ids if token is not None}

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """The renderer of a Hugging Face folder; loads neither weights nor torch."""
        return cls(load_tokenizer(folder))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return self._stop_ids

    @abstractmethod
    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """See `Renderer.open`."""

    @abstractmethod
    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """See `Renderer.follow`."""

    @abstractmethod
    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See `Renderer.expert`. Raises ValueError for what the dialect cannot spell."""

    @abstractmethod
    def _cutter(self) -> Cutter:
        """Of one turn."""

    @abstractmethod
    def _calls(self, pieces: Sequence[Piece], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
        """Read calls from the pieces of that kind."""

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
        """Take a sampled turn apart. A token counts for the span in which its first byte stands;
        the end of turn counts for the span that it ends."""
        reader = self.stream()
        deltas = [delta for token in completion for delta in reader.feed(token)]
        deltas += reader.end()
        pieces = [piece for piece in reader.pieces if piece.kind == "call"]
        calls = self._calls(pieces, tools) if pieces else ()
        if pieces and not calls:
            calls = (ToolCall("", {}, text_of(pieces), "no call was made after the opening"),)
        counts = reader.counts()
        return ParsedTurn(
            thinking="".join(delta.text for delta in deltas if delta.kind == "thinking"),
            text="".join(delta.text for delta in deltas if delta.kind == "text"),
            calls=calls,
            thinking_tokens=counts["thinking"],
            call_tokens=counts["call"],
            text_tokens=counts["text"],
        )

    def stream(self) -> TurnReader:
        """See `Renderer.stream`; the end of the turn is not shown."""
        return TurnReader(self._cutter(), self._tokens.token_bytes, self._markers, self._stop_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, special tokens shown."""
        return self._tokens.decode(ids)

    def _ended(self, completion: Sequence[int]) -> bool:
        """Whether a turn was sampled to its end."""
        return bool(completion) and completion[-1] in self._stop_ids

    def _has_tokens(self, contents: Sequence[str]) -> frozenset[str]:
        """Those that the tokenizer has a token for."""
        return frozenset(c for c in contents if self._tokens.special(c) is not None)

    def _encode(self, parts: Sequence[Part]) -> list[int]:
        """Neighbouring text is tokenised together, as the model would meet it."""
        ids: list[int] = []
        text = ""
        for part in parts:
            special = self._tokens.special(part.content) if isinstance(part, Marker) else None
            if special is None:
                text += part.content if isinstance(part, Marker) else part
            else:
                ids += [*self._tokens.encode(text), special]
                text = ""
        return ids + self._tokens.encode(text)
