"""Which request runs in which slot, and what it can take over from the others.

A slot keeps the token ids of one context and the number of positions whose keys and values are
computed. A finished context stays in its slot until the slot is needed, so the next turn of a
session finds it. Torch-free; the engine's worker thread is the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.inference.protocol import Completion, Finish, Sampling
from etude.records import Int32, Int64, Uint16

UNKNOWN_EXPERT = 65535


@dataclass(eq=False)
class Request:
    """One `generate` in flight and what it has sampled so far."""

    prompt: Int32
    sampling: Sampling
    uniform: Callable[[], float]
    """The request's own stream of numbers in [0, 1), one per sampled token."""
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    cached: int = 0


@dataclass(eq=False)
class Slot:
    """One context. `ids` is a row of the shared table; positions [0, computed) have keys and
    values, `length` ids are known. `fresh` says that all of them belong to the present weights.
    Slots of one `family` hold the very same keys and values at positions [0, `shared`): one was
    computed, the others copied from it (each pair agrees up to the smaller `shared`).
    """

    index: int
    ids: Int32
    experts: Uint16 | None
    length: int = 0
    computed: int = 0
    fresh: bool = True
    request: Request | None = None
    last_used: int = 0
    family: int = 0
    shared: int = 0

    @property
    def due(self) -> int:
        """Tokens that must go through the model before the next one can be sampled."""
        return self.length - self.computed


@dataclass(frozen=True)
class Work:
    """Feed positions [start, start + count) of a slot."""

    slot: Slot
    start: int
    count: int

    @property
    def complete(self) -> bool:
        """Whether the next token can be sampled afterwards."""
        return self.start + self.count == self.slot.length


class Scheduler:
    """Slots and the queue. `copy(source, target, length)` moves keys and values."""

    def __init__(
        self,
        *,
        slots: int,
        max_batch: int,
        context: int,
        experts: tuple[int, int] | None,
        copy: Callable[[int, int, int], None],
    ) -> None:
        self._table = np.zeros((slots, context), np.int32)
        self._max_batch = max_batch
        self._context = context
        self._copy = copy
        self._tick = 0
        self._families = 0
        self.waiting: deque[Request] = deque()
        self.slots = [
            Slot(
                index,
                self._table[index],
                None if experts is None else np.zeros((context, *experts), np.uint16),
            )
            for index in range(slots)
        ]

    @property
    def live(self) -> list[Slot]:
        """Slots with a request, in slot order."""
        return [slot for slot in self.slots if slot.request is not None]

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting) or any(slot.request is not None for slot in self.slots)

    def admit(self) -> None:
        """Give slots to queued requests, first come first served, except that a request whose
        prefix is just being computed by another one waits for it."""
        free = self._max_batch - len(self.live)
        for request in list(self.waiting):
            if free == 0:
                return
            reuse, coming = self._prefixes(request.prompt)
            source = int(reuse.argmax())
            saved = int(reuse[source])
            if coming > saved:
                continue
            self.waiting.remove(request)
            self._place(request, self.slots[source], saved)
            free -= 1

    def _prefixes(self, prompt: Int32) -> tuple[Int64, int]:
        """(slots,) positions of the prompt that each slot has computed, and the longest prefix
        that a running prefill is going to compute. The last prompt token is always fed again,
        for its logits."""
        limit = len(prompt) - 1
        differs = self._table[:, :limit] != prompt[:limit]
        common = np.where(differs.any(1), differs.argmax(1), limit) if limit else np.zeros(1, int)
        computed = np.array([slot.computed if slot.fresh else 0 for slot in self.slots])
        coming = [
            min(int(shared), slot.length)
            for slot, shared in zip(
                self.slots, np.broadcast_to(common, computed.shape), strict=True
            )
            if slot.request is not None and slot.fresh and slot.due > 1
        ]
        return np.minimum(common, computed), max(coming, default=0)

    def _place(self, request: Request, source: Slot, saved: int) -> None:
        """Choose a slot: the source itself where it is idle and mostly used up, else an empty
        one, else the idle one that was used longest ago."""
        family = None
        if source.request is None and saved and saved * 2 >= source.computed:
            slot = source
        else:
            idle = [slot for slot in self.slots if slot.request is None]
            slot = min(idle, key=lambda s: (s.computed > 0, s is source, s.last_used, s.index))
            if slot is not source and saved:
                self._copy(source.index, slot.index, saved)
                family = source.family if saved == len(request.prompt) - 1 else None
                if slot.experts is not None and source.experts is not None:
                    slot.experts[:saved] = source.experts[:saved]
        slot.ids[: len(request.prompt)] = request.prompt
        slot.length = len(request.prompt)
        slot.computed = saved
        slot.fresh = True
        slot.request = request
        self._join(slot, family, min(saved, source.shared))
        request.cached = saved

    def _join(self, slot: Slot, family: int | None, shared: int) -> None:
        """Enter a family, or (None) found one: only whole prompts make a family, so that a head
        which all tasks have in common does not keep groups from sharing their own prompts."""
        if family is None:
            self._families += 1
            family, shared = self._families, self._context
        slot.family, slot.shared = family, shared

    def plan(self, budget: int) -> tuple[list[Work], list[Work]]:
        """Next step: slots that feed one token, and prompt chunks of `budget` tokens together."""
        decode: list[Work] = []
        chunks: list[Work] = []
        for slot in self.live:
            if slot.due == 1:
                decode.append(Work(slot, slot.computed, 1))
            elif budget > 0:
                count = min(slot.due, budget)
                chunks.append(Work(slot, slot.computed, count))
                budget -= count
        return decode, chunks

    def advance(self, work: Sequence[Work]) -> None:
        """The forward pass of `work` is done."""
        for item in work:
            item.slot.computed = item.start + item.count

    def append(self, slot: Slot, token: int, logprob: float, version: int) -> Completion | None:
        """Record a sampled token; the completion when it was the last one."""
        request = slot.request
        assert request is not None
        request.ids.append(token)
        request.logprobs.append(logprob)
        request.versions.append(version)
        slot.ids[slot.length] = token
        slot.length += 1
        finish = self._finish(request, slot.length)
        if finish is None:
            return None
        experts = None
        if slot.experts is not None:
            experts = slot.experts[: slot.length].copy()
            experts[-1] = UNKNOWN_EXPERT
        self.release(slot)
        return Completion(
            ids=np.array(request.ids, np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            policy_versions=np.array(request.versions, np.int64),
            finish=finish,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached,
            experts=experts,
        )

    def _finish(self, request: Request, length: int) -> Finish | None:
        if request.ids[-1] in request.sampling.stop_ids:
            return Finish.STOP
        if len(request.ids) >= request.sampling.max_tokens:
            return Finish.LENGTH
        return Finish.CONTEXT if length >= self._context else None

    def cancel(self, request: Request) -> None:
        """Forget a request wherever it is; its slot is free at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        for slot in self.slots:
            if slot.request is request:
                self.release(slot)

    def release(self, slot: Slot) -> None:
        """Free a slot. What it has computed stays for others unless weights changed meanwhile."""
        self._tick += 1
        slot.request = None
        slot.last_used = self._tick
        slot.computed = slot.computed if slot.fresh else 0
        slot.length = slot.computed

    def weights_changed(self, *, recompute: bool) -> None:
        """No new request may use what the old weights computed. Unfinished ones go on with it,
        or feed everything again."""
        for slot in self.slots:
            slot.fresh = False
            if slot.request is None:
                slot.computed = slot.length = 0
                slot.fresh = True
            elif recompute:
                slot.computed = 0
                slot.fresh = True
                self._join(slot, None, 0)
