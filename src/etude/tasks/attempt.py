"""An attempt: one agent session on one task, graded. Practice and evaluation use the same."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import AnyTool
from etude.errors import EtudeError
from etude.inference.protocol import Engine
from etude.models.renderer import Renderer
from etude.records import StopReason, Trajectory, Verdict
from etude.reward.settings import RewardSettings
from etude.reward.terms import reward
from etude.sandbox.protocol import Sandbox, Workspace
from etude.store import RolloutKey, RunStore
from etude.tasks.grading import Grader
from etude.tasks.repository import Repository
from etude.tasks.task import Task

_TOLERATED_FAILURES = 8
"""Unmeasured attempts in a row after which something is broken, not unlucky."""
_TRIES = 3
"""How often an attempt is made before it is stored as not measured."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to make: where its result is stored, the task, and the seed of its sampling."""

    key: RolloutKey
    task: Task
    seed: int


def attempt_seed(run_seed: int, key: RolloutKey) -> int:
    """A seed that belongs to the attempt, not to the order in which attempts happen to run."""
    digest = hashlib.sha256(f"{run_seed}/{key}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Attempts:
    """Makes attempts, many at a time, and stores each as soon as it is graded."""

    def __init__(
        self,
        *,
        repository: Repository,
        sandbox: Sandbox,
        grader: Grader,
        engine: Engine,
        renderer: Renderer,
        session: SessionSettings,
        tools: Sequence[AnyTool],
        reward: RewardSettings,
        concurrency: int,
    ) -> None:
        self._repository = repository
        self._sandbox = sandbox
        self._grader = grader
        self._engine = engine
        self._renderer = renderer
        self._session = session
        self._tools = tools
        self._reward = reward
        self._concurrency = concurrency

    async def session(self, task: Task, *, seed: int, session_id: str) -> Trajectory:
        """One session in a fresh workspace, not graded yet."""

        async def workspace() -> Workspace:
            made = await self._sandbox.create(self._repository.image())
            try:
                for path, text in task.files.items():
                    await made.write(path, text.encode())
            except BaseException:
                await made.close()
                raise
            return made

        settings = self._session.model_copy(
            update={"max_turns": task.max_turns, "ends_after_max_turns": True, "seed": seed}
        )
        session = Session(
            TokenPolicy(self._engine, self._renderer),
            workspace,
            self._tools,
            settings,
            session_id=session_id,
            task_id=task.id,
        )
        return await session.run(task.prompt)

    async def graded(self, task: Task, trajectory: Trajectory) -> tuple[Trajectory, Verdict]:
        """The session with the verdict on what it left behind and its reward; the verdict."""
        outcome = trajectory.outcome
        if outcome.stop is StopReason.ERROR:
            verdict = Verdict(None, f"the session failed: {outcome.detail}")
        else:
            verdict = await self._grader.grade(task, outcome.changes)
        outcome = replace(outcome, verdict=verdict)
        outcome = replace(outcome, reward=reward(outcome, self._reward))
        return replace(trajectory, outcome=outcome), verdict

    async def collect(
        self,
        plan: Sequence[Attempt],
        store: RunStore,
        on_done: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Make every attempt of the plan that the store does not hold yet.

        One that cannot be measured is made again, three times in all. Attempts start in the plan's
        order, so siblings of a group stand together and share their prompt in the engine. `on_done`
        is called with the number now stored. Raises EtudeError when attempt after attempt cannot be
        measured; those are not stored, so a resumed run makes them again.
        """
        missing = [item for item in plan if not store.has_rollout(item.key)]
        done = len(plan) - len(missing)
        on_done(done)
        failures = 0
        gate = asyncio.Semaphore(self._concurrency)

        async def once(item: Attempt) -> tuple[Trajectory, Verdict]:
            nonlocal failures
            async with gate:
                trajectory = await self.session(item.task, seed=item.seed, session_id=str(item.key))
            # Grading has its own workers; the engine's batch is filled again meanwhile.
            trajectory, verdict = await self.graded(item.task, trajectory)
            failures = 0 if verdict.measured else failures + 1
            if failures >= _TOLERATED_FAILURES:
                raise EtudeError(
                    f"{failures} attempts in a row could not be measured; the last one:"
                    f" {verdict.reason}"
                )
            return trajectory, verdict

        async def one(item: Attempt) -> None:
            nonlocal done
            trajectory, verdict = await once(item)
            tries = 1
            while not verdict.measured and tries < _TRIES:
                trajectory, verdict = await once(item)
                tries += 1
            store.put_rollout(item.key, trajectory)
            done += 1
            on_done(done)

        try:
            async with asyncio.TaskGroup() as group:
                for item in missing:
                    group.create_task(one(item))
        except BaseExceptionGroup as errors:
            # The siblings were cancelled because of the first; it is the one to be told.
            raise errors.exceptions[0] from None
