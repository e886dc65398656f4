"""Between messages and token ids: the contract of every chat dialect.

The rule that all dialects keep: what has been sampled or rendered is never tokenised again. A
conversation grows only by appending, so prompt n+1 starts with exactly the tokens of prompt n
plus completion n. Text from people, files and tools never yields a special token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etude.models.stream import Delta


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the model is told of it; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """One call as parsed from a sampled turn. When `error` is set the call was malformed:
    `arguments` is empty, `name` may be, and `raw` holds the text that was sampled."""

    name: str
    arguments: Mapping[str, Any]
    raw: str
    error: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """A sampled turn taken apart; the three token counts sum to its sampled tokens."""

    thinking: str
    text: str
    calls: tuple[ToolCall, ...]
    thinking_tokens: int
    call_tokens: int
    text_tokens: int


class TurnStream(Protocol):
    """Shows a turn while it is sampled; see `models/stream.py`."""

    def feed(self, token: int) -> list[Delta]: ...
    def end(self) -> list[Delta]: ...


class Renderer(Protocol):
    """One chat dialect over one tokenizer."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant header."""
        ...

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """What stands between a sampled turn and the next assistant header: the end of turn if
        sampling was cut before it, the tool results, a user message. Only these new ids."""
        ...

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
        """Take a sampled turn apart. Never raises on what a model may sample. `tools` are those
        of `open`: a dialect that writes arguments without JSON needs them to tell 1 from "1"."""
        ...

    def expert(
        self,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """The completion, end of turn included, that a perfect model would sample to say `text`
        and make `calls` (name, arguments). `parse`, given the same `tools`, gives them back.
        Raises ValueError for what the dialect cannot say."""
        ...

    def stream(self) -> TurnStream:
        """Cuts the next turn into pieces as its tokens come. All pieces of thinking make up
        `ParsedTurn.thinking`, all of text its `text`; those of calls are what was sampled from the
        first call on, markers and all."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, special tokens shown."""
        ...
