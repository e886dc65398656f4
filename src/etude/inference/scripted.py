"""A model whose answers come from a function: for tests, demonstrations and scripted experts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from etude.inference.protocol import Completion, Finish, Sampling
from etude.records import PolicyVersion
from etude.weights.update import Update

Answer = Callable[[Sequence[int], Sampling], Sequence[int]]
"""From prompt ids and sampling (its seed tells the samples of a group apart) to completion ids."""


class ScriptedEngine:
    """An `Engine` that says what `answer` returns, token by token.

    The completion is cut at `max_tokens`, at the first stop id and where the context is full,
    as a model's would be. Log-probs are 0.0: a script is certain. Control goes back to the event
    loop after each token, or for `seconds_per_token`, so that a session can be cancelled.
    `apply` only takes the version over.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        context_length: int = 8192,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 (an immutable tuple)
        seconds_per_token: float = 0.0,
    ) -> None:
        self._answer = answer
        self._context_length = context_length
        self._version = version
        self._seconds_per_token = seconds_per_token
        self._running = asyncio.Event()
        self._running.set()

    @property
    def version(self) -> PolicyVersion:
        """The version that tokens are tagged with."""
        return self._version

    @property
    def context_length(self) -> int:
        """Prompt and completion together, in tokens."""
        return self._context_length

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """As the protocol says. An answer that ends by itself, without a stop id, finishes with
        LENGTH: a script that wants STOP says the stop id."""
        room = self._context_length - len(prompt_ids)
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in the context")
        finish = Finish.LENGTH if sampling.max_tokens <= room else Finish.CONTEXT
        ids: list[int] = []
        versions: list[int] = []
        for token in self._answer(prompt_ids, sampling)[: min(room, sampling.max_tokens)]:
            await asyncio.sleep(self._seconds_per_token)
            await self._running.wait()
            ids.append(int(token))
            versions.append(self._version.encode())
            if on_token is not None:
                on_token(int(token))
            if token in sampling.stop_ids:
                finish = Finish.STOP
                break
        if finish is Finish.CONTEXT and len(ids) < room:
            finish = Finish.LENGTH
        return Completion(
            ids=np.array(ids, dtype=np.int32),
            logprobs=np.zeros(len(ids), dtype=np.float32),
            policy_versions=np.array(versions, dtype=np.int64),
            finish=finish,
            prompt_tokens=len(prompt_ids),
            cached_tokens=0,
        )

    async def pause(self) -> None:
        """No further token is said before `resume`."""
        self._running.clear()

    async def resume(self) -> None:
        """Go on."""
        self._running.set()

    async def apply(self, update: Update) -> None:
        """Take over the version; a script has no weights."""
        self._version = update.version

    async def close(self) -> None:
        """Nothing to free."""
