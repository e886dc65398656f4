"""A session as a person reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.records import Event, EventKind, Trajectory

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def to_markdown(trajectory: Trajectory) -> str:
    """The whole session as Markdown: outcome first, then what was said and done."""
    outcome, usage = trajectory.outcome, trajectory.usage
    stop = outcome.stop.value + (f" ({inline(outcome.detail)})" if outcome.detail else "")
    facts = [f"ended: {stop}", f"turns: {usage.turns}", f"tool calls: {usage.tool_calls}"]
    sampled = usage.thinking_tokens + usage.tool_call_tokens + usage.final_message_tokens
    facts.append(f"tokens sampled: {sampled}")
    verdict = outcome.verdict
    if verdict is not None:
        score = f"{verdict.score:g}" if verdict.score is not None else "not measured"
        facts.append(f"score: {score}" + (f" ({inline(verdict.reason)})" if verdict.reason else ""))
    if outcome.reward is not None:
        facts.append(f"reward: {outcome.reward:g}")
    head = [f"# Session {_plain(trajectory.session_id)}", "\n".join(f"- {fact}" for fact in facts)]
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
    return [f"**{_plain(label)}**", *([_fenced(body)] if body else [])]


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def inline(text: str) -> str:
    """Text of somebody else's as one line of Markdown in which nothing of it is markup."""
    line = " ".join(visible(text).split())
    if not line:
        return "(nothing)"
    ticks = "`" * (_longest_run(line) + 1)
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _plain(label: str) -> str:
    """A heading that is one line without markup, whatever the model called its tool."""
    line = " ".join(re.sub(r"[^\w.:/() -]", "?", label[:100]).split())
    # Inside a word an underscore is only one; at its edge it would be markup.
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", "?", line)


def visible(text: str) -> str:
    """Text that can move no cursor and turn no line round: control characters other than line ends
    and tabs, and those that set the direction of writing, are spelt out."""
    return _UNSEEN.sub(_spelt, text.replace("\r\n", "\n"))


def _spelt(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _summary(event: Event) -> tuple[str, str]:
    """A heading and a body for one event."""
    label, body = _said(event)
    return visible(label), visible(body)


def _said(event: Event) -> tuple[str, str]:
    data = event.data
    if event.kind is EventKind.TOOL_CALL:
        return _call(data)
    if event.kind is EventKind.TOOL_RESULT:
        error = data.get("error_class")
        return f"result{f' ({error})' if error else ''}", str(data["text"])
    if event.kind is EventKind.STOP:
        return f"stop: {data['reason']}", str(data.get("detail", ""))
    if event.kind is EventKind.PERMISSION:
        answer = "allowed" if data["allowed"] else "refused"
        return f"permission: {answer}", "\n".join(filter(None, (data["by"], data["reason"])))
    if event.kind in (EventKind.ASSISTANT, EventKind.SUMMARY):
        thinking = f"(thinking) {data['thinking']}\n" if data.get("thinking") else ""
        return event.kind.value, f"{thinking}{data['text']}".rstrip("\n")
    return event.kind.value, str(data.get("text", data.get("id", "")))


def _call(data: Mapping[str, Any]) -> tuple[str, str]:
    """A call with each argument on its own line, long ones as the text they are."""
    if data.get("malformed"):
        return "malformed call", str(data.get("raw", ""))
    lines: list[str] = []
    for name, value in data["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return f"call {data['name']}", "\n".join(lines)
