"""Hooks: programs of the person's that run on events of a session.

They run on the host, as the person, with a deadline: that is what they are for. Hence those in the
person's own settings run, and those that a project brings run only while exactly them is approved,
which is looked up anew each time: a session may change the script that a hook runs. What then runs
is a private copy of the very bytes that were looked at, and a guard that was approved when the
session began does not fall silent by being changed: then no call runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from etude.agent.permissions.approvals import (
    Approvals,
    Brought,
    NamedFile,
    command_content,
    named_files,
    paths_inside,
)
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


@dataclass(frozen=True)
class _Active:
    """A hook that is to run, with the approved files that it names; of a person's own hook the
    files are taken as they are."""

    hook: Hook
    files: tuple[NamedFile, ...] = ()


def hook_brought(hook: Hook, project: Path) -> Brought:
    """What has to be approved for a project's hook."""
    return _brought(hook, project, named_files(hook.command, project))


def _brought(hook: Hook, project: Path, files: Sequence[NamedFile]) -> Brought:
    return Brought(HOOK_KIND, project, command_content(hook.model_dump(mode="json"), files))


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
        self._approved: dict[int, str] = {}
        """Fingerprints of the project's hooks that were approved when last looked at."""
        for number in range(len(self._brought)):
            self._look(number)
        counting = [*self._own, *(self._brought[number] for number in self._approved)]
        self.files = tuple(
            sorted({f for hook in counting for f in paths_inside(hook.command, project)})
        )
        """Files of the project that run as hooks, relative to it: no guest may write them."""

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

    def _look(self, number: int) -> tuple[_Active | None, bool]:
        """One of the project's hooks, if it is approved as it is now, else whether it was approved
        before it was changed."""
        if self._approvals is None:
            return None, False
        hook = self._brought[number]
        files = named_files(hook.command, self._project)
        brought = _brought(hook, self._project, files)
        if self._approvals.approved(brought.kind, brought.project, brought.content):
            self._approved[number] = brought.fingerprint
            return _Active(hook, files), False
        return None, self._approved.get(number, brought.fingerprint) != brought.fingerprint

    def _active(self, event: HookEvent, tool: str | None) -> tuple[list[_Active], list[Hook]]:
        """The hooks to run, and those that were changed since they were approved."""
        active = [_Active(hook) for hook in self._own if _concerns(hook, event, tool)]
        changed: list[Hook] = []
        for number, hook in enumerate(self._brought):
            if _concerns(hook, event, tool):
                found, differs = self._look(number)
                active += [found] if found is not None else []
                changed += [hook] if differs else []
        return active, changed

    async def _run(
        self, event: HookEvent, payload: Mapping[str, Any], tool: str | None
    ) -> HookOutcome:
        active, changed = self._active(event, tool)
        failures = [f"the approved hook {shlex.join(hook.command)} was changed" for hook in changed]
        if failures and event is HookEvent.BEFORE_TOOL:
            return HookOutcome(failures[0], tuple(failures))
        for item in active:
            hook = item.hook
            data = {"event": event.value, "project": str(self._project), **payload}
            code, said = await self._program(item, json.dumps(data).encode())
            if code == 0:
                continue
            if code == _REFUSES and event is HookEvent.BEFORE_TOOL:
                return HookOutcome(said or f"the hook {hook.command[0]} refuses", tuple(failures))
            how = "failed to end well" if code is None else f"ended with exit code {code}"
            failures.append(f"the hook {hook.command[0]} {how}: {said or 'it said nothing'}")
            if event is HookEvent.BEFORE_TOOL:
                return HookOutcome(failures[-1], tuple(failures))
        return HookOutcome(None, tuple(failures))

    async def _program(self, item: _Active, data: bytes) -> tuple[int | None, str]:
        """(exit code, or None when there is none, and what it said on standard error)."""
        if not item.files:
            return await self._process(item.hook, item.hook.command, {}, data)
        with tempfile.TemporaryDirectory(prefix="etude-hook-") as folder:
            try:
                copies = _copied(item.files, self._project, Path(folder))
            except OSError as error:
                return None, f"its files could not be copied ({error.strerror})"
            rest = (_replaced(word, copies) for word in item.hook.command[1:])
            command = (item.hook.command[0], *rest)
            return await self._process(item.hook, command, copies, data)

    async def _process(
        self, hook: Hook, command: Sequence[str], copies: Mapping[str, str], data: bytes
    ) -> tuple[int | None, str]:
        """Files instead of pipes: nothing that it left running can hold us up."""
        program = _found(command[0], self._project)
        if program is None:
            return None, "there is no such program"
        # By its old name, so that an interpreter still finds what belongs to it.
        executable = copies.get(command[0], program) if "/" in command[0] else program
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
            told.write(data)
            told.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    program,
                    *command[1:],
                    executable=executable,
                    stdin=told,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=errors,
                    cwd=self._project,
                    env={**os.environ, "PATH": _search_path(self._project)},
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


def _copied(files: Sequence[NamedFile], project: Path, folder: Path) -> dict[str, str]:
    """By each name the path of a copy that no session can write; a file outside the project is
    out of its reach already. Copies stand to each other as the files do. Raises OSError."""
    root = os.path.realpath(project)
    copies: dict[str, str] = {}
    for file in files:
        copies[file.name] = file.real
        if file.real.startswith(f"{root}/"):
            copy = folder / file.real.removeprefix(f"{root}/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():  # Two names may be one file.
                copy.write_bytes(file.data)
                copy.chmod(0o700)
            elif copy.read_bytes() != file.data:
                raise OSError(0, "they change at this moment")
            copies[file.name] = str(copy)
    return copies


def _replaced(word: str, copies: Mapping[str, str]) -> str:
    """An argument with the copy of the file that it names."""
    if word in copies:
        return copies[word]
    option, equals, name = word.rpartition("=")
    return f"{option}{equals}{copies[name]}" if equals and name in copies else word


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
    """The program that a hook names: a path from the project, or a name on PATH."""
    if "/" in name:
        path = project / name
        return str(path) if path.is_file() else None
    return shutil.which(name, path=_search_path(project))


def _search_path(project: Path) -> str:
    """PATH without folders that depend on where one stands, and without the project's: a session
    writes there."""
    root = os.path.realpath(project)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    kept = [
        folder
        for folder in folders
        if folder[:1] == "/" and not f"{os.path.realpath(folder)}/".startswith(f"{root}/")
    ]
    return os.pathsep.join(kept)


def _tail(file: IO[bytes]) -> str:
    """The end of what a program said."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TOLD))
    return file.read(_TOLD).decode("utf-8", "replace").strip()
