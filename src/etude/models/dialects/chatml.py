"""Turns between `<|im_start|>` and `<|im_end|>`, which several dialects share."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from etude.models.dialects.base import Dialect, Marker, Part

TURN_START, TURN_END, DOCUMENT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"


class ChatML(Dialect):
    """Raises EtudeError when the tokenizer lacks `<|im_start|>` or `<|im_end|>`."""

    needs = (TURN_START, TURN_END)
    hint = "use a model with ChatML turns, such as SmolLM2-Instruct or Qwen"
    stops = (TURN_END, DOCUMENT_END)
    header = "assistant\n"
    """What follows `<|im_start|>` where the model begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._turn_end = self._stop_ids[0]

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """End of the sampled turn (if it was cut), results in one user turn, the user's message
        in another, and the next assistant header."""
        ended = bool(last_completion) and last_completion[-1] == self._turn_end
        ids = [] if ended else [self._turn_end]
        ids += self._tokens.encode("\n")
        if results:
            ids += self._turn("user", self._results(results))
        if user is not None:
            ids += self._turn("user", [user])
        return ids + self._begin()

    def _results(self, results: Sequence[str]) -> list[Part]:
        parts: list[Part] = []
        for number, result in enumerate(results):
            parts += ["\n"] if number else []
            parts += [Marker(RESULT_OPEN), f"\n{result}\n", Marker(RESULT_CLOSE)]
        return parts

    def _begin(self) -> list[int]:
        return self._encode([Marker(TURN_START), self.header])

    def _turn(self, role: str, parts: Sequence[Part]) -> list[int]:
        return self._encode([Marker(TURN_START), f"{role}\n", *parts, Marker(TURN_END), "\n"])
