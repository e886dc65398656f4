"""Noticing that a session goes round in circles."""

from __future__ import annotations

import json

from etude.agent.tools.tool import ToolResult
from etude.models.renderer import ToolCall


class RepetitionGuard:
    """Counts how often the same call gave the same result while nothing else happened.

    A successful edit forgets everything, so running the tests after each edit never counts. So
    does a shell command that was not run before: it may have changed a file. Calls in between
    that only repeat each other do not, so a circle of two or three calls is noticed as well.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}
        self._known: set[tuple[str, str, str]] = set()

    def count(self, call: ToolCall, result: ToolResult) -> int:
        """Record one call and return how many times it has now given this result."""
        if result.changed:
            self._counts.clear()
            self._known.clear()
            return 1
        arguments = json.dumps(dict(call.arguments), sort_keys=True)
        key = (call.name, call.raw if call.error else arguments, result.text)
        if call.name == "shell" and key not in self._known:
            self._counts.clear()
        self._known.add(key)
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]
