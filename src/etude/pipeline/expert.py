"""The scripted expert: warm-up transcripts, and what the model thinks of reference answers.

The expert says the restored line before it calls the tool. A small model that writes the line goes
on from the line's own beginning, which it does far better than naming a bare expression, and copies
the expression from there into the call (`docs/lab-notes.md`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np

from etude.agent.expert import expert_engine
from etude.agent.prompts import SYSTEM_PROMPT
from etude.agent.tools import AnyTool
from etude.errors import EtudeError
from etude.inference.protocol import Engine
from etude.models.renderer import Renderer, ToolSpec
from etude.progress import Progress, metered
from etude.store import RolloutKey, RunStore
from etude.tasks.attempt import Attempt, Attempts
from etude.tasks.task import Task
from etude.training.batch import Sequence as TokenSequence
from etude.training.sft import sft_sequences
from etude.training.trainer import Trainer

_PHASE = "expert"
_AT_ONCE = 8
_CHUNK = 8


async def expert_sequences(
    tasks: Sequence[Task],
    *,
    attempts: Callable[[Engine], Attempts],
    renderer: Renderer,
    tools: Sequence[AnyTool],
    store: RunStore,
    progress: Progress,
) -> list[TokenSequence]:
    """Let the expert solve `tasks` in the real harness and sandbox, graded like anybody, and take
    the transcripts that passed as training text. Raises EtudeError when none did."""
    specs = [tool.spec() for tool in tools]
    gate = asyncio.Semaphore(_AT_ONCE)
    passed: list[TokenSequence] = []
    reason = ""

    async def one(task: Task) -> None:
        nonlocal reason
        key = RolloutKey(_PHASE, 0, task.id, 0)
        call = ("edit", task.answer.model_dump())
        engine = expert_engine(renderer, [call], specs, texts=[task.restored_lines()])
        async with gate:
            await attempts(engine).collect([Attempt(key, task, 0)], store)
        verdict = store.rollout(key).outcome.verdict
        if verdict is not None and verdict.score != 1.0:
            reason = verdict.reason
        done.append(task)
        meter.update(len(done))

    done: list[Task] = []
    with metered(progress, "expert transcripts", len(tasks), "tasks") as meter:
        await asyncio.gather(*(one(task) for task in tasks))
    # In the order of the tasks, not of their ends, so that a seed gives one training run.
    for task in tasks:
        trajectory = store.rollout(RolloutKey(_PHASE, 0, task.id, 0))
        verdict = trajectory.outcome.verdict
        if verdict is not None and verdict.score == 1.0:
            passed += sft_sequences(trajectory)
    if not passed:
        raise EtudeError(f"the reference answer of no warm-up task passed: {reason}")
    return passed


def reference_likelihoods(
    tasks: Sequence[Task],
    trainer: Trainer,
    renderer: Renderer,
    tools: Sequence[AnyTool],
    temperature: float,
    progress: Progress,
) -> dict[str, float]:
    """Probability, by task id, that the policy answers with exactly the reference edit: a lower
    bound of its pass rate that costs one forward pass instead of a group of rollouts."""
    specs = [tool.spec() for tool in tools]
    result: dict[str, float] = {}
    with metered(progress, "screen tasks", len(tasks), "tasks") as meter:
        for start in range(0, len(tasks), _CHUNK):
            chunk = tasks[start : start + _CHUNK]
            sequences: list[TokenSequence] = []
            for task in chunk:
                sequences.append(_plain(*reference_turn(task, renderer, specs), temperature))
            wanted = [s.cross_entropy != 0 for s in sequences]
            for task, logprobs in zip(chunk, trainer.logprobs(sequences, wanted), strict=True):
                result[task.id] = math.exp(float(np.nansum(logprobs)))
            meter.update(start + len(chunk))
    return result


def reference_turn(
    task: Task, renderer: Renderer, specs: Sequence[ToolSpec]
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt that a policy is given, and of the turn in which the expert answers."""
    prompt = renderer.open(SYSTEM_PROMPT, specs, task.prompt)
    call = ("edit", task.answer.model_dump())
    return list(prompt), list(renderer.expert(task.restored_lines(), [call], specs))


def _plain(prompt: Sequence[int], answer: Sequence[int], temperature: float) -> TokenSequence:
    count = len(prompt) + len(answer)
    weight = np.zeros(count, np.float32)
    weight[len(prompt) :] = 1.0
    zeros, unknown = np.zeros(count, np.float32), np.full(count, np.nan, np.float32)
    ids = np.array([*prompt, *answer], np.int32)
    # Greedy sampling (0) is recorded at temperature 1, as everywhere.
    return TokenSequence(ids, zeros, weight, zeros, unknown, unknown, temperature or 1.0)
