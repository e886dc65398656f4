"""What answers in a session: a local engine with its token ledger, or a remote chat service.

The session loop speaks to both by this protocol and never sees a token. What a session says waits
in the policy until the model has read it, so a cancelled turn leaves no trace in the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from etude.inference.protocol import Completion, Finish
from etude.models.renderer import ParsedTurn, ToolSpec
from etude.models.stream import Delta
from etude.records import Event, Segment

OnDelta = Callable[[Delta], None]


@dataclass(frozen=True)
class TurnLimits:
    """Of one turn: sampled tokens, temperature, seed, and seconds until the engine must have
    answered."""

    max_tokens: int
    temperature: float
    seed: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Exchange:
    """What the engine read that was not in the ledger yet, and what it sampled. `opens` says that
    `prompt_ids` is the whole prompt of a new segment."""

    opens: bool
    prompt_ids: Sequence[int]
    completion: Completion


@dataclass(frozen=True, eq=False)
class Answer:
    """One turn of the model. `result_tokens` of the prompt were new and there because of tool
    results. `exchange` is None when the service told no tokens."""

    parsed: ParsedTurn
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    result_tokens: int
    exchange: Exchange | None = None


class Policy(Protocol):
    """One conversation with one model. Raises EtudeError where a person has to mend something
    and TimeoutError when an answer does not come in time."""

    @property
    def context_length(self) -> int: ...

    @property
    def trainable(self) -> bool:
        """Whether there is a token ledger."""
        ...

    def begin(self, system: str, tools: Sequence[ToolSpec]) -> None:
        """The head, which stays the same in every segment. Once, before anything else."""
        ...

    def say(self, text: str) -> None:
        """A message of the person's."""
        ...

    def note(self, text: str) -> None:
        """A remark of the harness's; stands before the person's next message."""
        ...

    def answer(self, call_id: str, text: str) -> None:
        """The result of the next open call of the last turn."""
        ...

    def prompt_tokens(self) -> int:
        """Length of the next prompt; an estimate where `trainable` is false."""
        ...

    async def turn(self, limits: TurnLimits, on_delta: OnDelta | None = None) -> Answer:
        """Let the model answer to all that waits."""
        ...

    async def ask(self, query: str, limits: TurnLimits, on_delta: OnDelta | None = None) -> Answer:
        """Let the model answer to a question of the harness's; messages of the person's go on
        waiting."""
        ...

    def begin_segment(self, opening: str) -> None:
        """Start a new context window: the head, then `opening` as the person's message."""
        ...

    def recall(self, events: Sequence[Event], exchange: Exchange | None) -> None:
        """Take over what a log says happened: one turn's events with its exchange, or a single
        other event. Raises ValueError when it does not fit what was recalled before."""
        ...

    def segments(self, temperature: float) -> tuple[Segment, ...]:
        """The ledger so far; empty when the service told no tokens."""
        ...
