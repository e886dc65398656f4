"""The embedded engine: continuous batching of a plain transformers model, in this process.

All forward passes run in one worker thread that owns model, slots and queue. The event loop talks
to it by posting small functions, which the worker runs between two steps; a stopped worker fails
everything that is pending at once.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from etude.errors import EtudeError
from etude.inference.forward import SlotModel, native_bfloat16, usable_cores
from etude.inference.protocol import Completion, Sampling
from etude.inference.scheduler import Request, Scheduler, Slot
from etude.inference.settings import EngineSettings
from etude.models.loading import LoadedModel, load
from etude.records import PolicyVersion
from etude.weights.update import Update

_T = TypeVar("_T")
_POLL_S = 2.0
_CLOSE_S = 60.0


class EngineError(EtudeError):
    """The engine cannot answer: it was closed, it died of the named error, or it stands still."""


@dataclass(eq=False)
class _Job:
    """A request on its way back to the event loop that asked."""

    request: Request
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Completion]
    on_token: Callable[[int], None] | None


@dataclass
class Counters:
    """What the engine did since it was made. `tokens_fed` counts tokens through the model."""

    steps: int = 0
    tokens_fed: int = 0
    tokens_sampled: int = 0
    tokens_cached: int = 0
    busy_s: float = 0.0


class TorchEngine:
    """`Engine` over a model folder or a loaded model, which then belongs to the engine.

    Raises EtudeError when the folder holds no model that it can run.
    """

    def __init__(
        self,
        source: Path | LoadedModel,
        settings: EngineSettings | None = None,
        *,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 (an immutable tuple)
    ) -> None:
        self._settings = settings or EngineSettings()
        if isinstance(source, Path):
            dtype = self._settings.dtype
            if dtype == "auto":
                dtype = "bfloat16" if native_bfloat16() else "float32"
            source = load(source, dtype)
        self._model = SlotModel(source.model, self._settings)
        routes = self._model.routes
        self._scheduler = Scheduler(
            slots=self._model.slots,
            max_batch=self._settings.max_batch,
            context=self._model.context,
            experts=(routes.layers, routes.experts_per_token) if routes.layers else None,
            copy=self._model.cache.copy,
        )
        self._version = version
        self.counters = Counters()
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._paused = False
        self._stopping = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._jobs: dict[Request, _Job] = {}
        self._calls: set[Future[None]] = set()
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="etude-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights that sample now."""
        return self._version

    @property
    def context_length(self) -> int:
        """Prompt and completion together, in tokens."""
        return self._model.context

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """As the protocol says. Raises ValueError for a prompt or sampling that cannot be, and
        EngineError when the engine was closed, died or makes no progress."""
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        self._validate(prompt, sampling)
        stream = np.random.default_rng(sampling.seed & (2**64 - 1))
        request = Request(prompt.astype(np.int32), sampling, stream.random)
        loop = asyncio.get_running_loop()
        job = _Job(request, loop, loop.create_future(), on_token)
        with self._lock:
            self._refuse_if_stopped()
            self._jobs[request] = job
            self._posts.put(lambda: self._scheduler.waiting.append(request))
        try:
            return await self._progressing(job.done)
        finally:
            if not job.done.done() or job.done.cancelled() or job.done.exception() is not None:
                self._forget(request)

    def _validate(self, prompt: np.ndarray[Any, np.dtype[np.int64]], sampling: Sampling) -> None:
        if not len(prompt):
            raise ValueError("the prompt is empty")
        if len(prompt) >= self.context_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of "
                f"{self.context_length}"
            )
        if prompt.min() < 0 or prompt.max() >= self._model.vocab:
            raise ValueError(f"the prompt has ids outside the vocabulary of {self._model.vocab}")
        if sampling.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise ValueError("temperature must be finite and not negative")

    async def pause(self) -> None:
        """Return once no forward pass runs; none starts before `resume`."""
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Go on."""
        await self._call(lambda: self._set_paused(False))

    async def apply(self, update: Update) -> None:
        """Swap weights in place between two steps, also while paused. Raises ValueError, and
        changes nothing, when a tensor does not fit the model."""
        await self._call(lambda: self._apply(update))

    async def close(self) -> None:
        """Stop the worker; what is pending fails with EngineError. Idempotent."""
        self._posts.put(self._stop)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        if self._thread.is_alive():
            raise EngineError(f"the engine did not stop within {_CLOSE_S:.0f} s")

    # Below: between event loop and worker.

    def _refuse_if_stopped(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has stopped: {self._error}") from self._error

    async def _call(self, action: Callable[[], None]) -> None:
        """Run `action` in the worker and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except ValueError as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            self._refuse_if_stopped()
            self._calls.add(done)
            self._posts.put(run)
        try:
            await self._progressing(asyncio.wrap_future(done))
        finally:
            with self._lock:
                self._calls.discard(done)

    async def _progressing(self, future: asyncio.Future[_T]) -> _T:
        """Wait for `future`, but not beyond the time in which the engine should have moved."""
        began = time.monotonic()
        while not future.done():
            await asyncio.wait((future,), timeout=_POLL_S)
            idle = time.monotonic() - max(began, self._progress)
            if not future.done() and idle > self._settings.stall_timeout_s:
                raise EngineError(f"the engine has made no progress for {idle:.0f} s")
        return future.result()

    def _forget(self, request: Request) -> None:
        with self._lock:
            self._jobs.pop(request, None)
        self._posts.put(lambda: self._scheduler.cancel(request))

    # Below: the worker thread.

    def _work(self) -> None:
        """The worker's life. This is its supervisor's boundary: whatever stops it is handed to
        everyone who waits."""
        error: BaseException = EngineError("it was closed")
        try:
            torch.set_num_threads(self._settings.threads or usable_cores())
            while not self._stopping:
                self._take_posts()
                if not self._stopping and not self._paused and self._scheduler.busy:
                    self._step()
        except BaseException as caught:  # noqa: BLE001 (see the docstring)
            error = caught
        with self._lock:
            self._error = error
            jobs, self._jobs = list(self._jobs.values()), {}
            calls = list(self._calls)
        failure = EngineError(f"the engine has stopped: {error}")
        failure.__cause__ = error
        for loop, failed in _by_loop(jobs).items():
            _post(loop, _fail, failed, failure)
        for call in calls:
            if not call.done():
                call.set_exception(failure)

    def _take_posts(self) -> None:
        """Run what was posted; wait for a post when there is nothing else to do."""
        idle = self._paused or not self._scheduler.busy
        while True:
            try:
                action = self._posts.get(block=idle)
            except queue.Empty:
                return
            action()
            self._progress = time.monotonic()
            idle = (self._paused or not self._scheduler.busy) and not self._stopping

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _stop(self) -> None:
        self._stopping = True

    def _apply(self, update: Update) -> None:
        self._model.load(update.tensors)
        self._scheduler.weights_changed(recompute=self._settings.on_update == "recompute")
        self._version = update.version

    def _step(self) -> None:
        """One forward pass, one token for every slot whose context is complete."""
        began = time.perf_counter()
        self._scheduler.admit()
        decode, chunks = self._scheduler.plan(self._settings.prefill_chunk)
        logits = self._model.step(decode, chunks)
        work = [*decode, *chunks]
        self._scheduler.advance(work)
        self.counters.steps += 1
        self.counters.tokens_fed += sum(item.count for item in work)
        slots = [item.slot for item in work if item.complete]
        if slots:
            self._sample(slots, logits)
        self.counters.busy_s += time.perf_counter() - began
        self._progress = time.monotonic()

    def _sample(self, slots: Sequence[Slot], logits: torch.Tensor) -> None:
        requests = [slot.request for slot in slots if slot.request is not None]
        drawn = self._model.sample(
            logits,
            [request.sampling.temperature for request in requests],
            [request.uniform() for request in requests],
        )
        version = self._version.encode()
        news: list[tuple[_Job, int, Completion | EngineError | None]] = []
        for slot, request, token, logprob in zip(
            slots, requests, drawn.ids, drawn.logprobs, strict=True
        ):
            end: Completion | EngineError | None
            if math.isfinite(logprob):
                end = self._scheduler.append(slot, token, logprob, version)
                self.counters.tokens_sampled += 1
            else:
                end = EngineError(f"the logits of policy version {self._version} are not finite")
                self._scheduler.release(slot)
            if end is not None:
                self.counters.tokens_cached += request.cached
            with self._lock:
                job = self._jobs.get(request) if end is None else self._jobs.pop(request, None)
            if job is not None:
                news.append((job, token, end))
        by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = defaultdict(list)
        for item in news:
            if item[0].on_token is not None or item[2] is not None:
                by_loop[item[0].loop].append(item)
        for loop, items in by_loop.items():
            _post(loop, _deliver, items)


def _by_loop(jobs: Sequence[_Job]) -> dict[asyncio.AbstractEventLoop, list[_Job]]:
    grouped: dict[asyncio.AbstractEventLoop, list[_Job]] = defaultdict(list)
    for job in jobs:
        grouped[job.loop].append(job)
    return grouped


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Run `function` in the event loop. A loop that is closed waits for nothing any more."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _deliver(items: Sequence[tuple[_Job, int, Completion | EngineError | None]]) -> None:
    """In the event loop: hand over sampled tokens and ends, in order."""
    for job, token, end in items:
        if job.done.done():
            continue
        if isinstance(end, EngineError):
            job.done.set_exception(end)
            continue
        try:
            if job.on_token is not None:
                job.on_token(token)
        except Exception as error:  # noqa: BLE001 (the callback's error belongs to its caller)
            job.done.set_exception(error)
        else:
            if end is not None:
                job.done.set_result(end)


def _fail(jobs: Sequence[_Job], failure: EngineError) -> None:
    for job in jobs:
        if not job.done.done():
            job.done.set_exception(failure)
