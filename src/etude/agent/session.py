"""The harness loop: operations in, events out. A rollout is an ordinary session without a human.

Four operations: `prompt`, `steer`, `cancel`, `summarize`. Everything that happens is an event; the
command line, a headless run, an editor's protocol and a rollout are thin drivers of this class.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from etude.agent.budget import Budget
from etude.agent.calls import Calls
from etude.agent.changes import Baseline
from etude.agent.log import Entry, SessionLog
from etude.agent.permissions.gate import Gate
from etude.agent.policy import OnDelta, Policy, TurnLimits
from etude.agent.prompts import SYSTEM_PROMPT
from etude.agent.record import SessionRecord, Stop, head_data, head_of
from etude.agent.settings import SessionSettings
from etude.agent.summary import HISTORY_FOLDER, opening, query
from etude.agent.tools import AnyTool, ToolContext, ToolResult
from etude.agent.tools.text import clean
from etude.agent.tools.todo import recalled
from etude.agent.transcript import events_to_markdown
from etude.inference.protocol import Finish
from etude.records import Event, EventKind, Outcome, StopReason, Trajectory
from etude.sandbox.process import uninterrupted
from etude.sandbox.protocol import Rights, Workspace, WorkspaceError

WorkspaceFactory = Callable[[], Awaitable[Workspace]]
Delegate = Callable[["Session", str, bool], Awaitable[ToolResult]]
_WORDS_PER_TOKEN = 0.6


@dataclass(frozen=True)
class _Room:
    """Tokens that the next answer may have (0: none), and the stop when it is cut there."""

    tokens: int
    cut: Stop


class Session:
    """One conversation of a model with a workspace, recorded token for token.

    `workspace` is a workspace, or a function that makes one when the first tool needs it; what
    the session made itself it also closes. `gate` decides over calls; without one every call runs
    (in the sandbox, as always). `budget` is the account that a sub-agent shares with its parent.
    `log` keeps everything as it happens; `on_event` is called with each event, `on_delta` with
    each piece of an answer while it is sampled. `delegate` runs a sub-agent for this session.
    """

    def __init__(
        self,
        policy: Policy,
        workspace: Workspace | WorkspaceFactory,
        tools: Sequence[AnyTool],
        settings: SessionSettings,
        *,
        session_id: str,
        task_id: str | None = None,
        system: str = SYSTEM_PROMPT,
        gate: Gate | None = None,
        budget: Budget | None = None,
        log: SessionLog | None = None,
        delegate: Delegate | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_delta: OnDelta | None = None,
    ) -> None:
        self._policy = policy
        self._source = workspace
        self._tools = tuple(tools)
        self._settings = settings
        self._session_id = session_id
        self._task_id = task_id
        self._gate = gate
        self.budget = budget or Budget(tokens=settings.token_budget)
        self._on_delta = on_delta
        self._record = SessionRecord(log, on_event)
        self._system = clean(system)
        self._context = ToolContext(self.open_workspace, settings.tool_timeout)
        if delegate is not None:
            self._context.delegate = lambda prompt, readonly: delegate(self, prompt, readonly)
        self._workspace: Workspace | None = None
        self._opening = asyncio.Lock()
        self._baseline: Baseline | None = None
        self._calls = Calls(policy, self._record, self._tools, self._context, settings, gate)
        self._newest: list[str] = []
        self._steered: list[str] = []
        self._fresh_window = True
        self._stop: Stop | None = None
        self._work: asyncio.Task[Stop] | None = None
        self._cancelled = False
        self._begun = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def session_id(self) -> str:
        """The name that the driver gave."""
        return self._session_id

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened so far."""
        return tuple(self._record.events)

    @property
    def busy(self) -> bool:
        """Whether an operation is running."""
        return self._work is not None

    @property
    def context_used(self) -> tuple[int, int]:
        """(tokens of the next prompt, tokens that the model can hold)."""
        self._begin()
        return self._policy.prompt_tokens(), self._policy.context_length

    @property
    def context(self) -> ToolContext:
        """What the tools of this session share."""
        return self._context

    @property
    def workspace(self) -> Workspace | None:
        """The workspace, None before the first tool needed it."""
        return self._workspace

    @property
    def gate(self) -> Gate | None:
        """What decides over calls."""
        return self._gate

    @property
    def settings(self) -> SessionSettings:
        """The limits."""
        return self._settings

    @property
    def system(self) -> str:
        """The instructions at the head."""
        return self._system

    @property
    def tools(self) -> tuple[AnyTool, ...]:
        """What the model may call."""
        return self._tools

    def recall(self, entries: Sequence[Entry]) -> None:
        """Take an earlier log over, before anything else: the conversation goes on from there.
        Calls that a crash left open get a result. Raises EtudeError when it cannot be."""
        for entry in entries:
            first = entry.events[0]
            if first.kind is EventKind.SYSTEM and not self._begun:
                self._begun = True
                self._system, specs = head_of(first)
                self._policy.begin(self._system, specs)
            self._policy.recall(entry.events, entry.exchange)
            self._record.recall(entry)
            self._fresh_window = first.kind is EventKind.SUMMARY or (
                self._fresh_window and first.kind is not EventKind.ASSISTANT
            )
            if first.kind is EventKind.USER:
                self._newest.append(first.data["text"])
            elif first.kind is EventKind.STOP:
                self._newest = self._newest[-1:]
            if first.kind in (EventKind.ASSISTANT, EventKind.SUMMARY):
                self.budget.charge(
                    first.data["prompt_tokens"],
                    first.data["cached_tokens"],
                    first.data["sampled_tokens"],
                )
        self._context.todos[:] = recalled(self._record.events)
        if self._record.events and self._record.events[-1].kind is not EventKind.STOP:
            self._calls.close_open(crashed=True)
            self._end(Stop(StopReason.CANCELLED, "the session was interrupted"))

    async def run(self, prompt: str) -> Trajectory:
        """A whole rollout: one message, the model's work, the record. The workspace is closed
        when this returns or raises, if the session made it."""
        try:
            await self.prompt(prompt)
            return await self.trajectory()
        finally:
            await self.close()

    async def prompt(self, text: str) -> StopReason:
        """Say something and let the model work until it stops. A failing sandbox, or an engine
        that does not answer in time, is StopReason.ERROR. Raises EtudeError when a person has to
        mend something (there is no sandbox), RuntimeError when the session is busy."""
        self._refuse_busy()
        self._begin()
        if self._record.events and self._record.events[-1].kind is EventKind.STOP:
            self._newest.clear()
        self._say(text)
        return await self._operate(self._turns())

    def steer(self, text: str) -> None:
        """Say something while the model works; it is told before its next turn. Raises
        RuntimeError when it does not work."""
        if not self.busy:
            raise RuntimeError("nothing runs that could be steered; use prompt")
        self._steered.append(text)

    async def cancel(self) -> None:
        """End the running operation; returns when its tools are dead and its record is whole.
        Without one nothing happens."""
        if self._work is not None:
            self._cancelled = True
            self._work.cancel()
            while self.busy:
                await asyncio.wait([self._work], timeout=0.01)

    async def summarize(self) -> StopReason:
        """Let the model summarize now. Raises RuntimeError when the session is busy."""
        self._refuse_busy()
        self._begin()
        return await self._operate(self._summarize_now())

    def note(self, text: str) -> None:
        """A remark of the harness's that the model reads with the next message: a change of mode,
        of effort, of the date. Appended, so that what the engine has cached stays valid."""
        self._begin()
        text = clean(text)
        self._record.emit(EventKind.NOTE, text=text)
        self._policy.note(text)

    def emit(self, kind: EventKind, **data: object) -> None:
        """Put an event of the driver's (a checkpoint) into the record."""
        self._begin()
        self._record.emit(kind, **data)

    async def trajectory(self) -> Trajectory:
        """The record so far, with what the workspace differs in now. A sandbox that cannot say
        makes the outcome an ERROR: not measured."""
        stop = self._stop or Stop(StopReason.CANCELLED, "nothing was asked")
        changes: dict[str, str | None] = {}
        if self._workspace is not None and self._baseline is not None:
            try:
                async with asyncio.timeout(self._settings.workspace_timeout):
                    changes, dropped = await self._baseline.changes(self._workspace)
            except (WorkspaceError, TimeoutError) as error:
                reason = f"the final state could not be read: {error or 'time is up'}"
                stop, dropped = Stop(StopReason.ERROR, stop.detail), reason
            stop = Stop(stop.reason, "; ".join(filter(None, (stop.detail, dropped))))
        return Trajectory(
            session_id=self._session_id,
            task_id=self._task_id,
            segments=self._policy.segments(self._settings.temperature) if self._begun else (),
            events=tuple(self._record.events),
            usage=self._record.usage,
            outcome=Outcome(stop.reason, stop.detail, changes, self._calls.changed),
        )

    async def close(self) -> None:
        """Close the workspace if the session made it. Idempotent."""
        if callable(self._source) and self._workspace is not None:
            workspace, self._workspace, self._baseline = self._workspace, None, None
            async with asyncio.timeout(self._settings.workspace_timeout):
                await workspace.close()

    async def open_workspace(self) -> Workspace:
        """The workspace, made and looked at when first asked for, with the rights of now."""
        try:
            # Calls that run side by side must not each make one.
            async with asyncio.timeout(self._settings.workspace_timeout), self._opening:
                if self._workspace is None:
                    source = self._source
                    self._workspace = await source() if callable(source) else source
                if self._baseline is None:
                    self._baseline = await Baseline.of(self._workspace)
        except OSError as error:  # TimeoutError is one; none of them is the model's doing.
            reason = str(error) or "time is up"
            raise WorkspaceError(f"no workspace could be made: {reason}") from error
        rights = Rights() if self._gate is None else self._gate.rights()
        return self._workspace if rights == Rights() else self._workspace.view(rights)

    def _refuse_busy(self) -> None:
        if self.busy:
            raise RuntimeError("the session is still working on the last message")

    def _begin(self) -> None:
        """The head, once."""
        if self._begun:
            return
        self._begun = True
        specs = [tool.spec() for tool in self._tools]
        self._policy.begin(self._system, specs)
        self._record.emit(EventKind.SYSTEM, **head_data(self._system, specs))

    def _say(self, text: str) -> None:
        text = clean(text)
        self._newest.append(text)
        self._record.emit(EventKind.USER, text=text)
        self._policy.say(text)

    async def _operate(self, work: Awaitable[Stop]) -> StopReason:
        """Run an operation to its end; whatever ends it, the record is whole afterwards."""
        started = time.monotonic()
        self._cancelled = False
        task = self._work = asyncio.ensure_future(work)
        try:
            stop = await asyncio.shield(task)
        except WorkspaceError as error:
            stop = Stop(StopReason.ERROR, f"the sandbox failed: {error}")
        except asyncio.CancelledError:
            task.cancel()
            await uninterrupted(_settled(task))
            self._end(Stop(StopReason.CANCELLED))
            if not self._cancelled:
                raise
            return StopReason.CANCELLED
        except BaseException as error:
            self._end(Stop(StopReason.ERROR, str(error)))
            raise
        finally:
            self._work = None
            self._record.took(time.monotonic() - started)
        self._end(stop)
        return stop.reason

    async def _turns(self) -> Stop:
        """Turns until one of them stops the session or all allowed ones are used."""
        for _ in range(self._settings.max_turns):
            self._take_steering()
            stop = await self._window() or await self._turn()
            if stop is not None and not (stop.reason is StopReason.FINISHED and self._steered):
                return stop
        turns, ends = self._settings.max_turns, self._settings.ends_after_max_turns
        if ends or (ends is None and turns == 1):
            return Stop(StopReason.FINISHED)
        return Stop(StopReason.TURN_LIMIT, f"all {turns} turns were used")

    def _take_steering(self) -> None:
        steered, self._steered = self._steered, []
        for text in steered:
            self._say(text)

    async def _turn(self) -> Stop | None:
        """One answer of the model, and the calls that it makes."""
        room = self._room(self._settings.max_turn_tokens)
        if room.tokens == 0:
            return room.cut
        try:
            answer = await self._policy.turn(self._limits(room.tokens), self._on_delta)
        except TimeoutError:
            return self._no_answer()
        self.budget.charge_answer(answer)
        self._record.turn(answer)
        self._fresh_window = False
        if not answer.parsed.calls:
            return Stop(StopReason.FINISHED) if answer.finish is Finish.STOP else room.cut
        return await self._calls.run()

    def _room(self, wanted: int) -> _Room:
        """How long the next answer may be, and what it means when it is cut there."""
        size, length = self._policy.prompt_tokens(), self._policy.context_length
        room = length - size
        if room < 1:
            reason = f"the next prompt has {size} tokens, the context {length}"
            return _Room(0, Stop(StopReason.CONTEXT_FULL, reason))
        allowed, reason = self.budget.room(size)
        if allowed == 0:
            return _Room(0, Stop(StopReason.BUDGET, reason))
        tokens = min(room, wanted, room if allowed is None else allowed)
        if tokens == room:
            where = "the answer was cut where the context is full"
            return _Room(tokens, Stop(StopReason.CONTEXT_FULL, where))
        if tokens == allowed:
            return _Room(tokens, Stop(StopReason.BUDGET, "the answer was cut at the budget's end"))
        return _Room(tokens, Stop(StopReason.LENGTH, f"the answer was cut at {tokens} tokens"))

    def _limits(self, tokens: int) -> TurnLimits:
        """Each turn has a seed of its own that depends on the session's and on its number."""
        text = f"{self._settings.seed}/{self._record.turns}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        settings = self._settings
        return TurnLimits(tokens, settings.temperature, seed, settings.turn_timeout)

    def _no_answer(self) -> Stop:
        seconds = self._settings.turn_timeout
        return Stop(StopReason.ERROR, f"the engine gave no answer within {seconds:g} s")

    async def _window(self) -> Stop | None:
        """Begin a new context window when the trigger is passed."""
        settings, window = self._settings.summary, self._record.summaries
        trigger = settings.window_trigger(self._settings.seed, window)
        if trigger is None:
            return None
        size = self._policy.prompt_tokens()
        if size <= trigger:
            return None
        if self._fresh_window:
            return Stop(
                StopReason.CONTEXT_FULL,
                f"what every window begins with has {size} tokens, more than the trigger of a"
                f" summary ({trigger})",
            )
        stop = await self._summarize_now()
        return None if stop.reason is StopReason.FINISHED else stop

    async def _summarize_now(self) -> Stop:
        """Ask for a summary and go on in a new window."""
        if self._fresh_window:
            return Stop(StopReason.FINISHED, "there is nothing to summarize")
        settings = self._settings.summary
        question = query(int(settings.max_tokens * _WORDS_PER_TOKEN))
        room = self._room(settings.max_tokens)
        if room.tokens == 0:
            return room.cut
        try:
            answer = await self._policy.ask(question, self._limits(room.tokens), self._on_delta)
        except TimeoutError:
            return self._no_answer()
        self.budget.charge_answer(answer)
        history = await self._keep_history()
        text = opening(
            answer.parsed.text.strip() or "(nothing was written)",
            count=self._record.summaries + 1,
            state=self._state(),
            history=history,
            newest="\n\n".join(self._newest),
        )
        self._record.turn(answer, summary={"query": question, "opening": text})
        self._policy.begin_segment(text)
        self._fresh_window = True
        return Stop(StopReason.FINISHED)

    async def _keep_history(self) -> str | None:
        """Write the conversation where the model can read it; None without tools to read."""
        if not self._tools:
            return None
        path = f"{HISTORY_FOLDER}/history-{self._record.summaries + 1}.md"
        text = events_to_markdown(self._record.events)
        await self.open_workspace()
        assert self._workspace is not None
        await self._workspace.write(path, text.encode())
        return path

    def _state(self) -> str:
        """What the harness knows better than any summary."""
        lines = [f"to-do ({todo.state}): {todo.text}" for todo in self._context.todos]
        left = self.budget.remaining()
        return "\n".join([*lines, *([f"budget left: {left}"] if left else [])])

    def _end(self, stop: Stop) -> None:
        """Close the record: no call stays without a result, no word of the person's unsaid."""
        self._calls.close_open()
        self._take_steering()
        self._stop = stop
        self._record.emit(EventKind.STOP, reason=stop.reason.value, detail=stop.detail)


async def _settled(task: asyncio.Task[Stop]) -> None:
    await asyncio.wait([task])
