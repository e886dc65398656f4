"""Modes of approval, and what the model is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Mode(StrEnum):
    """How much runs without a question."""

    ASK = "ask"
    """Reading is free; writing, commands that do more than read, and the network are asked."""
    AUTO = "auto"
    """Everything inside the sandbox runs; the network is asked, but for hosts named at start."""
    READ_ONLY = "read-only"
    """The workspace is mounted read-only."""
    PLAN = "plan"
    """Read-only, and the model is told to write a plan."""

    @property
    def readonly(self) -> bool:
        """Whether the workspace is mounted read-only."""
        return self in (Mode.READ_ONLY, Mode.PLAN)


MODE_NOTES: Mapping[Mode, str] = {
    Mode.ASK: (
        "Mode: ask. Reading is free; a person is asked before files are changed, before commands"
        " that do more than read, and before the network is used."
    ),
    Mode.AUTO: (
        "Mode: auto. Files may be changed and commands run without a question; the network is"
        " still asked about, but for hosts that the person named."
    ),
    Mode.READ_ONLY: (
        "Mode: read-only. The workspace is mounted read-only; look, run what only reads, and"
        " answer. Files cannot be changed."
    ),
    Mode.PLAN: (
        "Mode: plan. The workspace is mounted read-only. Find out what is needed, then answer with"
        " a plan: what to change in which files, in which order, and how it will be checked. Do"
        " not try to change anything; end with the plan."
    ),
}
"""For `Session.note` at the start and whenever the mode changes."""
