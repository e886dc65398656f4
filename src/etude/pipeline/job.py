"""The main job: tasks, evaluation, pretraining, warm-up, practice, evaluation.

Every phase looks at what the run holds already and does the rest, so starting, resuming and
repeating are the same call.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from etude.agent.tools import tools_named
from etude.errors import EtudeError
from etude.inference.engine import TorchEngine
from etude.inference.protocol import Engine
from etude.inference.scripted import ScriptedEngine
from etude.machine import machine
from etude.models.dialects.choose import renderer_for
from etude.models.pull import ensure_model
from etude.pipeline.checkpoints import Checkpoints
from etude.pipeline.corpus import heldout_loss, pretraining_sequences
from etude.pipeline.expert import expert_sequences, reference_likelihoods, reference_turn
from etude.pipeline.preflight import check_room
from etude.pipeline.run import Run
from etude.pipeline.summary import Summary, evaluation_phase, summarize
from etude.pipeline.supervise import supervise
from etude.pipeline.workbench import Bench, find_or_make_tasks, open_bench
from etude.progress import Progress, metered
from etude.records import PolicyVersion
from etude.rl.curriculum import Curriculum
from etude.rl.practice import PHASE, Ledger, Practice
from etude.store import RolloutKey
from etude.tasks.attempt import Attempt, Attempts, attempt_seed
from etude.tasks.library import Library
from etude.tasks.task import Split, Task
from etude.training.trainer import Trainer

_WARM = PolicyVersion(0, 1)
"""Version of the weights with which practice begins; (0, 0) are the untrained ones."""


async def main_job(run: Run, progress: Progress) -> Summary:
    """Run, or go on with, everything that the recipe asks for. Returns what it came to."""
    _record_facts(run)
    recipe = run.recipe
    async with timed(run, "model"):
        folder = await asyncio.to_thread(ensure_model, recipe.model, progress=progress.say)
    check_room(run.folder, folder)
    tasks = run.folder / "tasks"
    async with open_bench(recipe, progress, tasks=tasks, timer=timed(run, "repository")) as bench:
        async with timed(run, "tasks"):
            library = await find_or_make_tasks(bench, recipe, tasks, progress)
        engine = TorchEngine(folder, recipe.engine)
        try:
            await _Phases(run, progress, bench, library, engine, folder).all()
        finally:
            await engine.close()
    return summarize(run)


class _Phases:
    """The phases of one run over the same tools, in order."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        bench: Bench,
        library: Library,
        engine: TorchEngine,
        folder: Path,
    ) -> None:
        self.run = run
        self.progress = progress
        self.bench = bench
        self.library = library
        self.engine = engine
        self.folder = folder
        self.renderer = renderer_for(folder)
        self.checkpoints = Checkpoints(run.folder / "checkpoints")

    async def all(self) -> None:
        """Everything that is not done yet."""
        await asyncio.to_thread(self.check_context)
        await self.evaluate("before")
        trainer = await asyncio.to_thread(Trainer, self.folder, self.run.recipe.trainer)
        newest = self.checkpoints.newest()
        if newest is not None:
            await asyncio.to_thread(trainer.load, newest.folder)
        await self.pretrain(trainer)
        await self.warm_up(trainer)
        await self.engine.apply(trainer.update(self._ledger().version))
        await self.evaluate("warmup")
        await self.practise(trainer)
        await self.evaluate("after")
        async with timed(self.run, "export"):
            await asyncio.to_thread(trainer.export, self.run.path("models", "final"))

    def tasks(self, split: Split) -> list[Task]:
        """Tasks of one split, in the library's order."""
        return [task for task in self.library.tasks if task.split is split]

    def attempts(self, engine: Engine) -> Attempts:
        """Attempts by any policy, in the harness that everybody uses. A script that ends by
        itself is not cut at the length that a model may babble."""
        recipe = self.run.recipe
        session = recipe.session
        if isinstance(engine, ScriptedEngine):
            session = session.model_copy(update={"max_turn_tokens": engine.context_length})
        return Attempts(
            repository=self.bench.repository,
            sandbox=self.bench.sandbox,
            grader=self.bench.grader,
            engine=engine,
            renderer=self.renderer,
            session=session,
            tools=tools_named(recipe.tools),
            reward=recipe.reward,
            concurrency=recipe.concurrency.rollouts,
        )

    def check_context(self) -> None:
        """Raise EtudeError when no held-out task fits into the context with its reference answer:
        whatever the policy, every rollout would be cut. Tell when only some do not."""
        tasks, length = self.tasks(Split.HELDOUT), self.engine.context_length
        specs = [tool.spec() for tool in tools_named(self.run.recipe.tools)]
        sizes = [sum(map(len, reference_turn(task, self.renderer, specs))) for task in tasks]
        long = sum(size > length for size in sizes)
        if long == len(tasks):
            raise EtudeError(
                f"no held-out task can be answered in {length} tokens: with its answer the shortest"
                f" takes {min(sizes)}; raise [engine] max_context in the recipe, within what the"
                " model itself can take"
            )
        if long:
            self.progress.say(
                f"{long} of {len(tasks)} held-out tasks do not fit into {length} tokens with their"
                " reference answer; a larger [engine] max_context would let them count"
            )

    async def evaluate(self, name: str) -> None:
        """Every held-out task, `samples` times. The same seeds each time: paired."""
        phase = evaluation_phase(name)
        store, recipe = self.run.store, self.run.recipe
        if store.get(f"done/{phase}"):
            return
        plan: list[Attempt] = []
        for task in self.tasks(Split.HELDOUT):
            for sample in range(recipe.evaluation.samples):
                key = RolloutKey(phase, 0, task.id, sample)
                seed = attempt_seed(recipe.seed, RolloutKey("eval", 0, task.id, sample))
                plan.append(Attempt(key, task, seed))
        async with timed(self.run, phase):
            with metered(self.progress, f"evaluate {name}", len(plan), "rollouts") as meter:
                await self.attempts(self.engine).collect(plan, store, meter.update)
        if all(row.score is None for row in store.rollouts(phase)):
            raise EtudeError(f"no rollout of the evaluation {name!r} could be measured")
        store.put(f"done/{phase}", True)

    async def pretrain(self, trainer: Trainer) -> None:
        """Continued pretraining on the repository without its held-out functions."""
        if self.checkpoints.over("pretrain"):
            return
        recipe = self.run.recipe
        sequences = pretraining_sequences(self.bench.repository, recipe, self.folder)
        async with timed(self.run, "pretrain"):
            await supervise(
                "pretrain",
                sequences,
                trainer=trainer,
                budget=recipe.pretrain,
                seed=recipe.seed,
                store=self.run.store,
                checkpoints=self.checkpoints,
                progress=self.progress,
                heldout_loss=heldout_loss(self.bench.repository, recipe, self.folder, trainer),
            )

    async def warm_up(self, trainer: Trainer) -> None:
        """Fine-tuning on what a scripted expert does with the warm-up tasks."""
        if self.checkpoints.over("warmup"):
            return
        recipe = self.run.recipe
        async with timed(self.run, "expert"):
            sequences = await expert_sequences(
                self.tasks(Split.WARMUP),
                attempts=self.attempts,
                renderer=self.renderer,
                tools=tools_named(recipe.tools),
                store=self.run.store,
                progress=self.progress,
            )
        if self.checkpoints.step("warmup") == 0:
            trainer.restart()
        async with timed(self.run, "warmup"):
            await supervise(
                "warmup",
                sequences,
                trainer=trainer,
                budget=recipe.warmup,
                seed=recipe.seed,
                store=self.run.store,
                checkpoints=self.checkpoints,
                progress=self.progress,
            )

    async def practise(self, trainer: Trainer) -> None:
        """Group policy gradient on practice tasks."""
        if self.checkpoints.over(PHASE):
            return
        recipe, store = self.run.recipe, self.run.store
        tasks = self.tasks(Split.PRACTICE)
        if self.checkpoints.step(PHASE) == 0:
            trainer.restart()
        prior = store.get("prior")
        if prior is None:
            async with timed(self.run, "screen"):
                prior = await asyncio.to_thread(
                    reference_likelihoods,
                    tasks,
                    trainer,
                    self.renderer,
                    tools_named(recipe.tools),
                    recipe.session.temperature,
                    self.progress,
                )
            store.put("prior", prior)

        async def commit(ledger: Ledger, final: bool = False) -> None:
            await asyncio.to_thread(
                self.checkpoints.commit,
                trainer,
                PHASE,
                ledger.step,
                final=final,
                ledger={"trained": list(ledger.trained), "version": list(ledger.version)},
            )

        practice = Practice(
            tasks,
            curriculum=Curriculum(
                prior,
                strength=recipe.practice.prior_strength,
                passes=recipe.practice.passes,
                seed=recipe.seed,
            ),
            attempts=self.attempts(self.engine),
            engine=self.engine,
            trainer=trainer,
            store=store,
            settings=recipe.practice,
            seed=recipe.seed,
            ledger=self._ledger(),
            commit=commit,
        )
        async with timed(self.run, PHASE):
            if not await practice.run(self.progress):
                store.put(f"cut/{PHASE}", True)
            await commit(practice.ledger, final=True)

    def _ledger(self) -> Ledger:
        newest = self.checkpoints.newest()
        if newest is None or newest.phase != PHASE:
            return Ledger(0, (), _WARM)
        data = newest.ledger
        return Ledger(newest.step, tuple(data["trained"]), PolicyVersion(*data["version"]))


@asynccontextmanager
async def timed(run: Run, name: str) -> AsyncGenerator[None]:
    """Add the time that the block takes to the phase's, over all resumptions."""
    began = time.monotonic()
    try:
        yield
    finally:
        phases: dict[str, float] = run.store.get("phases") or {}
        phases[name] = phases.get(name, 0.0) + time.monotonic() - began
        run.store.put("phases", phases)


def _record_facts(run: Run) -> None:
    """What a reader needs in order to do it again; recorded once, at the start."""
    if run.store.get("facts") is not None:
        return
    recipe = run.recipe
    packages = ("etude", "torch", "transformers")
    run.store.put(
        "facts",
        {
            "source": recipe.source,
            "model": recipe.model,
            "recipe": recipe.name,
            "seed": recipe.seed,
            "temperature": recipe.session.temperature,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": shlex.join(["etude", *sys.argv[1:]]),
            "machine": str(machine()),
            "versions": ", ".join(f"{name} {version(name)}" for name in packages),
        },
    )
