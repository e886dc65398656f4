"""A session as a person reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.records import Event, EventKind, Trajectory


def to_markdown(trajectory: Trajectory) -> str:
    """The whole session as Markdown: outcome first, then what was said and done."""
    outcome, usage = trajectory.outcome, trajectory.usage
    stop = f"{outcome.stop.value} ({outcome.detail})" if outcome.detail else outcome.stop.value
    facts = [f"ended: {stop}", f"turns: {usage.turns}", f"tool calls: {usage.tool_calls}"]
    sampled = usage.thinking_tokens + usage.tool_call_tokens + usage.final_message_tokens
    facts.append(f"tokens sampled: {sampled}")
    verdict = outcome.verdict
    if verdict is not None:
        score = f"{verdict.score:g}" if verdict.score is not None else "not measured"
        facts.append(f"score: {score}" + (f" ({verdict.reason})" if verdict.reason else ""))
    if outcome.reward is not None:
        facts.append(f"reward: {outcome.reward:g}")
    head = [f"# Session {trajectory.session_id}", "\n".join(f"- {fact}" for fact in facts)]
    return "\n\n".join([*head, events_to_markdown(trajectory.events)]) + "\n"


def events_to_markdown(events: Sequence[Event]) -> str:
    """Events as Markdown. Whatever a model or a file says is quoted in a fence that it cannot
    close."""
    return "\n\n".join(part for event in events for part in _markdown(event))


def to_text(events: Sequence[Event]) -> str:
    """Events as plain text, one indented block each, for a terminal or a page that escapes."""
    blocks: list[str] = []
    for event in events:
        label, body = _summary(event)
        lines = body.split("\n") if body else []
        blocks.append("\n".join([label, *(f"    {line}" for line in lines)]))
    return "\n".join(blocks) + "\n"


def _markdown(event: Event) -> list[str]:
    label, body = _summary(event)
    return [f"**{label}**", *([_fenced(body)] if body else [])]


def _fenced(text: str) -> str:
    runs = [len(run) for run in re.findall(r"`+", text)]
    fence = "`" * max([3, *(run + 1 for run in runs)])
    return f"{fence}\n{text}\n{fence}"


def _summary(event: Event) -> tuple[str, str]:
    """A heading and a body for one event."""
    data = event.data
    if event.kind is EventKind.TOOL_CALL:
        return _call(data)
    if event.kind is EventKind.TOOL_RESULT:
        error = data.get("error_class")
        return f"result{f' ({error})' if error else ''}", str(data["text"])
    if event.kind is EventKind.STOP:
        detail = f": {data['detail']}" if data.get("detail") else ""
        return f"stop: {data['reason']}{detail}", ""
    if event.kind is EventKind.ASSISTANT:
        thinking = f"(thinking) {data['thinking']}\n" if data.get("thinking") else ""
        return "assistant", f"{thinking}{data['text']}".rstrip("\n")
    return event.kind.value, str(data["text"])


def _call(data: Mapping[str, Any]) -> tuple[str, str]:
    """A call with each argument on its own line, long ones as the text they are."""
    if data.get("malformed"):
        return "malformed call", str(data.get("raw", ""))
    lines: list[str] = []
    for name, value in data["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return f"call {data['name']}", "\n".join(lines)
