"""What a session leaves behind while it runs: events, counts, and the log of both."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from etude.agent.log import Entry, SessionLog
from etude.agent.policy import Answer
from etude.agent.tools import ErrorClass
from etude.models.renderer import ToolCall, ToolSpec
from etude.records import Event, EventKind, StopReason, Usage


def head_data(system: str, tools: Sequence[ToolSpec]) -> dict[str, object]:
    """The data of a SYSTEM event. Schemas are kept as text, because the order of their keys is
    part of what the model was shown."""
    return {
        "text": system,
        "tools": [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.dumps(dict(tool.parameters)),
            }
            for tool in tools
        ],
    }


def head_of(event: Event) -> tuple[str, list[ToolSpec]]:
    """System text and tools of a SYSTEM event."""
    tools = [
        ToolSpec(tool["name"], tool["description"], json.loads(tool["parameters"]))
        for tool in event.data["tools"]
    ]
    return event.data["text"], tools


@dataclass(frozen=True)
class Stop:
    """Why an operation ended."""

    reason: StopReason
    detail: str = ""


class SessionRecord:
    """Grows by events. Each is written to the log (if there is one) before anybody is told."""

    def __init__(
        self, log: SessionLog | None = None, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self.log = log
        self.on_event = on_event
        self.events: list[Event] = []
        self.usage = Usage()
        self.waiting: deque[tuple[str, ToolCall]] = deque()
        """Calls of the last turn that have no result yet, oldest first."""
        self.summaries = 0

    @property
    def turns(self) -> int:
        """Turns of the model so far."""
        return self.usage.turns

    def emit(self, kind: EventKind, **data: object) -> None:
        """One event that is no turn of the model's."""
        self._keep(Entry((Event(kind, self.turns - 1, data),)))

    def turn(self, answer: Answer, *, summary: dict[str, object] | None = None) -> None:
        """A turn of the model: an answer with its calls, or a summary (`summary` holds its query
        and the opening of the next segment)."""
        number = self.turns
        parsed = answer.parsed
        taken: dict[str, object] = {
            "text": parsed.text,
            "thinking": parsed.thinking,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "sampled_tokens": answer.sampled_tokens,
            "result_tokens": answer.result_tokens,
            "thinking_tokens": parsed.thinking_tokens,
            "call_tokens": parsed.call_tokens,
            "text_tokens": parsed.text_tokens,
        }
        if summary is not None:
            events = [Event(EventKind.SUMMARY, number, {**taken, **summary})]
        else:
            events = [Event(EventKind.ASSISTANT, number, taken)]
            for index, call in enumerate(parsed.calls):
                call_id = f"call-{number}-{index}"
                self.waiting.append((call_id, call))
                malformed = call.error is not None
                data = {
                    "id": call_id,
                    "name": call.name,
                    "arguments": dict(call.arguments),
                    "malformed": malformed,
                    **({"raw": call.raw, "error": call.error} if malformed else {}),
                }
                events.append(Event(EventKind.TOOL_CALL, number, data))
        self._keep(Entry(tuple(events), answer.exchange))

    def result(self, text: str, error_class: ErrorClass | None) -> str:
        """The result of the oldest open call; returns that call's id."""
        call_id, call = self.waiting.popleft()
        self.emit(
            EventKind.TOOL_RESULT,
            id=call_id,
            name=call.name,
            text=text,
            error_class=None if error_class is None else error_class.value,
        )
        return call_id

    def took(self, seconds: float) -> None:
        """Add to the time that the session worked."""
        self.usage = replace(self.usage, seconds=self.usage.seconds + seconds)

    def recall(self, entry: Entry) -> None:
        """Take over an entry of an earlier log: counts and open calls follow from it."""
        for event in entry.events:
            self._count(event)
            self.events.append(event)
            data = event.data
            if event.kind is EventKind.TOOL_CALL:
                call = ToolCall(
                    data["name"], data["arguments"], data.get("raw", ""), data.get("error")
                )
                self.waiting.append((data["id"], call))
            elif event.kind is EventKind.TOOL_RESULT and self.waiting:
                self.waiting.popleft()

    def _count(self, event: Event) -> None:
        """The effort counts, from what the events themselves say."""
        usage, data = self.usage, event.data
        if event.kind is EventKind.TOOL_CALL:
            self.usage = replace(usage, tool_calls=usage.tool_calls + 1)
        elif event.kind in (EventKind.ASSISTANT, EventKind.SUMMARY):
            self.summaries += event.kind is EventKind.SUMMARY
            self.usage = replace(
                usage,
                thinking_tokens=usage.thinking_tokens + data["thinking_tokens"],
                tool_call_tokens=usage.tool_call_tokens + data["call_tokens"],
                tool_output_tokens=usage.tool_output_tokens + data["result_tokens"],
                final_message_tokens=usage.final_message_tokens + data["text_tokens"],
                turns=usage.turns + 1,
                prompt_tokens=usage.prompt_tokens + data["prompt_tokens"],
                cached_tokens=usage.cached_tokens + data["cached_tokens"],
            )

    def _keep(self, entry: Entry) -> None:
        if self.log is not None:
            self.log.append(entry)
        for event in entry.events:
            self._count(event)
            self.events.append(event)
            if self.on_event is not None:
                self.on_event(event)
