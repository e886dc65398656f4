"""`etude acp`: an agent of the Agent Client Protocol, spoken with an editor over stdin and stdout.

The official SDK does the protocol; this is one more thin driver of `LiveSession`. Standard output
carries the protocol and nothing else: whatever else is printed goes to standard error.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.live import Drivers, open_live, usable_project
from etude.agent.mcp.definitions import Origin, ServerDefinition, ServerSettings
from etude.agent.mcp.servers import ToolServers, open_servers
from etude.agent.permissions import Mode
from etude.cli.acp_content import message_text
from etude.cli.acp_session import Editor, EditorSession
from etude.cli.acp_updates import Update
from etude.cli.choices import Choices
from etude.cli.opening import Bench, open_bench, session_store
from etude.errors import EtudeError

if TYPE_CHECKING:
    from acp.schema import (
        AcpMcpServer,
        ClientCapabilities,
        HttpMcpServer,
        Implementation,
        InitializeResponse,
        ListSessionsResponse,
        LoadSessionResponse,
        McpServerStdio,
        NewSessionResponse,
        PromptResponse,
        SetSessionModeResponse,
        SseMcpServer,
    )

    from etude.cli.acp_content import Block

    GivenServer = HttpMcpServer | SseMcpServer | AcpMcpServer | McpServerStdio

PROTOCOL = 1
_MODES = {
    Mode.ASK: ("Ask", "Reading is free; changes, commands and the network are asked about."),
    Mode.AUTO: ("Auto", "Everything inside the sandbox runs without a question."),
    Mode.READ_ONLY: ("Read-only", "Nothing can be changed."),
    Mode.PLAN: ("Plan", "Nothing can be changed; the model writes a plan."),
}
_MAX_LINE = 64 << 20


class EditorAgent:
    """Implements the SDK's `Agent`. One process serves any number of sessions with one model."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._bench: Bench | None = None
        self._sessions: dict[str, EditorSession] = {}
        self._connection: Editor | None = None
        self._opening = asyncio.Lock()

    def on_connect(self, conn: Editor) -> None:
        """The SDK lends the connection."""
        self._connection = conn

    async def initialize(
        self,
        protocol_version: int,
        client_capabilities: ClientCapabilities | None = None,
        client_info: Implementation | None = None,
        **_: Any,
    ) -> InitializeResponse:
        """Say what this agent can do: version 1, whatever was asked for."""
        from acp.schema import InitializeResponse

        return InitializeResponse.model_validate(
            {
                "protocolVersion": PROTOCOL,
                "agentInfo": {"name": "etude", "title": "Etude", "version": _version()},
                "agentCapabilities": {
                    "loadSession": True,
                    "promptCapabilities": {"image": False, "audio": False, "embeddedContext": True},
                    "mcpCapabilities": {"http": True, "sse": False},
                    "sessionCapabilities": {"list": {}},
                },
                "authMethods": [],
            }
        )

    async def new_session(
        self, cwd: str, mcp_servers: list[GivenServer] | None = None, **_: Any
    ) -> NewSessionResponse:
        """A session in a project. Its tool servers are the editor's and the person's own."""
        from acp.schema import NewSessionResponse

        session = await self._open(cwd, mcp_servers or [], None)
        asyncio.get_running_loop().call_soon(session.greet)
        return NewSessionResponse.model_validate(
            {"sessionId": session.id, "modes": _modes(session.live.mode)}
        )

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: list[GivenServer] | None = None, **_: Any
    ) -> LoadSessionResponse:
        """Go on with a kept session; what happened is told again first."""
        from acp.schema import LoadSessionResponse

        earlier = self._sessions.pop(session_id, None)
        if earlier is not None:
            await earlier.close()
        session = await self._open(cwd, mcp_servers or [], session_id)
        await session.replay()
        asyncio.get_running_loop().call_soon(session.greet)
        return LoadSessionResponse.model_validate({"modes": _modes(session.live.mode)})

    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: Any
    ) -> ListSessionsResponse:
        """The kept sessions, newest first."""
        from acp.schema import ListSessionsResponse

        project = None if cwd is None else Path(cwd).resolve()
        infos = await asyncio.to_thread(session_store().list, project)
        sessions = [
            {
                "sessionId": info.id,
                "cwd": str(info.about["project"]),
                "title": info.first[:80],
                "updatedAt": datetime.fromtimestamp(info.used, UTC).isoformat(),
            }
            for info in infos
            if "project" in info.about
        ]
        return ListSessionsResponse.model_validate({"sessions": sessions})

    async def set_session_mode(
        self, session_id: str, mode_id: str, **_: Any
    ) -> SetSessionModeResponse:
        """Change what may be done without asking."""
        from acp.schema import SetSessionModeResponse

        session = self._session(session_id)
        if mode_id not in list(Mode):
            raise _refused(f"there is no mode {mode_id!r}; choose from {', '.join(Mode)}")
        session.live.set_mode(Mode(mode_id))
        await self._notify(
            session_id, {"sessionUpdate": "current_mode_update", "currentModeId": mode_id}
        )
        return SetSessionModeResponse()

    async def prompt(self, session_id: str, prompt: Sequence[Block], **_: Any) -> PromptResponse:
        """One message; answers when the model's work on it is over."""
        from acp.schema import PromptResponse

        session = self._session(session_id)
        try:
            stop = await session.prompt(message_text(session.project, prompt))
        except EtudeError as error:
            raise _refused(str(error)) from error
        return PromptResponse.model_validate({"stopReason": stop})

    async def cancel(self, session_id: str, **_: Any) -> None:
        """End the work on the present message; its answer says `cancelled`."""
        if session_id in self._sessions:
            await self._sessions[session_id].cancel()

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """There are no extensions."""
        from acp import RequestError

        raise RequestError.method_not_found(f"_{method}")

    async def ext_notification(self, method: str, params: dict[str, Any]) -> None:
        """Unknown notifications are passed over, as the protocol asks."""

    async def close(self) -> None:
        """End all sessions, the model and the sandbox."""
        sessions, self._sessions = list(self._sessions.values()), {}
        try:
            ends = await asyncio.gather(*(s.close() for s in sessions), return_exceptions=True)
        finally:
            if self._bench is not None:
                await self._bench.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def _session(self, session_id: str) -> EditorSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise _refused(f"there is no open session {session_id!r}")
        return session

    async def _notify(self, session_id: str, update: Update) -> None:
        from acp.schema import SessionNotification

        assert self._connection is not None
        note = SessionNotification.model_validate({"sessionId": session_id, "update": update})
        await self._connection.session_update(session_id, note.update)

    async def _open(
        self, cwd: str, given: Sequence[GivenServer], resume: str | None
    ) -> EditorSession:
        """Open or go on with a session. Raises the protocol's error with one sentence."""
        assert self._connection is not None
        try:
            project = usable_project(Path(cwd))
            bench = await self._open_bench(project)
            session = EditorSession(project, self._connection, self._notify)
            servers = await open_servers(project, given=_given(given), say=session.say)
            try:
                await self._attach(bench, session, servers, resume)
            except BaseException:
                await servers.close()
                raise
        except EtudeError as error:
            raise _refused(str(error)) from error
        self._sessions[session.id] = session
        return session

    async def _attach(
        self, bench: Bench, session: EditorSession, servers: ToolServers, resume: str | None
    ) -> None:
        drivers = Drivers(
            backend=bench.backend,
            open_sandbox=bench.sandbox,
            asker=session.permit,
            ask=session.ask,
            tools=bench.tools,
            on_event=session.on_event,
            on_delta=session.on_delta,
            on_child_event=session.on_child_event,
            say=session.say,
            extra_tools=servers.tools,
        )
        options = replace(bench.options, project=session.project)
        live = await open_live(
            drivers, options, store=bench.store, resume=resume, about=bench.about
        )
        live.permissions.protect(servers.files)
        session.attach(live, servers)

    async def _open_bench(self, project: Path) -> Bench:
        async with self._opening:
            if self._bench is None:
                choices = replace(self._choices, folder=project)
                self._bench = (await asyncio.to_thread(open_bench, choices))[0]
            return self._bench


def _given(servers: Sequence[GivenServer]) -> list[ServerDefinition]:
    """The editor's tool servers, approved by being given. Raises EtudeError for a kind that was
    not offered."""
    definitions: list[ServerDefinition] = []
    for server in servers:
        command, url = getattr(server, "command", None), getattr(server, "url", None)
        if command is not None:
            settings = ServerSettings(
                command=command,
                args=tuple(getattr(server, "args", ())),
                env={item.name: item.value for item in getattr(server, "env", ())},
            )
        elif url is not None and getattr(server, "type", "") == "http":
            headers = {item.name: item.value for item in getattr(server, "headers", ())}
            settings = ServerSettings(url=url, headers=headers)
        else:
            raise EtudeError(
                f"the tool server {server.name!r} is of a kind that is not supported; use stdio or"
                " http"
            )
        definitions.append(ServerDefinition(server.name, Origin.EDITOR, settings))
    return definitions


def _modes(mode: Mode) -> dict[str, Any]:
    known = [{"id": m.value, "name": name, "description": d} for m, (name, d) in _MODES.items()]
    return {"currentModeId": mode.value, "availableModes": known}


def _refused(sentence: str) -> Exception:
    """An error that an editor shows as it is."""
    from acp import RequestError

    return RequestError(-32603, sentence, {"details": sentence})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("etude")
    except PackageNotFoundError:
        return "0"


async def serve(choices: Choices) -> None:
    """Speak with an editor until it closes standard input. Raises EtudeError when the SDK is
    missing, no model was named, or nobody speaks over a pipe."""
    if importlib.util.find_spec("acp") is None:
        raise EtudeError(
            "the package that speaks with editors is not installed: `pip install 'etude[editor]'`"
        )
    if not choices.model:
        raise EtudeError("name a model with --model, or set ETUDE_MODEL")
    from acp import AgentSideConnection

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    reader, writer = await _streams()
    agent = EditorAgent(choices)
    connection = AgentSideConnection(agent, writer, reader, listening=False)
    try:
        await connection.listen()
    finally:
        await agent.close()
        await connection.close()


async def _streams() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The protocol's own copies of standard input and output. What is printed from now on, by
    whomever, goes to standard error, and no program that is started can read the editor's words."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_LINE)
    try:
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
        )
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop=loop),
            os.fdopen(writing, "wb", buffering=0),
        )
    except ValueError as error:
        raise EtudeError("`etude acp` is started by an editor, which speaks over pipes") from error
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)
