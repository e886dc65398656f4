"""The shared records: what a session leaves behind, token for token.

A `Trajectory` is a chain of `Segment`s (one context window each) plus the events a person would
read, the six effort counts and the outcome. A token is recorded once, by the engine that sampled
it; nothing above ever tokenises it again. Token arrays are numpy, so this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Uint16 = NDArray[np.uint16]

INJECTED_VERSION = -1
"""Policy version of a token that no policy sampled."""


class PolicyVersion(NamedTuple):
    """(lineage, n): the n-th weights of one line of training; a pair is never reused."""

    lineage: int
    n: int

    def encode(self) -> int:
        """The pair as one non-negative int64, ordered by lineage, then n."""
        return (self.lineage << 32) | self.n

    @classmethod
    def decode(cls, code: int) -> PolicyVersion:
        """Inverse of `encode`. Raises ValueError for the code of an injected token."""
        if code < 0:
            raise ValueError("an injected token has no policy version")
        return cls(code >> 32, code & 0xFFFFFFFF)


@dataclass(frozen=True)
class Turn:
    """A sampled span `[start, end)` of a segment's `completion_ids`: one answer of the model."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Segment:
    """One context window.

    `prompt_ids` (P,) is what stood before the first sampled token; `completion_ids` (C,) is all
    that came after, sampled and injected tokens interleaved. `mask` (C,) says which were sampled;
    `logprobs` (C,) is log-softmax(logits / temperature) over the whole vocabulary, NaN where
    injected; `policy_versions` (C,) is `PolicyVersion.encode()`, -1 where injected. `experts`,
    for mixture-of-experts models, is (P + C, layers, k), prompt included.

    Raises ValueError when the arrays do not agree with one another.
    """

    prompt_ids: Int32
    completion_ids: Int32
    mask: Bool
    logprobs: Float32
    policy_versions: Int64
    turns: tuple[Turn, ...]
    temperature: float = 1.0
    experts: Uint16 | None = None

    def __post_init__(self) -> None:
        count = len(self.completion_ids)
        for name in ("mask", "logprobs", "policy_versions"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"segment: {name} is not aligned with completion_ids")
        if self.experts is not None and len(self.experts) != len(self.prompt_ids) + count:
            raise ValueError("segment: experts must cover prompt and completion")
        if not np.array_equal(np.isnan(self.logprobs), ~self.mask):
            raise ValueError("segment: logprobs must be NaN exactly where a token was injected")
        if not np.array_equal(self.policy_versions == INJECTED_VERSION, ~self.mask):
            raise ValueError("segment: policy_versions must be -1 exactly where injected")
        spans = np.zeros(count, dtype=np.bool_)
        for turn in self.turns:
            if not 0 <= turn.start < turn.end <= count or spans[turn.start : turn.end].any():
                raise ValueError(f"segment: turn {turn} is out of range or overlaps another")
            spans[turn.start : turn.end] = True
        if not np.array_equal(spans, self.mask):
            raise ValueError("segment: turns must cover exactly the sampled tokens")

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return int(self.mask.sum())


class EventKind(StrEnum):
    """What an event of the session log is about."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    SUMMARY = "summary"
    NOTE = "note"
    PERMISSION = "permission"
    CHECKPOINT = "checkpoint"
    STOP = "stop"


@dataclass(frozen=True)
class Event:
    """One line of the session log; `data` holds JSON values only.

    `turn` counts the model's turns from 0 (-1 before the first). Keys of `data` by kind:
    SYSTEM: text, tools (name, description, parameters as JSON text). USER: text. NOTE (a remark
    of the harness's to the model): text. ASSISTANT: text, thinking. TOOL_CALL: id, name,
    arguments, malformed. TOOL_RESULT: id, name, text, error_class. SUMMARY: text, thinking,
    query, and the opening of the next segment. PERMISSION: id of the call, allowed, by, reason.
    CHECKPOINT: id; undone_to (after an undo: the checkpoint that files were put back to).
    STOP: reason, detail. ASSISTANT and SUMMARY also say what the turn took: prompt_tokens,
    cached_tokens, sampled_tokens, result_tokens (of the prompt, new and due to tool results), and
    thinking_tokens, call_tokens, text_tokens, which sum to the sampled ones.
    """

    kind: EventKind
    turn: int
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """The six effort counts of a chain, plus what the engine had to read.

    Token counts are the transcript's own, summed over the chain.
    """

    thinking_tokens: int = 0
    tool_call_tokens: int = 0
    tool_output_tokens: int = 0
    final_message_tokens: int = 0
    tool_calls: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


class StopReason(StrEnum):
    """Why a session ended."""

    FINISHED = "finished"
    """The model called `finish`, or answered without a call, or its allowed turns were used by
    a task that ends after them."""
    TURN_LIMIT = "turn_limit"
    LENGTH = "length"
    """An answer without a call was cut at the longest that a turn may be."""
    BUDGET = "budget"
    """The session's tokens or money, those of its sub-agents included, are used up."""
    CONTEXT_FULL = "context_full"
    REPEATED_CALL = "repeated_call"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Verdict:
    """What the grader says of a final state: a score in [0, 1], or *not measured* and why.

    An infrastructure failure is never a 0: then `score` is None and `reason` says what failed.
    `tests` maps each required test id to its outcome; `flags` names cheats that were seen.
    """

    score: float | None
    reason: str
    tests: Mapping[str, str] = field(default_factory=dict[str, str])
    flags: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether there is a score at all."""
        return self.score is not None


@dataclass(frozen=True)
class Outcome:
    """How a rollout ended. `changes` is what the agent left behind: path to new text, or None
    where it deleted the file. `valid_call` says whether an edit of the workspace succeeded."""

    stop: StopReason
    detail: str = ""
    changes: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    valid_call: bool = False
    verdict: Verdict | None = None
    reward: float | None = None


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A whole session: chain of segments, events, usage and outcome. `segments` is empty when a
    remote engine returned no token ids; such a session can be evaluated, never trained on."""

    session_id: str
    task_id: str | None
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    usage: Usage
    outcome: Outcome

    @property
    def policy_versions(self) -> frozenset[int]:
        """Encoded policy versions of all sampled tokens."""
        return frozenset(
            int(v)
            for segment in self.segments
            for v in np.unique(segment.policy_versions)
            if v >= 0
        )
