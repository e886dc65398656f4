"""Hooks: programs of the person's that run on events of a session.

They run on the host, as the person, with a deadline: that is what they are for. Hence those in the
person's own settings run, and those that a project brings run only while exactly them is approved,
which is looked up anew each time: a session may change the script that a hook runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from etude.agent.permissions.approvals import Approvals, Brought, command_content
from etude.agent.permissions.gate import Request
from etude.agent.permissions.settings import Hook, HookEvent
from etude.agent.tools.tool import ToolResult

HOOK_KIND = "hook"
_REFUSES = 2
_TOLD = 2000


@dataclass(frozen=True)
class HookOutcome:
    """`refusal` is the reason why a call must not run, or None; `failures` has one sentence for
    each hook that did not end as it should."""

    refusal: str | None = None
    failures: tuple[str, ...] = ()


def hook_brought(hook: Hook, project: Path) -> Brought:
    """What has to be approved for a project's hook."""
    content = command_content(hook.model_dump(mode="json"), hook.command, project)
    return Brought(HOOK_KIND, project, content)


class Hooks:
    """The hooks of a session. `own` are the person's, `brought` the project's."""

    def __init__(
        self,
        project: Path,
        own: Sequence[Hook] = (),
        brought: Sequence[Hook] = (),
        approvals: Approvals | None = None,
    ) -> None:
        self._project = project
        self._own = tuple(own)
        self._brought = tuple(brought)
        self._approvals = approvals

    def pending(self) -> tuple[Brought, ...]:
        """The project's hooks that still need a person's yes."""
        brought = [hook_brought(hook, self._project) for hook in self._brought]
        return tuple(brought) if self._approvals is None else self._approvals.pending(brought)

    async def before_tool(self, request: Request) -> HookOutcome:
        """Ask the hooks about a call. Exit code 0 lets it through; 2 refuses it with standard
        error as the reason; a hook that fails otherwise refuses too, because it is a guard."""
        return await self._run(HookEvent.BEFORE_TOOL, _call(request), request.tool)

    async def after_tool(self, request: Request, result: ToolResult) -> HookOutcome:
        """Tell the hooks of a call's result."""
        error = None if result.error_class is None else result.error_class.value
        payload = {**_call(request), "result": {"text": result.text, "error_class": error}}
        return await self._run(HookEvent.AFTER_TOOL, payload, request.tool)

    async def session_start(self, session_id: str) -> HookOutcome:
        """Tell the hooks that a session begins."""
        return await self._run(HookEvent.SESSION_START, {"session": session_id}, None)

    async def stop(self, session_id: str, reason: str, detail: str) -> HookOutcome:
        """Tell the hooks why an operation ended."""
        payload = {"session": session_id, "reason": reason, "detail": detail}
        return await self._run(HookEvent.STOP, payload, None)

    def _active(self, event: HookEvent, tool: str | None) -> list[Hook]:
        hooks = [hook for hook in self._own if _concerns(hook, event, tool)]
        for hook in self._brought:
            if not _concerns(hook, event, tool) or self._approvals is None:
                continue
            brought = hook_brought(hook, self._project)
            if self._approvals.approved(brought.kind, brought.project, brought.content):
                hooks.append(hook)
        return hooks

    async def _run(
        self, event: HookEvent, payload: Mapping[str, Any], tool: str | None
    ) -> HookOutcome:
        failures: list[str] = []
        for hook in self._active(event, tool):
            data = {"event": event.value, "project": str(self._project), **payload}
            code, said = await self._program(hook, json.dumps(data).encode())
            if code == 0:
                continue
            if code == _REFUSES and event is HookEvent.BEFORE_TOOL:
                return HookOutcome(said or f"the hook {hook.command[0]} refuses", tuple(failures))
            how = "failed to end well" if code is None else f"ended with exit code {code}"
            failures.append(f"the hook {hook.command[0]} {how}: {said or 'it said nothing'}")
            if event is HookEvent.BEFORE_TOOL:
                return HookOutcome(failures[-1], tuple(failures))
        return HookOutcome(None, tuple(failures))

    async def _program(self, hook: Hook, data: bytes) -> tuple[int | None, str]:
        """(exit code, or None when there is none, and what it said on standard error). Files
        instead of pipes: nothing that it left running can hold us up."""
        program = _found(hook.command[0], self._project)
        if program is None:
            return None, "there is no such program"
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
            told.write(data)
            told.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    program,
                    *hook.command[1:],
                    stdin=told,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=errors,
                    cwd=self._project,
                    start_new_session=True,
                )
            except OSError as error:
                return None, f"it could not be started ({error.strerror})"
            try:
                code = await asyncio.wait_for(process.wait(), hook.timeout)
            except TimeoutError:
                return None, f"it was killed after {hook.timeout:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            return code, _tail(errors)


def _call(request: Request) -> dict[str, Any]:
    return {
        "id": request.call_id,
        "tool": request.tool,
        "effect": request.effect.value,
        "subject": request.subject,
        "arguments": dict(request.arguments),
    }


def _concerns(hook: Hook, event: HookEvent, tool: str | None) -> bool:
    if hook.event is not event:
        return False
    if tool is None or not hook.tools:
        return True
    patterns = [".*".join(map(re.escape, name.split("*"))) for name in hook.tools]
    return any(re.fullmatch(pattern, tool) for pattern in patterns)


def _found(name: str, project: Path) -> str | None:
    """The program that a hook names: a path from the project, or a name on PATH. Folders of PATH
    that depend on where one stands are left out, since that is the repository."""
    if "/" in name:
        path = project / name
        return str(path) if path.is_file() else None
    folders = [f for f in os.environ.get("PATH", os.defpath).split(os.pathsep) if f[:1] == "/"]
    return shutil.which(name, path=os.pathsep.join(folders))


def _tail(file: IO[bytes]) -> str:
    """The end of what a program said."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TOLD))
    return file.read(_TOLD).decode("utf-8", "replace").strip()
