"""One view of a session's record, whether it lies in a log or in a trajectory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etude.agent.log import LoggedSession
from etude.agent.tools.text import clean
from etude.records import Event, EventKind, Float32, Int32, Int64, Trajectory

_TURNS = (EventKind.ASSISTANT, EventKind.SUMMARY)


@dataclass(frozen=True, eq=False)
class TurnTokens:
    """The tokens of one turn of the model: its whole prompt, and what was sampled (arrays as in
    `Segment`)."""

    prompt_ids: Int32 | list[int]
    completion_ids: Int32
    logprobs: Float32
    policy_versions: Int64


@dataclass(frozen=True, eq=False)
class Recording:
    """A session to be exported. `turns` has one entry for each ASSISTANT or SUMMARY event, None
    where there is no ledger. `facts` holds what else is known (task, reward, verdict). `children`
    are the sessions of sub-agents, by the id of the call that started them."""

    session_id: str
    events: tuple[Event, ...]
    turns: tuple[TurnTokens | None, ...]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    children: Mapping[str, tuple[Recording, ...]] = field(
        default_factory=dict[str, "tuple[Recording, ...]"]
    )


def of_log(session_id: str, logged: LoggedSession) -> Recording:
    """The recording that a session log holds, also that of a session which still goes on or was
    cut short. Raises ValueError when its exchanges do not continue one another."""
    turns: list[TurnTokens | None] = []
    known: list[int] = []
    for entry in logged.entries:
        if entry.events[0].kind not in _TURNS:
            continue
        exchange = entry.exchange
        if exchange is None:
            turns.append(None)
            continue
        if not exchange.opens and not known:
            raise ValueError("the log goes on with tokens of which it does not hold the beginning")
        prompt = [
            *([] if exchange.opens else known),
            *(int(token) for token in exchange.prompt_ids),
        ]
        done = exchange.completion
        turns.append(TurnTokens(prompt, done.ids, done.logprobs, done.policy_versions))
        known = [*prompt, *(int(token) for token in done.ids)]
    facts = {key: value for key, value in logged.about.items() if key != "id"}
    return Recording(session_id, logged.events, tuple(turns), facts)


def of_trajectory(trajectory: Trajectory) -> Recording:
    """The recording that a trajectory holds. Raises ValueError when its events and its ledger do
    not fit together."""
    spans = _spans(trajectory)
    turns: list[TurnTokens | None] = []
    for event in trajectory.events:
        if event.kind not in _TURNS:
            continue
        # A turn in which nothing was sampled has no span in the ledger.
        sampled = event.data["sampled_tokens"]
        tokens = next(spans, None) if sampled and trajectory.segments else None
        if tokens is not None and len(tokens.completion_ids) != sampled:
            raise ValueError("the events and the ledger of the trajectory do not fit together")
        if sampled and trajectory.segments and tokens is None:
            raise ValueError("there are more answers among the events than in the ledger")
        turns.append(tokens)
    if next(spans, None) is not None:
        raise ValueError("there are more answers in the ledger than among the events")
    outcome = trajectory.outcome
    facts: dict[str, Any] = {} if trajectory.task_id is None else {"task": trajectory.task_id}
    if outcome.reward is not None:
        facts["reward"] = outcome.reward
    if outcome.verdict is not None:
        facts["score"] = outcome.verdict.score
        facts["verdict"] = outcome.verdict.reason
    return Recording(trajectory.session_id, trajectory.events, tuple(turns), facts)


def with_children(recording: Recording, children: Sequence[Recording]) -> Recording:
    """The recording with those of its sub-agents. Each belongs to the first call that gave its
    prompt and has no sub-agent yet; one that no call gave (under "") is kept all the same."""
    waiting: dict[str, list[str]] = {}
    for event in recording.events:
        if event.kind is EventKind.TOOL_CALL:
            prompt = event.data["arguments"].get("prompt")
            if isinstance(prompt, str):
                waiting.setdefault(clean(prompt), []).append(event.data["id"])
    found: dict[str, tuple[Recording, ...]] = {}
    for child in children:
        asked = next((e.data["text"] for e in child.events if e.kind is EventKind.USER), None)
        calls = [] if asked is None else waiting.get(asked, [])
        call_id = calls.pop(0) if calls else ""
        found[call_id] = (*found.get(call_id, ()), child)
    return replace(recording, children=found)


def _spans(trajectory: Trajectory) -> Iterator[TurnTokens]:
    """The turns of the ledger, in order."""
    for segment in trajectory.segments:
        for turn in segment.turns:
            span = slice(turn.start, turn.end)
            before = [*segment.prompt_ids.tolist(), *segment.completion_ids[: turn.start].tolist()]
            yield TurnTokens(
                before,
                segment.completion_ids[span],
                segment.logprobs[span],
                segment.policy_versions[span],
            )
