"""Waiting in tests until something has happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from etude.sandbox.protocol import Job, Workspace

_SECONDS = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Look again and again until `condition()` holds."""
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


async def ended(workspace: Workspace, job: str) -> Job:
    """How a job ended."""
    deadline = time.monotonic() + _SECONDS
    while True:
        state = next(each for each in await workspace.jobs() if each.id == job)
        if not state.running:
            return state
        assert time.monotonic() < deadline, "the job never ended"
        await asyncio.sleep(0.01)
