"""Sessions as Markdown that a person reads."""

from __future__ import annotations

import json

from etude.agent.export.recording import Recording
from etude.agent.transcript import events_to_markdown, inline
from etude.records import EventKind


def to_markdown(recording: Recording) -> str:
    """The whole session, and after it those of its sub-agents. Whatever a model, a file or a
    person said stands in fences and spans that it cannot close."""
    counts = {
        "turns": (EventKind.ASSISTANT, EventKind.SUMMARY),
        "tool calls": (EventKind.TOOL_CALL,),
    }
    facts = [
        f"{name}: {sum(event.kind in kinds for event in recording.events)}"
        for name, kinds in counts.items()
    ]
    for name, value in recording.facts.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        facts.append(f"{inline(name)}: {inline(text)}")
    parts = [
        f"# Session {inline(recording.session_id)}",
        "\n".join(f"- {fact}" for fact in facts),
        events_to_markdown(recording.events),
    ]
    for call_id, children in recording.children.items():
        for child in children:
            parts += [f"Sub-agent of {inline(call_id)}:", to_markdown(child).rstrip("\n")]
    return "\n\n".join(part for part in parts if part) + "\n"
