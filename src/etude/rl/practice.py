"""The learning loop: choose tasks, roll out, grade, step, publish. It fits on one screen.

Sampling and training take turns here, so every token is sampled by the newest weights and nothing
is stale. What makes it resumable is an order: a rollout is stored when it is graded; a step is
committed (weights with the ledger of trained prompts) before the engine gets its weights. After a
crash the plan of the open step is read back, its stored rollouts are kept, the rest are rolled by
the same policy version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from etude.inference.protocol import Engine
from etude.progress import Progress, metered
from etude.records import PolicyVersion
from etude.rl.curriculum import Curriculum
from etude.rl.groups import Group, make_batch, make_group
from etude.rl.settings import PracticeSettings
from etude.store import RolloutKey, RunStore
from etude.tasks.attempt import Attempt, Attempts, attempt_seed
from etude.tasks.task import Task
from etude.training.metrics import StepMetrics
from etude.training.schedules import constant
from etude.training.trainer import Trainer

PHASE = "practice"


@dataclass(frozen=True)
class Ledger:
    """What the surviving weights were trained on: finished loop steps, the prompts trained on
    (each at most `passes` times), and the version of the weights that came of it."""

    step: int
    trained: tuple[str, ...]
    version: PolicyVersion


class Commit(Protocol):
    """Makes a step durable: weights and ledger in one atomic act."""

    def __call__(self, ledger: Ledger) -> Awaitable[None]: ...


class Practice:
    """Practice of one trainer and one engine on a set of tasks, from a ledger onwards."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        curriculum: Curriculum,
        attempts: Attempts,
        engine: Engine,
        trainer: Trainer,
        store: RunStore,
        settings: PracticeSettings,
        seed: int,
        ledger: Ledger,
        commit: Commit,
    ) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._curriculum = curriculum
        self._attempts = attempts
        self._engine = engine
        self._trainer = trainer
        self._store = store
        self._settings = settings
        self._seed = seed
        self._ledger = ledger
        self._commit = commit
        curriculum.trained(ledger.trained)
        for step in range(ledger.step):
            self._observe(self._groups(step))

    @property
    def ledger(self) -> Ledger:
        """What has been committed so far."""
        return self._ledger

    async def run(self, progress: Progress) -> bool:
        """Practise until the plan is done. Returns False when the minutes ended it earlier."""
        spent = self._elapsed()
        began = time.monotonic()
        plan = self._settings.steps
        with metered(progress, PHASE, plan, "steps") as meter:
            for step in range(self._ledger.step, plan):
                elapsed = spent + time.monotonic() - began
                # A step that would not end in time is not begun.
                if elapsed + elapsed / max(step, 1) > 60 * self._settings.minutes:
                    return False
                if not self._plan(step):
                    progress.say("every practice task has been trained on; practice ends here")
                    break
                figures = await self._step(
                    step, spent - began, lambda done, at=step: meter.update(at + done)
                )
                meter.update(
                    step + 1,
                    f"reward {figures['mean_reward']:.2f}, {figures['mixed_groups']} of"
                    f" {figures['groups']} groups mixed",
                )
        return True

    async def _step(
        self, step: int, clock: float, on_progress: Callable[[float], None]
    ) -> dict[str, Any]:
        settings = self._settings
        began = time.monotonic()
        plan = [
            self._attempt(step, name, sample)
            for name in self._plan(step)
            for sample in range(settings.group_size)
        ]
        await self._attempts.collect(
            plan, self._store, lambda done: on_progress(0.7 * done / len(plan))
        )
        rolled = time.monotonic()
        groups = self._groups(step)
        self._observe(groups)
        teaching = [group for group in groups if group.teaches]
        metrics: StepMetrics | None = None
        if teaching:
            constant_ = settings.groups_per_step * settings.group_size * settings.tokens_per_rollout
            batch = make_batch(teaching, float(constant_))
            rate = settings.learning_rate * constant(
                (step + 1) / settings.steps, warmup=settings.warmup_steps / settings.steps
            )
            metrics = await asyncio.to_thread(self._trainer.step, batch, rate)
        figures = self._figures(groups, metrics)
        now = time.monotonic()
        figures |= {
            "elapsed": clock + now,
            "rollout_seconds": rolled - began,
            "train_seconds": now - rolled,
        }
        self._store.put_metrics(PHASE, step, figures)
        if teaching:
            await self._publish(step, [group.task_id for group in teaching])
        return figures

    async def _publish(self, step: int, task_ids: Sequence[str]) -> None:
        """Commit first, then let the engine sample with what was committed."""
        lineage, n = self._ledger.version
        version = PolicyVersion(lineage, n + 1)
        self._curriculum.trained(task_ids)
        self._ledger = Ledger(step + 1, (*self._ledger.trained, *task_ids), version)
        await self._commit(self._ledger)
        await self._engine.apply(self._trainer.update(version))

    def _plan(self, step: int) -> list[str]:
        """Task ids of a step; chosen once, then read back."""
        key = f"plan/{PHASE}/{step}"
        plan: list[str] | None = self._store.get(key)
        if plan is None:
            plan = self._curriculum.choose(self._settings.groups_per_step)
            self._store.put(key, plan)
        return plan

    def _attempt(self, step: int, task_id: str, sample: int) -> Attempt:
        key = RolloutKey(PHASE, step, task_id, sample)
        return Attempt(key, self._tasks[task_id], attempt_seed(self._seed, key))

    def _groups(self, step: int) -> list[Group]:
        return [
            make_group(
                name,
                [
                    self._store.rollout(RolloutKey(PHASE, step, name, sample))
                    for sample in range(self._settings.group_size)
                ],
            )
            for name in self._plan(step)
        ]

    def _observe(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._curriculum.observe(group.task_id, group.passed, len(group.trajectories))

    def _elapsed(self) -> float:
        return max((float(row["elapsed"]) for row in self._store.metrics(PHASE)), default=0.0)

    def _figures(self, groups: Sequence[Group], metrics: StepMetrics | None) -> dict[str, Any]:
        rollouts = [t for group in groups for t in group.trajectories]
        sampled = sum(segment.sampled for t in rollouts for segment in t.segments)
        return {
            "groups": len(groups),
            "mixed_groups": sum(group.teaches for group in groups),
            "solved_mixed": sum(0 < group.passed < len(group.trajectories) for group in groups),
            "rollouts": len(rollouts),
            "mean_reward": _mean([r for group in groups for r in group.rewards]),
            "pass_rate": _mean(
                [group.passed / len(group.trajectories) for group in groups if group.trajectories]
            ),
            "valid_rate": _mean([float(t.outcome.valid_call) for t in rollouts]),
            "sampled_tokens": sampled,
            "entropy": metrics.entropy if metrics else None,
            "grad_norm": metrics.grad_norm if metrics else None,
            "mismatch_mean": metrics.log_omega_mean if metrics else None,
            "mismatch_p99": metrics.log_omega_p99 if metrics else None,
            "mismatch_max": metrics.log_omega_max if metrics else None,
            "trained_tokens": metrics.policy_tokens if metrics else 0,
            "computed_nodes": metrics.nodes if metrics else 0,
        }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
