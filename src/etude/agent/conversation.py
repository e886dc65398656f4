"""Which tokens a session shows the model next, over a chain of context windows."""

from __future__ import annotations

from collections.abc import Sequence

from etude.agent.ledger import Ledger
from etude.inference.protocol import Completion
from etude.models.renderer import Renderer, ToolSpec
from etude.records import Segment


class Conversation:
    """A chain of ledgers, and what is to be said to the model before it answers again.

    What was said waits until the engine has read it; messages that wait together (the first was
    cancelled) are joined by an empty line, remarks of the harness's stand before them.
    """

    def __init__(self, renderer: Renderer, system: str, tools: Sequence[ToolSpec]) -> None:
        self.ledgers = [Ledger()]
        self._renderer = renderer
        self._system = system
        self._tools = tools
        self._results: list[str] = []
        self._notes: list[str] = []
        self._user: list[str] = []

    @property
    def ledger(self) -> Ledger:
        """That of the present context window."""
        return self.ledgers[-1]

    def say(self, text: str) -> None:
        """A message of the person's."""
        self._user.append(text)

    def note(self, text: str) -> None:
        """A remark of the harness's."""
        self._notes.append(text)

    def answer(self, result: str) -> None:
        """The result of the next tool call of the last turn."""
        self._results.append(result)

    def prompt(self, query: str | None = None) -> list[int]:
        """The whole next prompt; with `query` that of a question of the harness's, which the
        person's waiting messages stay out of."""
        said = self._user if query is None else [query]
        user = "\n\n".join([*self._notes, *said]) if self._notes or said else None
        last = self.ledger.last_completion
        if last is None:
            return self._renderer.open(self._system, self._tools, user or "")
        return self.ledger.ids + self._renderer.follow(last, results=self._results, user=user)

    def result_tokens(self) -> int:
        """How many tokens of the next prompt are there because of the waiting results."""
        last = self.ledger.last_completion
        if last is None or not self._results:
            return 0
        with_results = self._renderer.follow(last, results=self._results)
        return len(with_results) - len(self._renderer.follow(last))

    def commit(self, prompt: Sequence[int], completion: Completion, *, query: bool = False) -> None:
        """The engine has read `prompt`, as `prompt()` gave it, and sampled `completion`."""
        self.ledger.commit(prompt, completion)
        self._results.clear()
        self._notes.clear()
        if not query:
            self._user.clear()

    def begin_segment(self, opening: str) -> None:
        """Go on in an empty context window with the same head and this message."""
        self.ledgers.append(Ledger())
        self._results.clear()
        self._notes.clear()
        self._user[:] = [opening]

    def segments(self, temperature: float) -> tuple[Segment, ...]:
        """The chain so far. `temperature` is that of the log-probs."""
        return tuple(part for ledger in self.ledgers for part in ledger.segments(temperature))
