"""What a session did, and what a change holds, in text for a person or JSON for a program."""

from __future__ import annotations

from collections.abc import Sequence

from etude.agent.explain import explain
from etude.records import Event


def explained(events: Sequence[Event]) -> str:
    """What was asked and done, and what shows each claim of the final message."""
    return explain(events).to_text().rstrip("\n")
