"""Running the calls of one turn, and handing their results to the model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from etude.agent.permissions.gate import Gate, Permission, Request
from etude.agent.policy import Policy
from etude.agent.prompts import repeat_note
from etude.agent.record import SessionRecord, Stop
from etude.agent.repetition import RepetitionGuard
from etude.agent.settings import SessionSettings
from etude.agent.summary import HISTORY_FOLDER
from etude.agent.tools import AnyTool, ErrorClass, ToolContext, ToolResult
from etude.agent.tools.text import clean, head_and_tail
from etude.agent.tools.tool import Prepared, invoke, prepare
from etude.errors import EtudeError
from etude.models.renderer import ToolCall
from etude.records import EventKind, StopReason
from etude.sandbox.protocol import Rights, Workspace, WorkspaceError


class Calls:
    """The calls of a session: each asked about, run, recorded and answered exactly once."""

    def __init__(
        self,
        policy: Policy,
        record: SessionRecord,
        tools: tuple[AnyTool, ...],
        context: ToolContext,
        settings: SessionSettings,
        gate: Gate | None,
    ) -> None:
        self._policy = policy
        self._record = record
        self._tools = tools
        self._context = context
        self._settings = settings
        self._gate = gate
        self._guard = RepetitionGuard()
        self._outputs = 0
        self._begun: dict[str, float] = {}
        self.changed = False
        """Whether an edit of the workspace ever succeeded."""

    async def run(self) -> Stop | None:
        """The turn's calls in order; where such stand together that may, they run side by side."""
        while self._record.waiting:
            prepared = [prepare(self._tools, call) for _, call in self._record.waiting]
            together = 1
            while together < len(prepared) and all(
                isinstance(item, Prepared) and item.tool.side_by_side(item.args)
                for item in prepared[: together + 1]
            ):
                together += 1
            waiting = list(self._record.waiting)[:together]
            # Exceptions are collected so that being cancelled waits for every call to be dead.
            results = await asyncio.gather(
                *(
                    self._call(call_id, item)
                    for (call_id, _), item in zip(waiting, prepared, strict=False)
                ),
                return_exceptions=True,
            )
            for (_, call), result in zip(waiting, results, strict=True):
                if isinstance(result, BaseException):
                    raise result
                stop = await self._take(call, result)
                if stop is not None:
                    return stop
        return None

    async def _call(self, call_id: str, prepared: Prepared | ToolResult) -> ToolResult:
        """Ask the gate, then run. A failing sandbox is a result too, which `_take` acts on."""
        if isinstance(prepared, ToolResult):
            return prepared
        if self._gate is None:
            return await self._run(call_id, prepared)
        request = Request(
            call_id,
            prepared.tool.name,
            prepared.tool.effect,
            prepared.subject,
            prepared.args.model_dump(mode="json"),
        )
        permission = await self._gate.check(request)
        self._note_permission(call_id, permission)
        if not permission.allowed:
            reason = permission.reason or "this call is not allowed"
            return ToolResult(f"refused: {reason}", ErrorClass.REFUSED)
        result = await self._run(call_id, prepared, readonly=permission.readonly)
        await self._gate.ran(request, result)
        return result

    async def _run(self, call_id: str, prepared: Prepared, *, readonly: bool = False) -> ToolResult:
        self._begun[call_id] = time.monotonic()
        context = self._context
        if readonly:
            context = replace(context, workspace=self._readonly)
        try:
            return await invoke(prepared, context)
        except WorkspaceError as error:
            return ToolResult(str(error), ErrorClass.SANDBOX)
        except EtudeError:
            del self._begun[call_id]  # There was nothing to run it in.
            raise

    async def _readonly(self) -> Workspace:
        """The workspace for a call that must not write there."""
        return (await self._context.workspace()).view(Rights(readonly=True))

    def _note_permission(self, call_id: str, permission: Permission) -> None:
        """A call that needed nobody's word leaves no event."""
        if permission.by or not permission.allowed:
            self._record.emit(
                EventKind.PERMISSION,
                id=call_id,
                allowed=permission.allowed,
                by=permission.by,
                reason=permission.reason,
            )

    async def _take(self, call: ToolCall, result: ToolResult) -> Stop | None:
        """Book the result of the oldest open call. Raises WorkspaceError for a failed sandbox."""
        if result.error_class is ErrorClass.SANDBOX:
            await self._answer(replace(result, text=f"the sandbox failed: {result.text}"))
            raise WorkspaceError(result.text)
        count = self._guard.count(call, result)
        self.changed = self.changed or result.changed
        await self._answer(result, count if count >= self._settings.repeat_note else 0)
        if result.final:
            return Stop(StopReason.FINISHED, result.text)
        if count >= self._settings.repeat_stop:
            name = call.name or "a malformed call"
            return Stop(StopReason.REPEATED_CALL, f"{name} gave the same {count} times")
        return None

    async def _answer(self, result: ToolResult, repeated: int = 0) -> None:
        """Hand the result of the oldest open call to the model and to the log."""
        text = clean(result.text)
        if len(text) > self._settings.max_result_chars:
            text = await self._shortened(text, result.error_class)
        text += repeat_note(repeated) if repeated else ""
        call_id = self._record.result(text, result.error_class)
        self._begun.pop(call_id, None)
        self._policy.answer(call_id, text)

    async def _shortened(self, text: str, error_class: ErrorClass | None) -> str:
        """Head and tail, and the name of a file in the guest that holds all of it."""
        short = head_and_tail(text, self._settings.max_result_chars)
        if error_class is ErrorClass.SANDBOX:
            return short
        self._outputs += 1
        path = f"{HISTORY_FOLDER}/output-{self._outputs}.txt"
        try:
            workspace = await self._context.workspace()
            await workspace.write(path, text.encode())
        except (OSError, WorkspaceError) as error:
            return f"{short}\n[the whole could not be kept: {error}]"
        return f"{short}\n[{len(text)} characters of it are in {path}]"

    def close_open(self, *, crashed: bool = False) -> None:
        """No call stays without a result. After a crash nobody knows which of them had begun."""
        while self._record.waiting:
            call_id = self._record.waiting[0][0]
            if crashed:
                text = "not known: the program ended before the result was kept; it may have run."
                kind = ErrorClass.INTERRUPTED
            elif call_id in self._begun:
                seconds = time.monotonic() - self._begun[call_id]
                text = f"interrupted after {seconds:.1f} s; what it did until then is done."
                kind = ErrorClass.INTERRUPTED
            else:
                text, kind = "not run: the session ended before.", ErrorClass.NOT_RUN
            self._policy.answer(self._record.result(text, kind), text)
        self._begun.clear()
