"""A policy with a token ledger: a local engine, spoken to in its model's own dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from etude.agent.conversation import Conversation
from etude.agent.policy import Answer, Exchange, OnDelta, TurnLimits
from etude.agent.record import head_of
from etude.errors import EtudeError
from etude.inference.protocol import Completion, Engine, Finish, Sampling
from etude.models.renderer import Renderer, ToolSpec
from etude.records import Event, EventKind, Segment, Trajectory


class TokenPolicy:
    """See `Policy`. One object serves one session; the engine may serve many."""

    trainable = True

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self._engine = engine
        self._renderer = renderer
        self._conversation: Conversation | None = None
        self._tools: Sequence[ToolSpec] = ()

    @property
    def conversation(self) -> Conversation:
        """The tokens. Raises RuntimeError before `begin`."""
        if self._conversation is None:
            raise RuntimeError("the conversation has not begun")
        return self._conversation

    @property
    def context_length(self) -> int:
        """The engine's: prompt and completion together."""
        return self._engine.context_length

    def begin(self, system: str, tools: Sequence[ToolSpec]) -> None:
        """See `Policy.begin`."""
        self._conversation = Conversation(self._renderer, system, tools)
        self._tools = tools

    def say(self, text: str) -> None:
        """See `Policy.say`."""
        self.conversation.say(text)

    def note(self, text: str) -> None:
        """See `Policy.note`."""
        self.conversation.note(text)

    def answer(self, call_id: str, text: str) -> None:
        """See `Policy.answer`; in token dialects results stand in the order of the calls."""
        self.conversation.answer(text)

    def prompt_tokens(self) -> int:
        """See `Policy.prompt_tokens`; exact."""
        return len(self.conversation.prompt())

    async def turn(self, limits: TurnLimits, on_delta: OnDelta | None = None) -> Answer:
        """See `Policy.turn`."""
        return await self._generate(None, limits, on_delta)

    async def ask(self, query: str, limits: TurnLimits, on_delta: OnDelta | None = None) -> Answer:
        """See `Policy.ask`."""
        return await self._generate(query, limits, on_delta)

    async def _generate(
        self, query: str | None, limits: TurnLimits, on_delta: OnDelta | None
    ) -> Answer:
        conversation = self.conversation
        prompt = conversation.prompt(query)
        opens = conversation.ledger.last_completion is None
        new = prompt if opens else prompt[len(conversation.ledger.ids) :]
        result_tokens = conversation.result_tokens()
        sampling = Sampling(
            limits.temperature, limits.max_tokens, self._renderer.stop_ids, limits.seed
        )
        stream = None if on_delta is None else self._renderer.stream()

        def on_token(token: int) -> None:
            if stream is not None and on_delta is not None:
                for delta in stream.feed(token):
                    on_delta(delta)

        async with asyncio.timeout(limits.seconds):
            completion = await self._engine.generate(
                prompt, sampling, None if stream is None else on_token
            )
        if stream is not None and on_delta is not None:
            for delta in stream.end():
                on_delta(delta)
        conversation.commit(prompt, completion, query=query is not None)
        return Answer(
            parsed=self._renderer.parse([int(token) for token in completion.ids], self._tools),
            finish=completion.finish,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            sampled_tokens=len(completion.ids),
            result_tokens=result_tokens,
            exchange=Exchange(opens, new, completion),
        )

    def begin_segment(self, opening: str) -> None:
        """See `Policy.begin_segment`."""
        self.conversation.begin_segment(opening)

    def recall(self, events: Sequence[Event], exchange: Exchange | None) -> None:
        """See `Policy.recall`. The recorded tokens are taken as they are, nothing is rendered
        anew, so a newer tokenizer or dialect cannot change what was said."""
        conversation = self.conversation
        first = events[0]
        _say_again(conversation, first)
        if first.kind in (EventKind.ASSISTANT, EventKind.SUMMARY):
            if exchange is None:
                raise EtudeError(
                    "this session was held with a service that tells no tokens; go on with that"
                    " service, or export it"
                )
            known = [] if exchange.opens else conversation.ledger.ids
            summary = first.kind is EventKind.SUMMARY
            prompt = [*known, *exchange.prompt_ids]
            conversation.commit(prompt, exchange.completion, query=summary)
            if summary:
                conversation.begin_segment(first.data["opening"])

    def segments(self, temperature: float) -> tuple[Segment, ...]:
        """See `Policy.segments`."""
        return self.conversation.segments(temperature)


def _say_again(conversation: Conversation, event: Event) -> None:
    """Put what an event said to the model into the conversation; other events say nothing."""
    if event.kind is EventKind.USER:
        conversation.say(event.data["text"])
    elif event.kind is EventKind.NOTE:
        conversation.note(event.data["text"])
    elif event.kind is EventKind.TOOL_RESULT:
        conversation.answer(event.data["text"])


def replay(trajectory: Trajectory, renderer: Renderer) -> tuple[Segment, ...]:
    """The segments of a session, made again from its events and its sampled tokens alone.

    Equal arrays prove that nothing but the recorded texts ever stood between the model's turns.
    Routes of experts are left out. Raises ValueError when events and turns do not fit together.
    """
    head = next((event for event in trajectory.events if event.kind is EventKind.SYSTEM), None)
    if head is None:
        return ()
    conversation = Conversation(renderer, *head_of(head))
    turns = iter([(segment, turn) for segment in trajectory.segments for turn in segment.turns])
    for event in trajectory.events:
        _say_again(conversation, event)
        if event.kind in (EventKind.ASSISTANT, EventKind.SUMMARY):
            segment, turn = next(turns, (None, None))
            if segment is None or turn is None:
                raise ValueError("there are more answers among the events than in the ledger")
            summary = event.kind is EventKind.SUMMARY
            prompt = conversation.prompt(event.data["query"] if summary else None)
            span = slice(turn.start, turn.end)
            completion = Completion(
                ids=segment.completion_ids[span],
                logprobs=segment.logprobs[span],
                policy_versions=segment.policy_versions[span],
                finish=Finish.STOP,
                prompt_tokens=len(prompt),
                cached_tokens=0,
            )
            conversation.commit(prompt, completion, query=summary)
            if summary:
                conversation.begin_segment(event.data["opening"])
    if next(turns, None) is not None:
        raise ValueError("there are more answers in the ledger than among the events")
    temperature = trajectory.segments[0].temperature if trajectory.segments else 1.0
    return conversation.segments(temperature)
