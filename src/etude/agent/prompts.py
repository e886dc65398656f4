"""What the harness itself says to the model."""

SYSTEM_PROMPT = "You are a coding agent. Use the tools to work on the repository in /workspace."
"""Short on purpose: a small model on a CPU pays for each of its tokens in every rollout."""


def repeat_note(count: int) -> str:
    """Appended to a tool result when the model goes round in circles."""
    return f"\n[This call has now given this same result {count} times. Do something else.]"
