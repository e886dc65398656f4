"""Self-summaries: what the model is asked, and what its next context window begins with.

At a trigger the harness asks, in the live context so that its cache is used, for a summary. The
answer is an ordinary turn of the policy: sampled, recorded, trained. The next segment is the head
as it was, then the summary, the state that the harness knows better than any summary, and the
newest message of the person's, verbatim and last.
"""

from __future__ import annotations

import random

from pydantic import BaseModel, ConfigDict, Field

HISTORY_FOLDER = "/tmp/etude"
"""Where in the guest the older history and long results lie; not part of the repository."""


class SummarySettings(BaseModel):
    """When a session summarizes itself. Lengths in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trigger: int | None = Field(default=None, ge=16)
    """Longest prompt that is answered in the same window; None never summarizes by itself."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training: each window's trigger is drawn from [trigger · (1 − jitter), trigger], so that
    the policy learns to summarize in all states."""
    max_tokens: int = Field(default=1200, ge=16)
    """Longest answer to the question, thinking included."""

    def window_trigger(self, seed: int, window: int) -> int | None:
        """The trigger of the `window`-th segment of a session; the same for the same seed."""
        if self.trigger is None or self.jitter == 0:
            return self.trigger
        draw = random.Random(f"{seed}/summary/{window}").random()
        return max(16, round(self.trigger * (1 - self.jitter * draw)))


def query(words: int) -> str:
    """The harness's question."""
    return (
        "The context window is nearly full. Write a summary from which you can go on without it,"
        f" in at most {words} words: what was asked, what is done and how it was checked, what is"
        " left, files and names that matter, what failed. Do not call a tool."
    )


def opening(summary: str, *, count: int, state: str, history: str | None, newest: str) -> str:
    """The first message of the next segment; `newest` stands verbatim at its end."""
    parts = [f"[Summary {count} of the work so far, written by you]\n{summary}"]
    if history is not None:
        parts.append(f"[The whole earlier conversation is in {history}]")
    if state:
        parts.append(f"[State]\n{state}")
    parts.append(f"[The newest message of the user; act on nothing older]\n{newest}")
    return "\n\n".join(parts)
