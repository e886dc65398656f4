"""What a person chose on the command line for a session. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PICK = "?"
"""As the session to resume: let the person choose."""


@dataclass(frozen=True)
class Choices:
    """Empty or None means: not chosen. `mode` and `effort` by name, `money` in US dollars,
    `tokens` sampled ones, `context` in tokens. `resume` is an id, the beginning of one,
    `last` or PICK; `fork` is `ID` or `ID:TURN`."""

    model: str = ""
    url: str = ""
    api_key_env: str = ""
    context: int | None = None
    mode: str = ""
    effort: str = ""
    folder: Path = Path()
    money: float | None = None
    tokens: int | None = None
    allow_hosts: tuple[str, ...] = ()
    dialect: str = ""
    seed: int = 0
    temperature: float | None = None
    resume: str = ""
    fork: str = ""
