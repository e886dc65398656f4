"""The token ledger of one context window: what the engine sampled, and what stood around it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from etude.inference.protocol import Completion
from etude.records import INJECTED_VERSION, Int32, Segment, Turn, Uint16

UNKNOWN_EXPERT = 65535
"""Route of a token that was never fed to the model."""


class Ledger:
    """Grows by whole exchanges: a prompt that the engine really read, and what it sampled.

    Nothing is recorded before it was used, so a cancelled or refused turn leaves no trace here.
    """

    def __init__(self) -> None:
        # Compact, because a session of a day holds hundreds of thousands of tokens.
        self._prompt = array("i")
        self._completion = array("i")
        self._mask = bytearray()
        self._logprobs: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
        self._versions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self._turns: list[Turn] = []
        self._experts: Uint16 | None = None

    @property
    def ids(self) -> list[int]:
        """All tokens so far; the next prompt starts with them."""
        return [*self._prompt, *self._completion]

    @property
    def last_completion(self) -> list[int] | None:
        """The ids sampled last, or None before the first exchange."""
        if not self._prompt:
            return None
        if not self._turns or self._turns[-1].end != len(self._completion):
            return []
        return self._completion[self._turns[-1].start :].tolist()

    def commit(self, prompt_ids: Sequence[int], completion: Completion) -> None:
        """Record one exchange. Raises ValueError when the prompt does not continue the ledger."""
        known = len(self._prompt) + len(self._completion)
        if not self._prompt:
            self._prompt = array("i", prompt_ids)
        else:
            if array("i", prompt_ids[:known]) != self._prompt + self._completion:
                raise ValueError("the prompt does not start with what is recorded already")
            self._append(prompt_ids[known:], sampled=False)
            count = len(prompt_ids) - known
            self._logprobs.append(np.full(count, np.nan, dtype=np.float32))
            self._versions.append(np.full(count, INJECTED_VERSION, dtype=np.int64))
        start = len(self._completion)
        self._append(completion.ids, sampled=True)
        self._logprobs.append(completion.logprobs)
        self._versions.append(completion.policy_versions)
        if len(completion.ids):
            self._turns.append(Turn(start, len(self._completion)))
        self._join_experts(completion)

    def _append(self, ids: Sequence[int] | Int32, *, sampled: bool) -> None:
        self._completion.extend(int(token) for token in ids)
        self._mask.extend(bytes([sampled]) * len(ids))

    def _join_experts(self, completion: Completion) -> None:
        """Take each token's routes from the first completion whose forward passes fed it: the
        rows of the last sampled token and of what was injected after it come with the next."""
        if completion.experts is None:
            if self._experts is not None:
                raise ValueError("the engine recorded experts for some turns only")
            return
        fed = 0 if self._experts is None else len(self._experts)
        if self._experts is None and len(self._turns) > 1:
            raise ValueError("the engine recorded experts for some turns only")
        last_fed = len(self._prompt) + len(self._completion) - bool(len(completion.ids))
        rows = completion.experts[fed:last_fed]
        self._experts = rows if self._experts is None else np.concatenate([self._experts, rows])

    def segments(self, temperature: float) -> tuple[Segment, ...]:
        """The one segment, or none when nothing was ever sampled. `temperature` is that of the
        log-probs; greedy sampling (0) has those of temperature 1."""
        if not self._prompt:
            return ()
        experts = self._experts
        if experts is not None:
            missing = len(self._prompt) + len(self._completion) - len(experts)
            unknown = np.full((missing, *experts.shape[1:]), UNKNOWN_EXPERT, dtype=np.uint16)
            experts = np.concatenate([experts, unknown])
        return (
            Segment(
                prompt_ids=np.array(self._prompt, dtype=np.int32),
                completion_ids=np.array(self._completion, dtype=np.int32),
                mask=np.frombuffer(bytes(self._mask), dtype=np.bool_),
                logprobs=np.concatenate(self._logprobs).astype(np.float32, copy=False),
                policy_versions=np.concatenate(self._versions).astype(np.int64, copy=False),
                turns=tuple(self._turns),
                temperature=temperature or 1.0,
                experts=experts,
            ),
        )
