"""Supervised phases (continued pretraining, warm-up): resumable to the step."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from etude.pipeline.checkpoints import Checkpoints
from etude.pipeline.recipe import Budget
from etude.progress import Progress, metered
from etude.store import RunStore
from etude.training.batch import Batch
from etude.training.batch import Sequence as TokenSequence
from etude.training.schedules import cosine
from etude.training.trainer import Trainer

_CHECKPOINT_EVERY_S = 60.0


def plan_steps(
    sequences: Sequence[TokenSequence], budget: Budget, seed: int
) -> list[tuple[TokenSequence, ...]]:
    """The batches of a phase, in order: every epoch is another shuffle, cut into steps of about
    `tokens_per_step`. A pure function of its arguments, so a resumed run takes the same path."""
    rng = np.random.default_rng(seed)
    total = budget.epochs * sum(len(s.ids) for s in sequences)
    stream: list[TokenSequence] = []
    tokens = 0
    while tokens < total:
        for index in rng.permutation(len(sequences)):
            if tokens >= total:
                break
            stream.append(sequences[index])
            tokens += len(sequences[index].ids)
    steps: list[tuple[TokenSequence, ...]] = []
    step: list[TokenSequence] = []
    size = 0
    for sequence in stream:
        step.append(sequence)
        size += len(sequence.ids)
        if size >= budget.tokens_per_step:
            steps.append(tuple(step))
            step, size = [], 0
    if step:
        steps.append(tuple(step))
    return steps


async def supervise(
    phase: str,
    sequences: Sequence[TokenSequence],
    *,
    trainer: Trainer,
    budget: Budget,
    seed: int,
    store: RunStore,
    checkpoints: Checkpoints,
    progress: Progress,
    heldout_loss: Callable[[], float] | None = None,
) -> None:
    """Train on `sequences` until the plan is done or its minutes are used up.

    The trainer must hold the phase's newest checkpoint, if there is one. `heldout_loss` is asked
    before the first step and after the last one.
    """
    steps = plan_steps(sequences, budget, seed)
    done = checkpoints.step(phase)
    store.drop_metrics(phase, done)
    rows = store.metrics(phase)
    spent = rows[-1]["elapsed"] if rows else 0.0
    before = await _measure(heldout_loss) if heldout_loss and not done else None
    began = saved = time.monotonic()
    with metered(progress, phase, len(steps), "steps") as meter:
        while done < len(steps):
            elapsed = spent + time.monotonic() - began
            if elapsed > 60 * budget.minutes:
                store.put(f"cut/{phase}", True)
                break
            rate = budget.learning_rate * cosine(
                (done + 0.5) / len(steps), warmup=budget.warmup_share, floor=0.1
            )
            metrics = await asyncio.to_thread(trainer.step, Batch(steps[done]), rate)
            figures = asdict(metrics) | {"elapsed": spent + time.monotonic() - began}
            if before is not None:
                figures["heldout_loss"] = before
                before = None
            store.put_metrics(phase, done, figures)
            done += 1
            meter.update(done, f"loss {metrics.loss:.3f}")
            if time.monotonic() - saved > _CHECKPOINT_EVERY_S:
                await asyncio.to_thread(checkpoints.commit, trainer, phase, done)
                saved = time.monotonic()
    if heldout_loss is not None and done:
        after = await _measure(heldout_loss)
        last = store.metrics(phase)[-1]
        store.put_metrics(phase, last.pop("step"), last | {"heldout_loss": after})
    await asyncio.to_thread(checkpoints.commit, trainer, phase, done, final=True)


async def _measure(heldout_loss: Callable[[], float]) -> float | None:
    value = await asyncio.to_thread(heldout_loss)
    return value if math.isfinite(value) else None
