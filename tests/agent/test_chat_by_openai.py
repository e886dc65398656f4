"""The official client as the oracle: the same request, and the same answer read from it."""

from __future__ import annotations

import asyncio
import json
import string
from typing import Any

import openai
from chat_server import COUNTED, ChatServer, speaks
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.chat_policy import ChatPolicy
from etude.agent.policy import Answer, TurnLimits
from etude.inference.openai_client_settings import ChatServiceSettings
from etude.models.renderer import ToolSpec

TOOL = ToolSpec("look", "look at a thing", {"type": "object", "properties": {"at": {}}})
LIMITS = TurnLimits(max_tokens=50, temperature=0.5, seed=7, seconds=20)


async def ours(server: ChatServer) -> Answer:
    settings_ = ChatServiceSettings(base_url=server.url, model="m", context_length=8000)
    policy = ChatPolicy(settings_)
    policy.begin("Head.", [TOOL])
    policy.say("Hello.")
    try:
        return await policy.turn(LIMITS)
    finally:
        await policy.close()


async def theirs(server: ChatServer, body: dict[str, Any]) -> tuple[str, list[Any], Any, str]:
    """(text, calls as [name, arguments], usage, finish reason)."""
    text, finish, usage = "", "", None
    calls: list[list[str]] = []
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        async for chunk in await client.chat.completions.create(**body):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or []:
                    while len(calls) <= call.index:
                        calls.append(["", ""])
                    assert call.function is not None
                    calls[call.index][0] += call.function.name or ""
                    calls[call.index][1] += call.function.arguments or ""
    return text, calls, usage, finish


WORDS = st.text(alphabet=string.printable + "é🦊\u2028", max_size=30)
ARGUMENTS = st.dictionaries(st.sampled_from(["at", "to"]), WORDS, max_size=2)


@given(WORDS, st.lists(ARGUMENTS, max_size=3), st.integers(1, 7))
@settings(max_examples=15, deadline=None)
def test_both_read_the_same_answer(text: str, calls: list[dict[str, str]], piece: int) -> None:

    spelt = [("look", json.dumps(arguments)) for arguments in calls]

    async def go() -> None:
        said = speaks(text, spelt, piece=piece)
        async with ChatServer(said, said) as server:
            answer = await ours(server)
            # The official client sends what we sent: it knows every field, and so does the server.
            their_text, their_calls, usage, finish = await theirs(server, server.requests[0].body)
            assert server.requests[1].body == server.requests[0].body
        assert answer.parsed.text.strip() == their_text.strip()
        assert [[c.name, dict(c.arguments)] for c in answer.parsed.calls] == [
            [name, json.loads(arguments)] for name, arguments in their_calls
        ]
        assert finish == ("tool_calls" if calls else "stop")
        assert answer.prompt_tokens == usage.prompt_tokens == COUNTED["prompt_tokens"]
        assert answer.cached_tokens == usage.prompt_tokens_details.cached_tokens
        assert answer.sampled_tokens == usage.completion_tokens

    asyncio.run(go())
