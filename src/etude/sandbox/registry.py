"""Choosing a sandbox by name."""

from __future__ import annotations

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.settings import SandboxSettings

BACKENDS = {BubblewrapSandbox.name: BubblewrapSandbox}
"""Name → backend."""


async def open_sandbox(
    name: str = BubblewrapSandbox.name, settings: SandboxSettings | None = None
) -> BubblewrapSandbox:
    """A backend that has just run a guest here. Raises EtudeError with the sentence that mends
    it; there is no way to run without isolation."""
    backend = BACKENDS.get(name)
    if backend is None:
        known = ", ".join(sorted(BACKENDS))
        raise EtudeError(f"there is no sandbox called {name!r}; choose one of: {known}")
    sandbox = backend(settings)
    fault = await sandbox.probe()
    if fault is not None:
        sandbox.close()
        raise EtudeError(f"no sandbox: {fault}")
    return sandbox
