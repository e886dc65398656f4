"""The engine contract. Everything above speaks to engines by this protocol only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from etude.records import Float32, Int32, Int64, PolicyVersion, Uint16
from etude.weights.update import Update


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy (log-probs then are those of temperature 1).
    `stop_ids` end the completion and are part of it. Results depend on `seed`, not on what else
    is in the batch (up to floating point)."""

    temperature: float = 1.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


@dataclass(frozen=True, eq=False)
class Completion:
    """What was sampled, each array (C,): ids, log-softmax(logits / T) over the whole vocabulary,
    and the encoded policy version that sampled the token. `cached_tokens` of the prompt were
    not computed again. `experts` is (P + C, layers, k) for mixture-of-experts models: the last
    sampled token was never fed back, so its row is all 65535 (unknown)."""

    ids: Int32
    logprobs: Float32
    policy_versions: Int64
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    experts: Uint16 | None = None


class Engine(Protocol):
    """A policy that can be sampled from. Cancel a `generate` by cancelling its task."""

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def context_length(self) -> int: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sample after `prompt_ids`. `on_token` is called with each id as it is sampled. Raises
        ValueError for an empty prompt or one that leaves no room in the context."""
        ...

    async def pause(self) -> None:
        """Return once no forward pass runs; none starts before `resume`."""
        ...

    async def resume(self) -> None: ...

    async def apply(self, update: Update) -> None:
        """Swap weights in place; tokens sampled afterwards carry `update.version`."""
        ...

    async def close(self) -> None: ...
