"""A person's session in a project: the real files, a gate, checkpoints, a log that can be resumed.

Terminal, headless run and editor all hold this one object; what they add is how it looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from etude.agent.backend import Backend
from etude.agent.budget import Budget
from etude.agent.checkpoints import Checkpoints
from etude.agent.delegate import Delegates
from etude.agent.effort import NOTES, EffortLevel
from etude.agent.explain import explain, in_one_line
from etude.agent.instructions import find_skills, read_instructions, skills_text
from etude.agent.log import SessionLog
from etude.agent.permissions import Asker, Mode, Permissions, Request
from etude.agent.policy import OnDelta
from etude.agent.prompts import SYSTEM_PROMPT
from etude.agent.session import Session
from etude.agent.sessions import SessionStore
from etude.agent.settings import SessionSettings
from etude.agent.tools import AnyTool, session_tools, tool_mounts
from etude.agent.tools.diagnostics import Diagnostics
from etude.agent.tools.skill import ReadSkill
from etude.agent.tools.tool import Effect
from etude.errors import EtudeError
from etude.machine import config_folder, state_folder
from etude.records import Event, EventKind, StopReason
from etude.sandbox.protocol import Image, Sandbox, Workspace

_SUMMARY_AT = 0.75
"""Share of the context at which a session summarizes itself."""

AskPerson = Callable[[str, Sequence[str]], Awaitable[str]]


@dataclass(frozen=True)
class LiveOptions:
    """What a person chose. `mode` None is that of the settings file; `money` is in US dollars;
    `allow_hosts` may be fetched from."""

    project: Path
    mode: Mode | None = None
    effort: EffortLevel = EffortLevel.MEDIUM
    settings: SessionSettings = field(default_factory=SessionSettings)
    money: float | None = None
    allow_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drivers:
    """What a driver lends. `asker` answers whether a call may run (None: nobody is there), `ask`
    a question of the model's; `open_sandbox` is called when the first tool needs it. `tools` takes
    the place of the usual ones (a trained model knows its recipe's); `extra_tools` come from tool
    servers; `say` shows the person a sentence that is no part of the conversation."""

    backend: Backend
    open_sandbox: Callable[[], Awaitable[Sandbox]]
    asker: Asker | None = None
    ask: AskPerson | None = None
    tools: tuple[AnyTool, ...] | None = None
    on_event: Callable[[Event], None] = lambda event: None
    on_delta: OnDelta | None = None
    on_child_event: Callable[[str, Event], None] = lambda session_id, event: None
    say: Callable[[str], None] = lambda sentence: None
    extra_tools: tuple[AnyTool, ...] = ()


@dataclass(frozen=True)
class Undone:
    """What an undo did: `left` is the checkpoint of the state before it, `changed` whether any
    file was different."""

    left: str
    changed: bool


class LiveSession:
    """See the module. Make one with `open_live`; use as an async context manager."""

    def __init__(
        self,
        session: Session,
        log: SessionLog,
        permissions: Permissions,
        checkpoints: Checkpoints,
        options: LiveOptions,
        delegates: Delegates,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._started = False
        self._warned: set[str] = set()
        self.session = session
        self.permissions = permissions
        self.checkpoints = checkpoints
        self.options = options
        self.delegates = delegates
        self.effort = options.effort
        self._log = log
        self._day: date | None = None

    async def __aenter__(self) -> LiveSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End background jobs, close workspace and log. Idempotent."""
        try:
            await self.session.close()
        finally:
            self._log.close()

    @property
    def dropped(self) -> str | None:
        """What a crash has cost the log that this session goes on with, in one sentence."""
        return self._log.earlier.dropped

    @property
    def used(self) -> bool:
        """Whether the person has said anything."""
        return any(event.kind is EventKind.USER for event in self.session.events)

    @property
    def mode(self) -> Mode:
        """What may be done without asking."""
        return self.permissions.mode

    async def prompt(self, text: str) -> StopReason:
        """A message of the person's. The project's present state is kept first, so that it can be
        gone back to."""
        await self._start()
        self._note_date()
        if not self.permissions.rights().readonly:
            await self.checkpoint(text)
        try:
            return await self.session.prompt(text)
        finally:
            await self._stopped()

    async def checkpoint(self, label: str) -> str:
        """Keep the project's present state; returns its id."""
        kept = await asyncio.to_thread(self.checkpoints.save, label[:100])
        self.session.emit(EventKind.CHECKPOINT, id=kept)
        return kept

    async def undo(self, to: str | None = None) -> Undone:
        """Put the project back to a checkpoint (None: the one before the newest message that was
        not undone yet); the state that is left is kept as a checkpoint too. The model is told
        when files were different. Raises EtudeError when there is no such checkpoint."""
        standing = self._standing()
        if to is None and not standing:
            raise EtudeError("nothing more to undo: no checkpoint of an earlier message is left")
        wanted = standing[-1] if to is None else to
        left = await asyncio.to_thread(self.checkpoints.save, "before undo")
        restored = await asyncio.to_thread(self.checkpoints.undo, wanted)
        different = bool(restored.written or restored.removed)
        self.session.emit(EventKind.CHECKPOINT, id=left, undone_to=wanted)
        if different:
            self.session.note(
                f"[The user put the files back to an earlier state, checkpoint {wanted}.]"
            )
        return Undone(left, different)

    async def changes(self, *, since_start: bool = False) -> str:
        """What files differ in from before the newest message (or from before the first), as
        unified text. Raises EtudeError when nothing was kept."""
        kept = self._kept()
        if not kept:
            raise EtudeError("nothing was changed yet: there is no checkpoint to compare with")
        old = kept[0] if since_start else kept[-1]
        return await asyncio.to_thread(self.checkpoints.diff, old)

    def _kept(self) -> list[str]:
        """The checkpoints before each of the person's messages, oldest first."""
        return self._messages()[0]

    def _standing(self) -> list[str]:
        """Those of messages that were not undone."""
        return self._messages()[1]

    def _messages(self) -> tuple[list[str], list[str]]:
        """See `_kept` and `_standing`. Read from the events, so that a resumed session knows."""
        found: list[str] = []
        standing: list[str] = []
        at: dict[str, list[str]] = {}  # Which messages stood at each checkpoint.
        newest: str | None = None
        for event in self.session.events:
            if event.kind is EventKind.CHECKPOINT:
                newest = checkpoint = str(event.data["id"])
                at[checkpoint] = list(standing)
                undone_to = event.data.get("undone_to")
                if undone_to is not None:
                    newest, standing = None, list(at.get(undone_to, standing))
            elif event.kind is EventKind.USER and newest is not None:
                found.append(newest)
                standing.append(newest)
                newest = None
            elif event.kind is EventKind.TOOL_RESULT:
                newest = None  # It was that of a call: a message that steers has none of its own.
        return found, standing

    def set_mode(self, mode: Mode) -> None:
        """Change what may be done, from the next call on."""
        if mode is not self.permissions.mode:
            self.permissions.set_mode(mode)
            self.session.note(self.permissions.mode_note())

    def set_effort(self, effort: EffortLevel) -> None:
        """Change how hard the model should try, from its next turn on."""
        if effort is not self.effort:
            self.effort = effort
            self.session.note(NOTES[effort])

    async def _start(self) -> None:
        """Tell the hooks of the session, once."""
        hooks = self.permissions.hooks
        if hooks is not None and not self._started:
            self._started = True
            self._tell((await hooks.session_start(self.session.session_id)).failures)

    async def _stopped(self) -> None:
        """Tell the hooks why the work ended, and the person what hooks failed at."""
        hooks, last = self.permissions.hooks, self.session.events[-1]
        failures, self.permissions.failures = self.permissions.failures, []
        if hooks is not None and last.kind is EventKind.STOP:
            reason, detail = last.data["reason"], last.data["detail"]
            outcome = await hooks.stop(self.session.session_id, reason, detail)
            failures += outcome.failures
        self._tell(failures)
        if last.kind is EventKind.STOP and last.data["reason"] == StopReason.FINISHED.value:
            judged = explain(self.session.events).judged
            self._tell([in_one_line(claim) for claim in judged])
        await self._warn_of_repositories()

    async def _warn_of_repositories(self) -> None:
        """Mounts guard the project's own repository; of the rest the person is warned."""
        workspace = self.session.workspace
        if workspace is None or self.permissions.rights().readonly:
            return
        for sentence in await workspace.changed_repositories():
            if sentence not in self._warned:
                self._warned.add(sentence)
                self._say(sentence)

    def _tell(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self._say(sentence)

    def _note_date(self) -> None:
        today = date.today()
        if today != self._day:
            self._day = today
            self.session.note(f"[date: {today.isoformat()}]")


async def open_live(
    drivers: Drivers,
    options: LiveOptions,
    *,
    store: SessionStore | None = None,
    resume: str | None = None,
    fork_turn: int | None = None,
    fork: bool = False,
    about: Mapping[str, Any] | None = None,
) -> LiveSession:
    """A new session in a project, an old one to go on with (`resume`: its id), or a copy of it
    (`fork`, up to the end of turn `fork_turn`). `about` is kept with a new session. Raises
    EtudeError when the project, the model or the old session cannot be used."""
    project = usable_project(options.project)
    store = store or SessionStore(state_folder() / "sessions")
    facts = {**(about or {}), "project": str(project), "model": drivers.backend.name}
    if resume is None:
        session_id, log = await asyncio.to_thread(store.new, facts)
    elif fork:
        session_id, log = await asyncio.to_thread(store.fork, resume, fork_turn)
    else:
        session_id, log = resume, await asyncio.to_thread(store.open, resume)
    try:
        live = await _assemble(drivers, options, project, store, session_id, log)
        if log.earlier.entries:
            live.session.recall(log.earlier.entries)
        else:
            _first_notes(live)
        return live
    except BaseException:
        log.close()
        if resume is None or fork:
            store.path(session_id).unlink(missing_ok=True)  # Nothing was said in it.
        raise


def usable_project(folder: Path) -> Path:
    """The folder, absolute. Raises EtudeError for one that is missing or far too much."""
    if not folder.is_dir():
        raise EtudeError(f"{folder} is no folder; name the project to work on")
    project = folder.resolve()
    if project in (Path("/"), Path.home().resolve()):
        raise EtudeError(f"{project} is no project folder; go to the repository to work on first")
    return project


def _first_notes(live: LiveSession) -> None:
    if live.mode is not Mode.ASK:
        live.session.note(live.permissions.mode_note())
    if live.effort is not EffortLevel.MEDIUM:
        live.session.note(NOTES[live.effort])


async def _assemble(
    drivers: Drivers,
    options: LiveOptions,
    project: Path,
    store: SessionStore,
    session_id: str,
    log: SessionLog,
) -> LiveSession:
    async def keep(request: Request) -> None:
        # An edit can be taken back to the state before the message; a command may do anything.
        if request.effect is Effect.EXECUTE:
            await live.checkpoint(f"before: {request.subject}")

    permissions = await asyncio.to_thread(
        Permissions.load, project, options.mode, asker=drivers.asker, before_change=keep
    )
    permissions.fetch_hosts = options.allow_hosts
    checkpoints = Checkpoints(project, state_folder() / "checkpoints")
    backend = drivers.backend
    policy = await backend.new_policy()
    delegates = Delegates(
        new_policy=backend.new_policy,
        new_log=lambda child: SessionLog(store.path(child), {"parent": session_id, "id": child}),
        on_event=drivers.on_child_event,
    )
    instructions = await asyncio.to_thread(read_instructions, project, config_folder())
    skills = find_skills(project, config_folder())
    parts = [SYSTEM_PROMPT, instructions.text, skills_text(skills)]
    usual = session_tools(ask=drivers.ask, allow_hosts=options.allow_hosts)
    tools = (
        *(usual if drivers.tools is None else drivers.tools),
        *([ReadSkill(skills)] if skills else []),
        *drivers.extra_tools,
    )

    async def workspace() -> Workspace:
        sandbox = await drivers.open_sandbox()
        return await sandbox.create(Image(root=project, live=True, readonly=tool_mounts()))

    session = Session(
        policy,
        workspace,
        tools,
        _summarizing(options.settings, policy.context_length),
        session_id=session_id,
        system="\n\n".join(part for part in parts if part),
        gate=permissions,
        budget=_budget(options, backend),
        log=log,
        delegate=delegates,
        on_event=drivers.on_event,
        on_delta=drivers.on_delta,
    )
    session.context.diagnose = Diagnostics()
    live = LiveSession(session, log, permissions, checkpoints, options, delegates, drivers.say)
    if instructions.left_out:
        drivers.say(instructions.left_out)
    return live


def _summarizing(settings: SessionSettings, context_length: int) -> SessionSettings:
    """A person's session summarizes itself before its context is full."""
    if settings.summary.trigger is not None:
        return settings
    trigger = max(16, round(context_length * _SUMMARY_AT))
    return settings.model_copy(
        update={"summary": settings.summary.model_copy(update={"trigger": trigger})}
    )


def _budget(options: LiveOptions, backend: Backend) -> Budget:
    if options.money is not None and backend.price is None:
        raise EtudeError(
            f"nobody knows the price of {backend.name}, so no budget in money can be kept; add it"
            f" to {config_folder() / 'prices.toml'}"
        )
    return Budget(tokens=options.settings.token_budget, money=options.money, price=backend.price)
