"""A policy without a token ledger: any service that speaks OpenAI's chat protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from etude.agent.chat_messages import ChatMessages, Message, estimate
from etude.agent.policy import Answer, Exchange, OnDelta, TurnLimits
from etude.errors import EtudeError
from etude.inference.openai_client_settings import ChatServiceSettings
from etude.inference.openai_stream import OnPiece, PieceKind, Reply, ReplyCall, ReplyUsage
from etude.inference.prices import PriceTable, read_prices
from etude.inference.protocol import Finish
from etude.machine import config_folder
from etude.models.renderer import ParsedTurn, ToolCall, ToolSpec
from etude.models.stream import Delta
from etude.records import Event, EventKind, Segment

if TYPE_CHECKING:
    from etude.inference.openai_client import ChatClient

_CUT = frozenset({"length", "max_tokens", "model_length"})
_BROKEN = frozenset({"error", "abort", "aborted", "cancelled", "canceled"})
_LARGEST_SEED = 2**31
"""Services read a seed as a number of 32 bits at least."""


class ChatPolicy:
    """See `Policy`. One object serves one session; `close` it at the end.

    Its token counts are the service's own. Where a service counts nothing they are estimated, as
    `prompt_tokens` always is: from the last count and the bytes of what is new. Raises EtudeError
    when the key is not set or the model's context length is known from nowhere.
    """

    trainable = False

    def __init__(self, settings: ChatServiceSettings, *, prices: PriceTable | None = None) -> None:
        length = settings.context_length
        if length is None:
            length = (prices or read_prices()).find(settings.model).context_length
        if length is None:
            raise EtudeError(
                f"The context length of {settings.model} is not known; give it with --context, or"
                f" add the model to {config_folder() / 'prices.toml'}."
            )
        # The HTTP library is only loaded by who speaks to a service.
        from etude.inference.openai_client import ChatClient

        self._settings = settings
        self._client: ChatClient = ChatClient(settings)
        self._context_length = length
        self._messages: ChatMessages | None = None

    @property
    def settings(self) -> ChatServiceSettings:
        """Where and how the model is asked."""
        return self._settings

    @property
    def messages(self) -> ChatMessages:
        """The conversation. Raises RuntimeError before `begin`."""
        if self._messages is None:
            raise RuntimeError("the conversation has not begun")
        return self._messages

    @property
    def context_length(self) -> int:
        """Prompt and answer together, as set or as the price table knows."""
        return self._context_length

    def begin(self, system: str, tools: Sequence[ToolSpec]) -> None:
        """See `Policy.begin`."""
        self._messages = ChatMessages(system, tools, send_thinking=self._settings.send_thinking)

    def say(self, text: str) -> None:
        """See `Policy.say`."""
        self.messages.say(text)

    def note(self, text: str) -> None:
        """See `Policy.note`."""
        self.messages.note(text)

    def answer(self, call_id: str, text: str) -> None:
        """See `Policy.answer`."""
        self.messages.answer(call_id, text)

    def prompt_tokens(self) -> int:
        """See `Policy.prompt_tokens`; an estimate."""
        return self.messages.tokens()

    async def turn(self, limits: TurnLimits, on_delta: OnDelta | None = None) -> Answer:
        """See `Policy.turn`."""
        return await self._complete(None, limits, on_delta)

    async def ask(self, query: str, limits: TurnLimits, on_delta: OnDelta | None = None) -> Answer:
        """See `Policy.ask`."""
        return await self._complete(query, limits, on_delta)

    async def _complete(
        self, query: str | None, limits: TurnLimits, on_delta: OnDelta | None
    ) -> Answer:
        messages = self.messages
        request = messages.request(query)
        expected = messages.tokens()
        result_tokens = messages.result_tokens()
        async with asyncio.timeout(limits.seconds):
            reply = await self._client.complete(self._body(request, limits), _pieces(on_delta))
        finish = self._finish(reply)
        calls = tuple(_parse(call) for call in reply.calls)
        usage = reply.usage or _estimated(reply, expected)
        parsed = _parsed(reply, calls, usage)
        kept = usage.prompt + usage.sampled
        if not self._settings.send_thinking:
            kept -= parsed.thinking_tokens
        messages.commit(query, reply.text, reply.thinking, calls, kept)
        return Answer(
            parsed=parsed,
            finish=finish,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            sampled_tokens=usage.sampled,
            result_tokens=min(result_tokens, usage.prompt),
        )

    def begin_segment(self, opening: str) -> None:
        """See `Policy.begin_segment`."""
        self.messages.begin_segment(opening)

    def recall(self, events: Sequence[Event], exchange: Exchange | None) -> None:
        """See `Policy.recall`. The events are enough, so a session that was begun with a local
        engine can go on with a service (and has no ledger from then on)."""
        messages = self.messages
        first = events[0]
        data = first.data
        if first.kind is EventKind.USER:
            messages.say(data["text"])
        elif first.kind is EventKind.NOTE:
            messages.note(data["text"])
        elif first.kind is EventKind.TOOL_RESULT:
            messages.answer(data["id"], data["text"])
        elif first.kind in (EventKind.ASSISTANT, EventKind.SUMMARY):
            summary = first.kind is EventKind.SUMMARY
            calls = [
                ToolCall(
                    event.data["name"],
                    event.data["arguments"],
                    event.data.get("raw", ""),
                    event.data.get("error"),
                )
                for event in events[1:]
            ]
            kept = data["prompt_tokens"] + data["sampled_tokens"]
            if not self._settings.send_thinking:
                kept -= data["thinking_tokens"]
            query = data["query"] if summary else None
            messages.commit(query, data["text"], data["thinking"], calls, kept)
            if summary:
                messages.begin_segment(data["opening"])

    def segments(self, temperature: float) -> tuple[Segment, ...]:
        """See `Policy.segments`: none."""
        return ()

    async def close(self) -> None:
        """Close the connections to the service. Idempotent."""
        await self._client.close()

    def _body(self, request: Sequence[Message], limits: TurnLimits) -> dict[str, Any]:
        settings = self._settings
        optional = {
            "max_tokens": (settings.max_tokens_field, limits.max_tokens),
            "temperature": ("temperature", limits.temperature),
            "seed": ("seed", limits.seed % _LARGEST_SEED),
            "stream_options": ("stream_options", {"include_usage": True}),
        }
        sent = dict(pair for name, pair in optional.items() if name not in settings.omit)
        tools = {"tools": self.messages.tools} if self.messages.tools else {}
        body = {"model": settings.model, "messages": list(request), **tools, "stream": True}
        return {**body, **sent, **settings.body}

    def _finish(self, reply: Reply) -> Finish:
        """The service's word for the end in ours. Words that nobody agreed on mean an ordinary
        end. Raises EtudeError when the answer was withheld or broken off."""
        word = (reply.finish or "stop").lower()
        if word == "content_filter":
            raise EtudeError(f"{self._settings.model} was stopped by the service's content filter.")
        if word in _BROKEN:
            raise EtudeError(
                f"The service broke the answer of {self._settings.model} off ({word})."
            )
        return Finish.LENGTH if word in _CUT else Finish.STOP


def _pieces(on_delta: OnDelta | None) -> OnPiece | None:
    if on_delta is None:
        return None

    def on_piece(kind: PieceKind, text: str) -> None:
        on_delta(Delta(kind, text))

    return on_piece


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _parse(call: ReplyCall) -> ToolCall:
    """A call with its arguments read, or what is wrong with it. A service that leaves the
    arguments of a call without any empty means that there are none."""
    value: object = {}
    reason = None
    try:
        value = json.loads(call.arguments or "{}", parse_constant=_no_constant)
        if not isinstance(value, dict):
            reason = "the arguments are not a JSON object"
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        reason = "the call contains half of a surrogate pair, which is no character"
    except (ValueError, RecursionError) as error:
        reason = f"the arguments are not valid JSON: {error}"
    if not call.name:
        reason = "the call has no name"
    if reason is not None:
        return ToolCall(call.name, {}, call.arguments, reason)
    return ToolCall(call.name, cast(dict[str, Any], value), call.arguments)


def _estimated(reply: Reply, prompt: int) -> ReplyUsage:
    """Counts where the service tells none."""
    texts = [reply.thinking, reply.text, *(call.name + call.arguments for call in reply.calls)]
    return ReplyUsage(prompt, 0, sum(estimate(text) for text in texts), None)


def _parsed(reply: Reply, calls: tuple[ToolCall, ...], usage: ReplyUsage) -> ParsedTurn:
    """The turn with its sampled tokens shared out by length, thinking as counted if it was."""
    said = estimate(reply.text)
    called = sum(estimate(call.name + call.arguments) for call in reply.calls)
    thought = estimate(reply.thinking)
    if usage.thinking is None:
        thinking = _share(usage.sampled, thought, said + called)
    else:
        thinking = usage.thinking
    rest = usage.sampled - thinking
    text = _share(rest, said, called) if said or called else rest
    return ParsedTurn(
        thinking=reply.thinking,
        text=reply.text,
        calls=calls,
        thinking_tokens=thinking,
        call_tokens=rest - text,
        text_tokens=text,
    )


def _share(total: int, part: int, other: int) -> int:
    """The part of `total` that is `part`'s, beside `other`."""
    return round(total * part / (part + other)) if part else 0
