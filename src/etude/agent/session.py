"""The harness loop. A rollout is an ordinary session without a human."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from etude.agent.changes import Baseline
from etude.agent.conversation import Conversation
from etude.agent.prompts import SYSTEM_PROMPT, repeat_note
from etude.agent.repetition import RepetitionGuard
from etude.agent.settings import SessionSettings
from etude.agent.tools import AnyTool, ErrorClass, ToolContext, ToolResult
from etude.agent.tools.text import head_and_tail
from etude.agent.tools.tool import invoke
from etude.inference.protocol import Completion, Engine, Finish, Sampling
from etude.models.renderer import ParsedTurn, Renderer, ToolCall
from etude.records import Event, EventKind, Outcome, StopReason, Trajectory, Usage
from etude.sandbox.protocol import Workspace, WorkspaceError

WorkspaceFactory = Callable[[], Awaitable[Workspace]]


@dataclass(frozen=True)
class _Stop:
    reason: StopReason
    detail: str = ""


@dataclass
class _Counts:
    """`Usage` while it grows."""

    thinking_tokens: int = 0
    tool_call_tokens: int = 0
    tool_output_tokens: int = 0
    final_message_tokens: int = 0
    tool_calls: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


class Session:
    """One conversation of a model with a workspace, recorded token for token.

    `workspace` is a workspace, or a function that makes one when the first tool needs it; what
    the session made itself it also closes. `on_event` is called with each event as it happens,
    `on_token` with each sampled id. To cancel, cancel the task that runs `send` or `run`: tools
    are stopped, every open call gets a result, and the record stays consistent.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        workspace: Workspace | WorkspaceFactory,
        tools: Sequence[AnyTool],
        settings: SessionSettings,
        *,
        session_id: str,
        task_id: str | None = None,
        system: str = SYSTEM_PROMPT,
        on_event: Callable[[Event], None] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._source = workspace
        self._tools = tuple(tools)
        self._settings = settings
        self._session_id = session_id
        self._task_id = task_id
        self._on_event = on_event
        self._on_token = on_token
        self._system = _clean(system)
        self._conversation = Conversation(
            renderer, self._system, [tool.spec() for tool in self._tools]
        )
        self._context = ToolContext(self._open_workspace, settings.tool_timeout)
        self._workspace: Workspace | None = None
        self._baseline: Baseline | None = None
        self._guard = RepetitionGuard()
        self._events: list[Event] = []
        self._counts = _Counts()
        # Calls of the last turn that have no result yet, oldest first.
        self._waiting: deque[tuple[str, ToolCall]] = deque()
        self._valid_call = False
        self._stop: _Stop | None = None
        self._busy = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened so far."""
        return tuple(self._events)

    async def run(self, prompt: str) -> Trajectory:
        """A whole rollout: one message, the model's work, the record. The workspace is closed
        when this returns or raises, if the session made it."""
        try:
            await self.send(prompt)
            return await self.trajectory()
        finally:
            await self.close()

    async def send(self, user: str) -> StopReason:
        """Say something and let the model work until it stops. A failing sandbox, or an engine
        that does not answer in time, is StopReason.ERROR. Raises EtudeError when a person has to
        mend something (there is no sandbox), RuntimeError when the session is busy."""
        if self._busy:
            raise RuntimeError("the session is still working on the last message")
        self._busy = True
        started = time.monotonic()
        if not self._events:
            self._emit(EventKind.SYSTEM, text=self._system)
        user = _clean(user)
        self._emit(EventKind.USER, text=user)
        self._conversation.say(user)
        try:
            stop = await self._work()
        except WorkspaceError as error:
            stop = _Stop(StopReason.ERROR, f"the sandbox failed: {error}")
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            reason = StopReason.CANCELLED if cancelled else StopReason.ERROR
            self._end(_Stop(reason, str(error)))
            raise
        finally:
            self._busy = False
            self._counts.seconds += time.monotonic() - started
        self._end(stop)
        return stop.reason

    async def trajectory(self) -> Trajectory:
        """The record so far, with what the workspace differs in now. A sandbox that cannot say
        makes the outcome an ERROR: not measured."""
        stop = self._stop or _Stop(StopReason.CANCELLED, "nothing was asked")
        changes: dict[str, str | None] = {}
        if self._workspace is not None and self._baseline is not None:
            try:
                async with asyncio.timeout(self._settings.workspace_timeout):
                    changes, dropped = await self._baseline.changes(self._workspace)
            except (WorkspaceError, TimeoutError) as error:
                reason = f"the final state could not be read: {error or 'time is up'}"
                stop, dropped = _Stop(StopReason.ERROR, stop.detail), reason
            stop = _Stop(stop.reason, "; ".join(filter(None, (stop.detail, dropped))))
        return Trajectory(
            session_id=self._session_id,
            task_id=self._task_id,
            segments=self._conversation.ledger.segments(self._settings.temperature),
            events=tuple(self._events),
            usage=Usage(**vars(self._counts)),
            outcome=Outcome(stop.reason, stop.detail, changes, self._valid_call),
        )

    async def close(self) -> None:
        """Close the workspace if the session made it. Idempotent."""
        if callable(self._source) and self._workspace is not None:
            workspace, self._workspace, self._baseline = self._workspace, None, None
            async with asyncio.timeout(self._settings.workspace_timeout):
                await workspace.close()

    async def _open_workspace(self) -> Workspace:
        """The workspace, made and looked at when first asked for."""
        try:
            async with asyncio.timeout(self._settings.workspace_timeout):
                if self._workspace is None:
                    source = self._source
                    self._workspace = await source() if callable(source) else source
                if self._baseline is None:
                    self._baseline = await Baseline.of(self._workspace)
        except OSError as error:  # TimeoutError is one; none of them is the model's doing.
            reason = str(error) or "time is up"
            raise WorkspaceError(f"no workspace could be made: {reason}") from error
        return self._workspace

    async def _work(self) -> _Stop:
        """Turns until one of them stops the session or all allowed ones are used."""
        for _ in range(self._settings.max_turns):
            stop = await self._turn()
            if stop is not None:
                return stop
        turns, ends = self._settings.max_turns, self._settings.ends_after_max_turns
        if ends or (ends is None and turns == 1):
            return _Stop(StopReason.FINISHED)
        return _Stop(StopReason.TURN_LIMIT, f"all {turns} turns were used")

    async def _turn(self) -> _Stop | None:
        """One answer of the model, and the calls that it makes."""
        prompt = self._conversation.prompt()
        room = self._engine.context_length - len(prompt)
        if room < 1:
            return _Stop(
                StopReason.CONTEXT_FULL,
                f"the next prompt has {len(prompt)} tokens, "
                f"the context {self._engine.context_length}",
            )
        budget = self._settings.token_budget
        left = room if budget is None else budget - self._conversation.ledger.sampled
        if left < 1:
            return _Stop(StopReason.TOKEN_BUDGET, f"all {budget} tokens were used")
        limit = min(room, left, self._settings.max_turn_tokens)
        try:
            async with asyncio.timeout(self._settings.turn_timeout):
                completion = await self._engine.generate(
                    prompt, self._sampling(limit), self._on_token
                )
        except TimeoutError:
            seconds = self._settings.turn_timeout
            return _Stop(StopReason.ERROR, f"the engine gave no answer within {seconds:g} s")
        parsed = self._record(prompt, completion)
        if not parsed.calls:
            return _without_call(completion, limit, room)
        return await self._run_calls()

    def _sampling(self, limit: int) -> Sampling:
        """Each turn has a seed of its own that depends on the session's and on its number."""
        text = f"{self._settings.seed}/{self._counts.turns}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        return Sampling(self._settings.temperature, limit, self._renderer.stop_ids, seed)

    def _record(self, prompt: Sequence[int], completion: Completion) -> ParsedTurn:
        """Book an exchange: ledger, counts, events."""
        counts = self._counts
        counts.tool_output_tokens += self._conversation.result_tokens()
        self._conversation.commit(prompt, completion)
        parsed = self._renderer.parse([int(token) for token in completion.ids])
        number = counts.turns
        counts.turns += 1
        counts.prompt_tokens += completion.prompt_tokens
        counts.cached_tokens += completion.cached_tokens
        counts.thinking_tokens += parsed.thinking_tokens
        counts.tool_call_tokens += parsed.call_tokens
        counts.final_message_tokens += parsed.text_tokens
        counts.tool_calls += len(parsed.calls)
        self._emit(EventKind.ASSISTANT, text=parsed.text, thinking=parsed.thinking)
        for index, call in enumerate(parsed.calls):
            call_id = f"call-{number}-{index}"
            self._waiting.append((call_id, call))
            self._emit(
                EventKind.TOOL_CALL,
                id=call_id,
                name=call.name,
                arguments=dict(call.arguments),
                malformed=call.error is not None,
                **({"raw": call.raw, "error": call.error} if call.error is not None else {}),
            )
        return parsed

    async def _run_calls(self) -> _Stop | None:
        """The turn's calls, one after the other."""
        while self._waiting:
            _, call = self._waiting[0]
            try:
                result = await invoke(self._tools, call, self._context)
            except WorkspaceError as error:
                self._answer(ToolResult(f"the sandbox failed: {error}", ErrorClass.SANDBOX))
                raise
            count = self._guard.count(call, result)
            self._valid_call = self._valid_call or result.changed
            stuck = count >= self._settings.repeat_stop
            self._answer(result, count if count >= self._settings.repeat_note else 0)
            if result.final:
                return _Stop(StopReason.FINISHED, result.text)
            if stuck:
                name = call.name or "a malformed call"
                return _Stop(StopReason.REPEATED_CALL, f"{name} gave the same {count} times")
        return None

    def _answer(self, result: ToolResult, repeated: int = 0) -> None:
        """Hand the result of the oldest open call to the model and to the log."""
        call_id, call = self._waiting.popleft()
        text = head_and_tail(_clean(result.text), self._settings.max_result_chars)
        text += repeat_note(repeated) if repeated else ""
        self._conversation.answer(text)
        self._emit(
            EventKind.TOOL_RESULT,
            id=call_id,
            name=call.name,
            text=text,
            error_class=None if result.error_class is None else result.error_class.value,
        )

    def _end(self, stop: _Stop) -> None:
        """Close the record: no call stays without a result."""
        while self._waiting:
            self._answer(ToolResult("not run: the session ended before.", ErrorClass.NOT_RUN))
        self._stop = stop
        self._emit(EventKind.STOP, reason=stop.reason.value, detail=stop.detail)

    def _emit(self, kind: EventKind, **data: object) -> None:
        event = Event(kind, self._counts.turns - 1, data)
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)


def _without_call(completion: Completion, limit: int, room: int) -> _Stop:
    """Why an answer without a call ends the session: it is the final one, or it was cut."""
    if completion.finish is Finish.STOP:
        return _Stop(StopReason.FINISHED)
    if completion.finish is Finish.CONTEXT or limit == room:
        return _Stop(StopReason.CONTEXT_FULL, "the answer was cut where the context is full")
    return _Stop(StopReason.TOKEN_BUDGET, f"the answer was cut at {limit} tokens")


def _clean(text: str) -> str:
    """Text that can be encoded: lone surrogates (undecodable bytes of a file or a terminal)
    become question marks."""
    return text.encode("utf-8", "replace").decode()
