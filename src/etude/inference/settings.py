"""Settings of the embedded engine; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineSettings(BaseModel):
    """How the embedded engine runs.

    Memory for keys and values is bounded by `(max_batch + retained_slots) * max_context` tokens
    and is taken from the machine only as slots fill. Requests beyond `max_batch` queue.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the processor multiplies it natively (AVX512-BF16, AMX),
    else float32."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of one forward pass; None takes every core that this process may use."""
    max_batch: int = Field(default=64, ge=1)
    """Requests that run at once."""
    retained_slots: int = Field(default=16, ge=0)
    """Further slots, so that finished contexts stay for a session's next turn."""
    max_context: int = Field(default=2048, ge=2)
    """Prompt and completion together; the model's own limit counts as well."""
    prefill_chunk: int = Field(default=512, ge=16)
    """Prompt tokens of one forward pass. Larger reads prompts faster, smaller keeps running
    completions fluent meanwhile."""
    on_update: Literal["keep", "recompute"] = "keep"
    """Keys and values of unfinished requests when weights change: keep them, as asynchronous RL
    does (cheap, slightly off), or compute them again with the new weights (exact, a prefill)."""
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """A request fails when the engine makes no progress for so long, paused time included."""
