"""One session of an editor's: its messages, its questions, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from etude.agent.effort import EffortLevel
from etude.agent.live import LiveSession
from etude.agent.mcp.servers import ToolServers
from etude.agent.permissions import Decision, Question, Remember
from etude.cli.acp_outbox import Outbox
from etude.cli.acp_updates import (
    Reporter,
    Update,
    call_fields,
    fenced,
    proposed,
    replayed,
    text_chunk,
)
from etude.cli.visible import visible
from etude.errors import EtudeError
from etude.models.stream import Delta
from etude.records import Event, EventKind, StopReason

if TYPE_CHECKING:
    from acp.schema import PermissionOption, RequestPermissionResponse, ToolCallUpdate

COMMANDS = {
    "undo": ("Take back the changes to files, one message at a time.", ""),
    "summarize": ("Summarize the conversation now, to make room.", ""),
    "effort": ("Change how hard the model tries.", "low, medium or high"),
    "cost": ("Say what this session took so far.", ""),
}
LATER = "(The person will answer in the next message: end your turn with the question.)"
STOPS = {
    StopReason.FINISHED: "end_turn",
    StopReason.REPEATED_CALL: "end_turn",
    StopReason.LENGTH: "max_tokens",
    StopReason.CONTEXT_FULL: "max_tokens",
    StopReason.BUDGET: "max_tokens",
    StopReason.TURN_LIMIT: "max_turn_requests",
    StopReason.CANCELLED: "cancelled",
}
_CHUNKS = {"text": "agent_message_chunk", "thinking": "agent_thought_chunk"}


class Editor(Protocol):
    """The part of the SDK's connection that is used."""

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption]
    ) -> RequestPermissionResponse: ...

    async def session_update(self, session_id: str, update: Any) -> None: ...


class EditorSession:
    """See the module. Made before its `LiveSession`, whose driver it is; `attach` joins them."""

    def __init__(
        self, project: Path, editor: Editor, notify: Callable[[str, Update], Awaitable[None]]
    ) -> None:
        self.project = project
        self._editor = editor
        self._reporter = Reporter(project, live=True)
        self._outbox = Outbox(lambda update: notify(self.id, update))
        self._live: LiveSession | None = None
        self._servers: ToolServers | None = None
        self._turn: asyncio.Task[StopReason] | None = None
        self._cancelled = False
        self._streamed = False

    def attach(self, live: LiveSession, servers: ToolServers) -> None:
        """The session itself and the tool servers that were started for it."""
        self._live = live
        self._servers = servers
        self._outbox.open()

    @property
    def live(self) -> LiveSession:
        """Raises RuntimeError before `attach`."""
        if self._live is None:
            raise RuntimeError("the session is not open yet")
        return self._live

    @property
    def id(self) -> str:
        """As the editor knows it: the id of the kept session."""
        return self.live.session.session_id

    def say(self, sentence: str) -> None:
        """Tell the person something that is not the model's."""
        self._outbox.put(text_chunk("agent_message_chunk", f"{visible(sentence)}\n\n"))

    def greet(self) -> None:
        """What an editor should know at the start, once it knows the session."""
        commands = [
            {"name": name, "description": text, **({"input": {"hint": hint}} if hint else {})}
            for name, (text, hint) in COMMANDS.items()
        ]
        self._outbox.put(
            {"sessionUpdate": "available_commands_update", "availableCommands": commands}
        )
        servers = self._servers
        for complaint in () if servers is None else servers.complaints:
            self.say(complaint)
        pending = [*self.live.permissions.pending, *(servers.pending if servers else ())]
        if pending:
            kinds = ", ".join(sorted({brought.kind for brought in pending}))
            self.say(
                f"This project brings what nobody approved ({kinds}); it does not count until"
                " `etude approve` was used."
            )

    async def replay(self) -> None:
        """Show all that happened so far."""
        for update in replayed(self.project, self.live.session.events):
            self._outbox.put(update)
        await self._outbox.flush()

    def on_delta(self, delta: Delta) -> None:
        """The model's words as they come."""
        if delta.kind in _CHUNKS:
            self._streamed = True
            self._outbox.put_text(_CHUNKS[delta.kind], delta.text)

    def on_event(self, event: Event) -> None:
        """What the session did."""
        if event.kind is EventKind.ASSISTANT:
            # A service that does not stream says everything at once.
            if not self._streamed and event.data["text"]:
                self._outbox.put_text("agent_message_chunk", event.data["text"])
            self._streamed = False
        for update in self._reporter.updates(event):
            self._outbox.put(update)

    def on_child_event(self, session_id: str, event: Event) -> None:
        """What a sub-agent did."""
        for update in self._reporter.updates(event, f"{session_id}/"):
            self._outbox.put(update)

    async def prompt(self, text: str) -> str:
        """Let the model work on a message; returns the protocol's reason for the end. Raises
        EtudeError when it failed or is still working."""
        if self._turn is not None:
            raise EtudeError("the session still works on the last message; cancel it first")
        self._cancelled = self._streamed = False
        turn = self._turn = asyncio.create_task(self._work(text))
        try:
            stop = await turn
        except asyncio.CancelledError:
            turn.cancel()
            await asyncio.wait([turn])
            if not self._cancelled:
                raise
            stop = StopReason.CANCELLED
        finally:
            self._turn = None
        if self._cancelled:
            stop = StopReason.CANCELLED
        elif stop not in (StopReason.FINISHED, StopReason.CANCELLED):
            detail = self.live.session.events[-1].data.get("detail", "")
            if stop is StopReason.ERROR:
                raise EtudeError(detail or "the session failed")
            self.say(f"[stopped: {detail or stop.value}]")
        await self._report_usage()
        await self._outbox.flush()
        return STOPS[stop]

    async def cancel(self) -> None:
        """End the work on the present message, if there is any."""
        turn = self._turn
        if turn is None:
            return
        self._cancelled = True
        if self.live.session.busy:
            await self.live.session.cancel()
        else:
            turn.cancel()

    async def close(self) -> None:
        """End everything that belongs to the session."""
        await self.cancel()
        if self._turn is not None:
            await asyncio.wait([self._turn])
        try:
            if self._live is not None:
                await self._live.close()
        finally:
            if self._servers is not None:
                await self._servers.close()
            await self._outbox.close()

    async def _work(self, text: str) -> StopReason:
        name, _, rest = text.removeprefix("/").partition(" ")
        if text.startswith("/") and name in COMMANDS:
            return await self._command(name, rest.strip())
        return await self.live.prompt(text)

    async def _command(self, name: str, argument: str) -> StopReason:
        live = self.live
        if name == "undo":
            undone = await live.undo()
            done = "The files were put back" if undone.changed else "No file was different"
            self.say(f"{done}; /undo again goes one message further back.")
        elif name == "summarize":
            return await live.session.summarize()
        elif name == "effort":
            if argument not in list(EffortLevel):
                raise EtudeError(f"there is no effort {argument!r}; choose low, medium or high")
            live.set_effort(EffortLevel(argument))
            self.say(f"Effort: {argument}.")
        else:
            self.say(self._cost())
        return StopReason.FINISHED

    def _cost(self) -> str:
        used, size = self.live.session.context_used
        budget = self.live.session.budget
        return (
            f"{budget.sampled} tokens were sampled, ${budget.spent:.4f} spent; the context holds"
            f" {used} of {size} tokens."
        )

    async def _report_usage(self) -> None:
        used, size = self.live.session.context_used
        spent = self.live.session.budget.spent
        cost = {"cost": {"amount": spent, "currency": "USD"}} if spent else {}
        self._outbox.put({"sessionUpdate": "usage_update", "used": used, "size": size, **cost})

    async def permit(self, question: Question) -> Decision:
        """Ask the person whether a call may run: an `Asker`."""
        request = question.request
        arguments = dict(request.arguments)
        known = self._reporter.open_call(request.call_id, request.tool, arguments)
        call = {
            "toolCallId": request.call_id if known else f"sub-agent/{request.call_id}",
            "status": "pending",
            "content": [
                *proposed(self.project, request.tool, arguments),
                {"type": "content", "content": {"type": "text", "text": visible(question.why)}},
                *self._exact(request.tool, request.subject),
            ],
            **call_fields(self.project, request.tool, arguments),
        }
        options = [("once", "Allow once", "allow_once")]
        if question.rules:
            rules = visible(", ".join(question.rules))
            options += [
                ("session", f"Allow {rules} in this session", "allow_always"),
                ("always", f"Always allow {rules}", "allow_always"),
            ]
        options.append(("reject", "Reject", "reject_once"))
        chosen = await self._choose(call, options)
        if chosen in ("once", "session", "always"):
            return Decision(True, Remember(chosen))
        return Decision(False, reason="the person did not allow it")

    def _exact(self, tool: str, subject: str) -> list[dict[str, Any]]:
        """A command as it would run, whole."""
        if tool in ("edit", "write") or not subject:
            return []
        return [{"type": "content", "content": {"type": "text", "text": fenced(subject)}}]

    async def ask(self, question: str, options: Sequence[str]) -> str:
        """Ask the person a question of the model's: an `AskPerson`. Editors offer choices only;
        for any other answer the person writes the next message."""
        numbered = [(str(i), visible(text), "allow_once") for i, text in enumerate(options)]
        other = ("other", "I'll answer in the chat", "reject_once")
        call = {
            "toolCallId": f"question-{len(self.live.session.events)}",
            "title": visible(question),
            "kind": "other",
            "status": "pending",
        }
        chosen = await self._choose(call, [*numbered, other])
        return options[int(chosen)] if chosen.isdecimal() else LATER

    async def _choose(self, call: dict[str, Any], options: Sequence[tuple[str, str, str]]) -> str:
        """The id of the chosen option, '' when the editor took the question back."""
        from acp import RequestError
        from acp.schema import PermissionOption, ToolCallUpdate

        await self._outbox.flush()
        offered = [
            PermissionOption.model_validate({"optionId": key, "name": name, "kind": kind})
            for key, name, kind in options
        ]
        with contextlib.suppress(ConnectionError, RequestError):
            answer = await self._editor.request_permission(
                self.id, ToolCallUpdate.model_validate(call), offered
            )
            if answer.outcome.outcome == "selected":
                known = {key for key, _, _ in options}
                chosen = answer.outcome.option_id
                return chosen if chosen in known else ""
        return ""
