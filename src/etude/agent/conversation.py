"""Which tokens a session shows the model next, and the replay that proves it.

The same rule serves the live session and the replay of a stored one, so that a stored session's
ledger is shown to follow from its events.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.agent.ledger import Ledger
from etude.inference.protocol import Completion, Finish
from etude.models.renderer import Renderer, ToolSpec
from etude.records import EventKind, Segment, Trajectory


class Conversation:
    """A ledger, and what is to be said to the model before it answers again.

    What was said waits until the engine has read it; messages that wait together (the first was
    cancelled) are joined by an empty line.
    """

    def __init__(self, renderer: Renderer, system: str, tools: Sequence[ToolSpec]) -> None:
        self.ledger = Ledger()
        self._renderer = renderer
        self._system = system
        self._tools = tools
        self._results: list[str] = []
        self._user: list[str] = []

    def say(self, text: str) -> None:
        """A message of the person's."""
        self._user.append(text)

    def answer(self, result: str) -> None:
        """The result of the next tool call of the last turn."""
        self._results.append(result)

    def prompt(self) -> list[int]:
        """The whole next prompt."""
        user = "\n\n".join(self._user) if self._user else None
        last = self.ledger.last_completion
        if last is None:
            return self._renderer.open(self._system, self._tools, user or "")
        return self.ledger.ids + self._renderer.follow(last, results=self._results, user=user)

    def result_tokens(self) -> int:
        """How many tokens of the next prompt are there because of the waiting results."""
        last = self.ledger.last_completion
        if last is None or not self._results:
            return 0
        user = "\n\n".join(self._user) if self._user else None
        with_results = self._renderer.follow(last, results=self._results, user=user)
        return len(with_results) - len(self._renderer.follow(last, user=user))

    def commit(self, prompt: Sequence[int], completion: Completion) -> None:
        """The engine has read `prompt`, as `prompt()` gave it, and sampled `completion`."""
        self.ledger.commit(prompt, completion)
        self._results.clear()
        self._user.clear()


def replay(
    trajectory: Trajectory, renderer: Renderer, tools: Sequence[ToolSpec]
) -> tuple[Segment, ...]:
    """The segments of a session, made again from its events and its sampled tokens alone.

    Equal arrays prove that nothing but the recorded texts ever stood between the model's turns.
    Routes of experts are left out. Raises ValueError when events and turns do not fit together.
    """
    system = next((e.data["text"] for e in trajectory.events if e.kind is EventKind.SYSTEM), "")
    conversation = Conversation(renderer, system, tools)
    turns = iter([(segment, turn) for segment in trajectory.segments for turn in segment.turns])
    for event in trajectory.events:
        if event.kind is EventKind.USER:
            conversation.say(event.data["text"])
        elif event.kind is EventKind.TOOL_RESULT:
            conversation.answer(event.data["text"])
        elif event.kind is EventKind.ASSISTANT:
            segment, turn = next(turns, (None, None))
            if segment is None or turn is None:
                raise ValueError("there are more answers among the events than in the ledger")
            span = np.s_[turn.start : turn.end]
            prompt = conversation.prompt()
            completion = Completion(
                ids=segment.completion_ids[span],
                logprobs=segment.logprobs[span],
                policy_versions=segment.policy_versions[span],
                finish=Finish.STOP,
                prompt_tokens=len(prompt),
                cached_tokens=0,
            )
            conversation.commit(prompt, completion)
    if next(turns, None) is not None:
        raise ValueError("there are more answers in the ledger than among the events")
    temperature = trajectory.segments[0].temperature if trajectory.segments else 1.0
    return conversation.ledger.segments(temperature)
