"""Sessions as ATIF v1.8, the interchange format for trajectories of agents.

One step per message of the person's, remark of the harness's and turn of the model. A summary is a
turn like any other; what the harness puts at the head of the new window is a copy of things that
stand in earlier steps, and is marked as one, so that nobody trains on it. The format forbids keys
of one's own outside `extra`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import etude
from etude.agent.export.recording import Recording, TurnTokens
from etude.inference.prices import Price
from etude.records import Event, EventKind

VERSION = "ATIF-v1.8"
_COUNTS = ("thinking_tokens", "call_tokens", "text_tokens", "result_tokens")


def to_atif(
    recording: Recording,
    *,
    model: str | None = None,
    price: Price | None = None,
    token_ids: bool = True,
) -> dict[str, Any]:
    """A recording as an ATIF document of JSON values. `model` names the model; `price` gives
    costs. `token_ids` gives each turn's prompt and completion ids and log-probs where the record
    has them: exact, but a long session's prompts repeat one another."""
    builder = _Builder(recording, price, token_ids)
    for event in recording.events:
        builder.add(event)
    model = model or _text(recording.facts.get("model"))
    agent: dict[str, Any] = {"name": "etude", "version": etude.__version__}
    if model:
        agent["model_name"] = model
    if builder.tools:
        agent["tool_definitions"] = builder.tools
    document: dict[str, Any] = {
        "schema_version": VERSION,
        "session_id": recording.session_id,
        "trajectory_id": recording.session_id,
        "agent": agent,
        "steps": builder.steps,
        "final_metrics": builder.totals(),
    }
    extra = {**_plain(recording.facts), **({"stops": builder.stops} if builder.stops else {})}
    if extra:
        document["extra"] = extra
    children = [child for group in recording.children.values() for child in group]
    if children:
        inner = [to_atif(c, model=model, price=price, token_ids=token_ids) for c in children]
        document["subagent_trajectories"] = inner
        if price is not None:
            costs = [one["final_metrics"] for one in (document, *inner)]
            # The total is the session's own by the format; a person wants to know the sum as well.
            whole = sum(_whole_cost(one) for one in costs)
            document["final_metrics"]["extra"] = {"cost_usd_with_subagents": whole}
    return document


def dumps(document: Mapping[str, Any]) -> str:
    """The document as it stands in a file. Raises ValueError for numbers that JSON has not."""
    return json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


class _Builder:
    """Takes the events in order. A remark or a checkpoint may come between a call and its result;
    the result still belongs to the turn that made the call."""

    def __init__(self, recording: Recording, price: Price | None, token_ids: bool) -> None:
        self._turns = iter(recording.turns)
        self._children = recording.children
        self._price = price
        self._token_ids = token_ids
        self._calls: dict[str, dict[str, Any]] = {}
        self._turn: dict[str, Any] | None = None
        self._totals = {"prompt": 0, "completion": 0, "cached": 0}
        self._cost = 0.0
        self.steps: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.stops: list[dict[str, Any]] = []

    def add(self, event: Event) -> None:
        """Take the next event."""
        data, kind = event.data, event.kind
        if kind is EventKind.SYSTEM:
            self.tools = [{"type": "function", "function": dict(tool)} for tool in data["tools"]]
            self._step("system", data["text"])
        elif kind is EventKind.USER:
            self._step("user", data["text"])
        elif kind is EventKind.NOTE:
            self._step("system", data["text"], extra={"kind": "note"})
        elif kind is EventKind.CHECKPOINT:
            self._step("system", "", extra={"kind": "checkpoint", **_plain(data)})
        elif kind is EventKind.ASSISTANT:
            self._model(data, {})
        elif kind is EventKind.SUMMARY:
            self._step("system", data["query"], extra={"kind": "summary_question"})
            self._model(data, {"kind": "summary"})
            self._step("user", data["opening"], extra={"kind": "opening"}, is_copied_context=True)
        elif kind is EventKind.TOOL_CALL:
            self._call(data)
        elif kind is EventKind.PERMISSION:
            self._permission(data)
        elif kind is EventKind.TOOL_RESULT:
            self._result(data)
        else:
            self.stops.append({"after_step": len(self.steps), **_plain(data)})

    def totals(self) -> dict[str, Any]:
        """The sums of the steps."""
        totals: dict[str, Any] = {
            "total_prompt_tokens": self._totals["prompt"],
            "total_completion_tokens": self._totals["completion"],
            "total_cached_tokens": self._totals["cached"],
            "total_steps": len(self.steps),
        }
        if self._price is not None:
            totals["total_cost_usd"] = self._cost
        return totals

    def _step(self, source: str, message: str, **more: Any) -> dict[str, Any]:
        step = {"step_id": len(self.steps) + 1, "source": source, "message": message, **more}
        self.steps.append(step)
        return step

    def _model(self, data: Mapping[str, Any], extra: dict[str, Any]) -> None:
        """A turn of the model. Its calls and their results follow as events of their own."""
        metrics = self._metrics(data, next(self._turns, None))
        more: dict[str, Any] = {"llm_call_count": 1, "metrics": metrics}
        if data.get("thinking"):
            more["reasoning_content"] = data["thinking"]
        if extra:
            more["extra"] = extra
        self._turn = self._step("agent", data["text"], **more)
        self._calls = {}

    def _metrics(self, data: Mapping[str, Any], tokens: TurnTokens | None) -> dict[str, Any]:
        prompt, cached = data["prompt_tokens"], data["cached_tokens"]
        sampled = data["sampled_tokens"]
        self._totals["prompt"] += prompt
        self._totals["cached"] += cached
        self._totals["completion"] += sampled
        metrics: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "cached_tokens": cached,
        }
        if self._price is not None:
            cost = self._price.cost(prompt, cached, sampled)
            self._cost += cost
            metrics["cost_usd"] = cost
        extra: dict[str, Any] = {name: data[name] for name in _COUNTS}
        if tokens is not None and self._token_ids:
            metrics["prompt_token_ids"] = [int(token) for token in tokens.prompt_ids]
            metrics["completion_token_ids"] = tokens.completion_ids.tolist()
            logprobs = [float(value) for value in tokens.logprobs]
            if all(math.isfinite(value) for value in logprobs):
                metrics["logprobs"] = logprobs
            else:
                extra["logprobs"] = "left out: some are not finite"
            extra["policy_versions"] = _runs(tokens.policy_versions.tolist())
        metrics["extra"] = extra
        return metrics

    def _call(self, data: Mapping[str, Any]) -> None:
        call: dict[str, Any] = {
            "tool_call_id": data["id"],
            "function_name": data["name"],
            "arguments": _plain(data["arguments"]),
        }
        if data.get("malformed"):
            call["extra"] = {
                "malformed": True,
                "raw": data.get("raw", ""),
                "error": data.get("error"),
            }
        self._calls[data["id"]] = call
        if self._turn is not None:
            self._turn.setdefault("tool_calls", []).append(call)

    def _permission(self, data: Mapping[str, Any]) -> None:
        call = self._calls.get(data["id"])
        if call is not None:
            told = {key: value for key, value in data.items() if key != "id"}
            call.setdefault("extra", {})["permission"] = _plain(told)

    def _result(self, data: Mapping[str, Any]) -> None:
        result: dict[str, Any] = {"content": data["text"]}
        if data["id"] in self._calls:
            result["source_call_id"] = data["id"]
        children = self._children.get(data["id"], ())
        if children:
            result["subagent_trajectory_ref"] = [
                {"trajectory_id": child.session_id} for child in children
            ]
        if data.get("error_class"):
            result["extra"] = {"error_class": data["error_class"]}
        if self._turn is not None:
            observation = self._turn.setdefault("observation", {"results": []})
            observation["results"].append(result)


def _runs(versions: Sequence[int]) -> list[list[int]]:
    """Encoded policy versions as [version, how many tokens]: they hardly ever change in a turn."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return runs


def _whole_cost(metrics: Mapping[str, Any]) -> float:
    extra = metrics.get("extra", {})
    return extra.get("cost_usd_with_subagents", metrics["total_cost_usd"])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of JSON values, so that the document shares nothing with the record."""
    return json.loads(json.dumps(dict(data)))
