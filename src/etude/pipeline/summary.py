"""What a run came to, gathered from its store alone, so that a report can be made at any time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from etude.evaluation.score import Score, gain, score
from etude.evaluation.statistics import Estimate
from etude.pipeline.run import Run
from etude.records import Trajectory
from etude.store import RolloutRow

EVALUATIONS = {
    "before": "before",
    "warmup": "after warm-up",
    "after": "after practice",
}
"""Phase suffix of each held-out evaluation → how the table calls it."""


@dataclass(frozen=True)
class Summary:
    """Figures of a run. `scores` holds the evaluations that were finished, in order; `gains` the
    paired differences in held-out pass@1 between them; `phases` seconds by phase; `cut` the
    phases that their time ceiling ended before their plan was done."""

    scores: dict[str, Score]
    gains: dict[str, Estimate]
    phases: dict[str, float]
    cut: tuple[str, ...]
    practice: list[dict[str, Any]]
    losses: dict[str, list[dict[str, Any]]]
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `--json` and for programs."""
        return asdict(self)


def evaluation_phase(name: str) -> str:
    """Phase name under which the rollouts of an evaluation are stored."""
    return f"eval-{name}"


def summarize(run: Run) -> Summary:
    """Gather what is there; a run that is not finished gives what it has so far."""
    store = run.store
    scores: dict[str, Score] = {}
    for name in EVALUATIONS:
        if store.get(f"done/{evaluation_phase(name)}"):
            scores[name] = score(store.rollouts(evaluation_phase(name)), run.recipe.seed)
    names = list(scores)
    pairs = [(later, earlier) for i, later in enumerate(names) for earlier in names[:i]]
    gains = {
        f"{later} - {earlier}": gain(scores[later], scores[earlier], run.recipe.seed)
        for later, earlier in pairs
    }
    phases: dict[str, float] = store.get("phases") or {}
    cut = tuple(name for name in phases if store.get(f"cut/{name}"))
    return Summary(
        scores=scores,
        gains=gains,
        phases=phases,
        cut=cut,
        practice=store.metrics("practice"),
        losses={name: store.metrics(name) for name in ("pretrain", "warmup")},
        facts=store.get("facts") or {},
    )


def showcase(run: Run) -> list[tuple[str, Trajectory]]:
    """One held-out task through each evaluation, the same sample: where there is one, a task that
    the first policy failed and the last one solved, else the first task. (title, session)."""
    done = [n for n in EVALUATIONS if run.store.get(f"done/{evaluation_phase(n)}")]
    if not done:
        return []
    rows = {n: _by_sample(run.store.rollouts(evaluation_phase(n))) for n in done}
    shared = sorted(set.intersection(*(set(r) for r in rows.values())))
    if not shared:
        return []
    first, last = rows[done[0]], rows[done[-1]]
    learnt = [k for k in shared if last[k].score == 1.0 and first[k].score != 1.0]
    chosen = (learnt or shared)[0]
    return [(EVALUATIONS[n], run.store.rollout(rows[n][chosen].key)) for n in done]


def _by_sample(rows: list[RolloutRow]) -> dict[tuple[str, int], RolloutRow]:
    return {(row.key.task_id, row.key.sample): row for row in rows}
