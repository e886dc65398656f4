"""What may be set about a session. No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SessionSettings(BaseModel):
    """Limits and sampling of one session; times in seconds, lengths in tokens or characters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=30, ge=1)
    """Turns that the model may take for one user message."""
    ends_after_max_turns: bool | None = None
    """Whether using up `max_turns` is the ordinary end (FINISHED) and not a limit that was hit
    (TURN_LIMIT). None: exactly when there is only one turn."""
    max_turn_tokens: int = Field(default=1024, ge=1)
    """Longest answer of one turn."""
    token_budget: int | None = Field(default=None, ge=1)
    """Sampled tokens of the whole session."""
    temperature: float = Field(default=1.0, ge=0)
    seed: int = 0
    """Each turn samples with a seed derived from this one and the turn's number."""
    turn_timeout: float = Field(default=1800, gt=0)
    """Deadline of one answer of the engine, its time in the engine's queue included."""
    tool_timeout: float = Field(default=120, gt=0)
    """Deadline of one tool call, and the longest that the model may ask for."""
    workspace_timeout: float = Field(default=120, gt=0)
    """Deadline for making the workspace, and for reading its final state."""
    max_result_chars: int = Field(default=8000, ge=200)
    """A longer tool result keeps its head and its tail."""
    repeat_note: int = Field(default=3, ge=2)
    """At so many equal calls with equal results the model is told."""
    repeat_stop: int = Field(default=5, ge=2)
    """At so many the session stops with REPEATED_CALL."""
