"""Sub-agents: a session started by a session, on the same workspace, account and gate."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from etude.agent.log import SessionLog
from etude.agent.policy import Policy
from etude.agent.session import Session
from etude.agent.tools import AnyTool, ErrorClass, ToolResult
from etude.agent.tools.tool import Effect
from etude.records import Event, EventKind, StopReason, Trajectory
from etude.sandbox.protocol import Rights

_NOT_LENT = frozenset({"task", "ask", "finish"})
"""A sub-agent starts no others, asks nobody, and ends by answering."""


@dataclass
class Delegates:
    """Runs sub-agents. `new_policy` gives each a conversation of its own with the same model;
    `new_log` a log of its own, by the sub-session's id. `trajectories` are their records."""

    new_policy: Callable[[], Awaitable[Policy]]
    new_log: Callable[[str], SessionLog | None] = lambda session_id: None
    on_event: Callable[[str, Event], None] = lambda session_id, event: None
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def __call__(self, parent: Session, prompt: str, readonly: bool) -> ToolResult:
        """Run one to its end; its final message is the result. What its parent may not do it may
        not either; what it spends its parent has spent."""
        session_id = f"{parent.session_id}.{next(self._numbers)}"
        log = self.new_log(session_id)
        gate = parent.gate
        narrowed = None if gate is None else gate.narrowed(readonly=readonly)
        workspace = await parent.open_workspace()
        session = Session(
            await self.new_policy(),
            workspace.view(Rights(readonly=True)) if readonly else workspace,
            _lent(parent.tools, readonly),
            parent.settings,
            session_id=session_id,
            system=parent.system,
            gate=narrowed,
            budget=parent.budget,
            log=log,
            on_event=lambda event: self.on_event(session_id, event),
        )
        try:
            stop = await session.prompt(prompt)
        finally:
            self.trajectories.append(await session.trajectory())
            if log is not None:
                log.close()
        text = next(
            (e.data["text"] for e in reversed(session.events) if e.kind is EventKind.ASSISTANT), ""
        )
        if stop is StopReason.FINISHED:
            return ToolResult(text or "(the sub-agent said nothing)")
        return ToolResult(f"the sub-agent stopped: {stop.value}\n{text}", ErrorClass.NOT_RUN)


def _lent(tools: tuple[AnyTool, ...], readonly: bool) -> tuple[AnyTool, ...]:
    """The parent's tools less those a sub-agent has no use for or no right to."""
    kept = [tool for tool in tools if tool.name not in _NOT_LENT]
    return tuple(tool for tool in kept if not readonly or tool.effect is not Effect.WRITE)
