"""How hard the model should try. Told in the tail, so that a change keeps the cached prefix."""

from __future__ import annotations

from enum import StrEnum


class EffortLevel(StrEnum):
    """Three levels; `medium` says nothing to the model."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


NOTES = {
    EffortLevel.LOW: "[effort: low. Think little, use few calls, answer briefly.]",
    EffortLevel.MEDIUM: "[effort: medium.]",
    EffortLevel.HIGH: "[effort: high. Think thoroughly, check your work by running it.]",
}
"""What the model reads when the level changes."""
