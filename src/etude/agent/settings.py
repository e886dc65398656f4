"""What may be set about a session. No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from etude.agent.summary import SummarySettings


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
    """Sampled tokens of the whole session, its sub-agents included."""
    summary: SummarySettings = SummarySettings()
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
    """Of a longer tool result the model is shown the head, the tail and a file with all of it."""
    repeat_note: int = Field(default=3, ge=2)
    """At so many equal calls with equal results the model is told."""
    repeat_stop: int = Field(default=5, ge=2)
    """At so many the session stops with REPEATED_CALL."""
