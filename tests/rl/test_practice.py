"""The learning loop with real rollouts, grading and training; only the policy is scripted.

The scripted policy answers right or wrong by the attempt's seed, so that groups are mixed and the
trainer really steps. The loop is broken off at every kind of moment and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from etude.agent.prompts import SYSTEM_PROMPT
from etude.agent.settings import SessionSettings
from etude.agent.tools import tools_named
from etude.inference.protocol import Sampling
from etude.inference.scripted import ScriptedEngine
from etude.models.dialects.hermes import HermesRenderer
from etude.models.tiny import make_tiny
from etude.pipeline.checkpoints import Checkpoints
from etude.progress import Silent
from etude.records import PolicyVersion, Verdict
from etude.reward.settings import RewardSettings
from etude.rl.curriculum import Curriculum
from etude.rl.practice import PHASE, Ledger, Practice
from etude.rl.settings import PracticeSettings
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.store import RunStore
from etude.tasks.attempt import Attempts
from etude.tasks.repository import Repository
from etude.tasks.task import Edit, Rung, Split, Task
from etude.training.settings import TrainerSettings
from etude.training.trainer import Trainer

SETTINGS = PracticeSettings(steps=3, minutes=5, groups_per_step=2, group_size=4)
TASKS = 6


class Equality:
    """A grader that compares with the reference text: what grading proper does is tested in
    `tests/tasks`; here only its verdicts matter."""

    async def grade(self, task: Task, changes: dict[str, str | None]) -> Verdict:
        right = changes.get(task.path) == task.reference[task.path]
        return Verdict(float(right), "compared")


class World:
    """One repository of six one-line tasks, a tiny model, and a run folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        repository = root / "repository"
        repository.mkdir()
        self.tasks = []
        for index in range(TASKS):
            path, right = f"m{index}.py", f"x = {index} + {index}\n"
            (repository / path).write_text(right)
            self.tasks.append(
                Task(
                    id=f"task-{index}",
                    repository="r",
                    kind="feature-deletion",
                    rung=Rung.EXPRESSION,
                    split=Split.PRACTICE,
                    path=path,
                    function=f"{path}::x",
                    prompt=f"{path}: put back what is MISSING.",
                    files={path: "x = MISSING\n"},
                    reference={path: right},
                    answer=Edit(path=path, old="MISSING", new=f"{index} + {index}"),
                    target_tests=["t"],
                    allowed_paths=[path],
                )
            )
        self.repository = Repository(
            key="r",
            name="r",
            source="r",
            root=repository,
            env=root / "env",
            source_files=(),
            test_files=(),
            tests=("t",),
            suite_seconds=0.1,
        )
        (root / "env").mkdir()
        self.model = make_tiny(root / "model")
        self.renderer = HermesRenderer.from_folder(self.model)
        self.sampled: list[tuple[str, int]] = []
        self.run = root / "run"

    def engine(self, version: PolicyVersion) -> ScriptedEngine:
        specs = [tool.spec() for tool in tools_named(["edit"])]
        by_prompt = {
            tuple(self.renderer.open(SYSTEM_PROMPT, specs, task.prompt)): task
            for task in self.tasks
        }

        def answer(prompt: Sequence[int], sampling: Sampling) -> Sequence[int]:
            task = by_prompt[tuple(prompt)]
            self.sampled.append((task.id, sampling.seed))
            edit = task.answer.model_dump()
            if sampling.seed % 2:
                edit["new"] = "None"
            return self.renderer.expert("", [("edit", edit)])

        return ScriptedEngine(answer, version=version)

    async def practise(self, *, break_at: int | None = None, when: str = "") -> Trainer:
        """Practise from the newest checkpoint; break off around the commit of step `break_at`."""
        store = RunStore(self.run)
        checkpoints = Checkpoints(self.run / "checkpoints")
        trainer = Trainer(self.model, TrainerSettings(dtype="float32"))
        newest = checkpoints.newest()
        ledger = Ledger(0, (), PolicyVersion(0, 1))
        if newest is not None:
            trainer.load(newest.folder)
            trained, version = newest.ledger["trained"], newest.ledger["version"]
            ledger = Ledger(newest.step, tuple(trained), PolicyVersion(*version))
        engine = self.engine(ledger.version)

        async def commit(ledger: Ledger) -> None:
            if ledger.step == break_at and when == "before":
                raise KeyboardInterrupt
            record = {"trained": list(ledger.trained), "version": list(ledger.version)}
            checkpoints.commit(trainer, PHASE, ledger.step, ledger=record)
            if ledger.step == break_at and when == "after":
                raise KeyboardInterrupt

        sandbox = BubblewrapSandbox()
        try:
            attempts = Attempts(
                repository=self.repository,
                sandbox=sandbox,
                grader=Equality(),  # type: ignore[arg-type]
                engine=engine,
                renderer=self.renderer,
                session=SessionSettings(max_turn_tokens=256),
                tools=tools_named(["edit"]),
                reward=RewardSettings(),
                concurrency=4,
            )
            practice = Practice(
                self.tasks,
                curriculum=Curriculum({t.id: 0.5 for t in self.tasks}, strength=4),
                attempts=attempts,
                engine=engine,
                trainer=trainer,
                store=store,
                settings=SETTINGS,
                seed=0,
                ledger=ledger,
                commit=commit,
            )
            assert await practice.run(Silent())
            assert engine.version == practice.ledger.version
        finally:
            sandbox.close()
            store.close()
        return trainer


def check_record(world: World) -> None:
    """Each prompt trained once; each step's tokens of one version that rises by one a step."""
    store = RunStore(world.run)
    newest = Checkpoints(world.run / "checkpoints").newest()
    assert newest is not None
    trained = newest.ledger["trained"]
    assert trained and len(trained) == len(set(trained))
    rows = store.rollouts(PHASE)
    keys = [row.key for row in rows]
    assert len(keys) == len(set(keys)) == SETTINGS.steps * 8
    for step in range(SETTINGS.steps):
        versions = {
            version
            for row in store.rollouts(PHASE, step)
            for version in store.rollout(row.key).policy_versions
        }
        assert len(versions) == 1
        assert PolicyVersion.decode(versions.pop()).lineage == 0
    assert newest.ledger["version"][1] == 1 + sum(
        m["mixed_groups"] > 0 for m in store.metrics(PHASE)
    )
    assert len(store.metrics(PHASE)) == SETTINGS.steps


def test_practice_trains_each_prompt_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    trainer = asyncio.run(world.practise())
    check_record(world)
    fresh = Trainer(world.model, TrainerSettings(dtype="float32"))
    old, new = (t.update(PolicyVersion(0, 0)).tensors for t in (fresh, trainer))
    assert any(not np.array_equal(old[name].numpy(), new[name].numpy()) for name in old)
    assert trainer.steps == len({m["step"] for m in RunStore(world.run).metrics(PHASE)})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [1, 2])
def test_broken_off_at_a_commit_it_goes_on(tmp_path: Path, step: int, when: str) -> None:
    """Ended between rollouts and commit, or between commit and the engine's new weights: no
    rollout is made twice, and the weights are those of an unbroken run."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "whole").mkdir()
    broken, whole = World(tmp_path / "broken"), World(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(broken.practise(break_at=step, when=when))
    resumed = asyncio.run(broken.practise())
    unbroken = asyncio.run(whole.practise())
    check_record(broken)
    assert len(broken.sampled) == len(set(broken.sampled)) == len(whole.sampled)
    assert sorted(broken.sampled) == sorted(whole.sampled)
    left, right = (t.update(PolicyVersion(0, 0)).tensors for t in (resumed, unbroken))
    for name, tensor in left.items():
        assert np.array_equal(tensor.numpy(), right[name].numpy()), name
