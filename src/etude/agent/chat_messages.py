"""A conversation as the messages of OpenAI's chat protocol.

They grow only by appending: each request's messages are those of the last answered request, then
the answer, then what is new. Everything in them comes from what the session log holds as well, so
a resumed session sends the same messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.models.renderer import ToolCall, ToolSpec

Message = dict[str, Any]

BYTES_PER_TOKEN = 3.5
_MESSAGE_TOKENS = 4
"""What the frame of one message takes, roughly."""


def estimate(text: str) -> int:
    """Tokens of a text by its UTF-8 bytes: English and code have about one per 3.5 of them, and
    bytes rather than characters keep Chinese from being counted at a third."""
    return -int(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def tool_definitions(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Tools as the protocol tells a model of them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


class ChatMessages:
    """What the model has read, and what waits to be said: results of its calls, remarks of the
    harness's, messages of the person's. They are joined as in a token dialect: results first, then
    one message with remarks before the person's words.

    `begin_segment` starts anew with the same head.
    """

    def __init__(
        self, system: str, tools: Sequence[ToolSpec], *, send_thinking: bool = False
    ) -> None:
        self._head: list[Message] = [{"role": "system", "content": system}] if system else []
        self.tools = tool_definitions(tools)
        self._send_thinking = send_thinking
        self._read = list(self._head)
        self._open: list[dict[str, Any]] = []
        self._results: list[Message] = []
        self._notes: list[str] = []
        self._user: list[str] = []
        self._known: int | None = None

    def say(self, text: str) -> None:
        """A message of the person's."""
        self._user.append(text)

    def note(self, text: str) -> None:
        """A remark of the harness's."""
        self._notes.append(text)

    def answer(self, call_id: str, text: str) -> None:
        """The result of the oldest open call, which gets this id. Raises ValueError when no call
        is open."""
        if not self._open:
            raise ValueError(f"there is no open call that {call_id!r} could be the result of")
        self._open.pop(0)["id"] = call_id
        self._results.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def request(self, query: str | None = None) -> list[Message]:
        """The messages of the next request; with `query` those of a question of the harness's,
        which the person's waiting messages stay out of. Raises ValueError when a call is still
        open."""
        if self._open:
            raise ValueError(f"{len(self._open)} calls of the last turn have no result yet")
        return [*self._read, *self._new(query)]

    def commit(
        self, query: str | None, text: str, thinking: str, calls: Sequence[ToolCall], tokens: int
    ) -> None:
        """The model has read `request(query)` and answered. `tokens` is what the request and the
        answer took together, as far as they will be read again."""
        self._read = self.request(query)
        message: Message = {"role": "assistant", "content": text}
        if thinking and self._send_thinking:
            message["reasoning_content"] = thinking
        if calls:
            # The session names the calls when it gives their results.
            self._open = [_call(call) for call in calls]
            message["tool_calls"] = list(self._open)
        self._read.append(message)
        self._results = []
        self._notes = []
        if query is None:
            self._user = []
        self._known = tokens

    def begin_segment(self, opening: str) -> None:
        """Go on in an empty context window with the same head and this message."""
        self._read = list(self._head)
        self._open, self._results, self._notes = [], [], []
        self._user = [opening]
        self._known = None

    def tokens(self) -> int:
        """About the length of the next request: what the service counted for the last one and its
        answer, and an estimate of what is new; without a count, an estimate of all."""
        new = self._new(None)
        if self._known is not None:
            return self._known + _estimate_messages(new)
        head = estimate(json.dumps(self.tools, ensure_ascii=False)) if self.tools else 0
        return head + _estimate_messages([*self._read, *new])

    def result_tokens(self) -> int:
        """About how many tokens of the next request are there because of the waiting results."""
        return _estimate_messages(self._results)

    def _new(self, query: str | None) -> list[Message]:
        said = self._user if query is None else [query]
        new = list(self._results)
        if self._notes or said:
            new.append({"role": "user", "content": "\n\n".join([*self._notes, *said])})
        return new


def _call(call: ToolCall) -> dict[str, Any]:
    """A call as it goes back to the service. Many services read the arguments again and fail on
    what is no JSON object, so malformed ones are shown inside of one."""
    arguments: Mapping[str, Any] = call.arguments
    if call.error is not None:
        arguments = {"malformed": call.raw}
    name = re.sub(r"[^A-Za-z0-9_-]", "_", call.name)[:64] or "unknown"
    function = {"name": name, "arguments": json.dumps(dict(arguments), ensure_ascii=False)}
    return {"id": "", "type": "function", "function": function}


def _estimate_messages(messages: Sequence[Message]) -> int:
    total = 0
    for message in messages:
        total += _MESSAGE_TOKENS + estimate(str(message["content"]))
        total += estimate(str(message.get("reasoning_content", "")))
        for call in message.get("tool_calls", ()):
            total += estimate(call["function"]["name"] + call["function"]["arguments"])
    return total
