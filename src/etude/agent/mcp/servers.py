"""All tool servers of a session, and their tools as the session's own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import logging.handlers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.agent.mcp.arguments import Check, ServerArguments, arguments_for, checker
from etude.agent.mcp.connection import ServerConnection, Surroundings
from etude.agent.mcp.definitions import (
    Definitions,
    Origin,
    ServerDefinition,
    clean_name,
    read_definitions,
)
from etude.agent.mcp.elicit import AskPerson
from etude.agent.permissions.approvals import Approvals, Brought
from etude.agent.tools import Tool, ToolContext, ToolResult
from etude.agent.tools.text import clean
from etude.agent.tools.tool import Effect
from etude.errors import EtudeError
from etude.machine import state_folder
from etude.models.renderer import ToolSpec

MAX_TOOLS = 100
"""Tools of one server that a model is told of: each costs tokens in every turn."""
_MAX_SCHEMA = 16 << 10
_MAX_DESCRIPTION = 1000
_MAX_NAME = 64


class ServerTool(Tool[ServerArguments]):
    """One tool of a server. It keeps its own deadline, which stands still while the server's
    question to the person is open."""

    effect = Effect.NETWORK
    patient = True

    def __init__(self, server: ServerConnection, name: str, described: ToolSpec) -> None:
        self.name = described.name
        self.description = described.description
        self.arguments = arguments_for(self._fault)
        self._server = server
        self._own_name = name
        self._described = described
        self._checked: tuple[Mapping[str, Any], Check] | None = None

    def spec(self) -> ToolSpec:
        """The server's own schema, as it was when the session began."""
        return self._described

    def subject(self, args: ServerArguments) -> str:
        """All arguments as JSON."""
        return json.dumps(args.model_extra, ensure_ascii=False)

    async def run(self, context: ToolContext, args: ServerArguments) -> ToolResult:
        """See `Tool.run`."""
        return await self._server.call(self._own_name, args.model_extra or {}, context.timeout)

    def _fault(self, arguments: Mapping[str, Any]) -> str:
        """By the schema that the server has now; a tool that is gone is told by the call."""
        tool = self._server.listed.get(self._own_name)
        if tool is None:
            return ""
        if self._checked is None or self._checked[0] != tool.input_schema:
            try:
                self._checked = (tool.input_schema, checker(tool.input_schema))
            except ValueError as error:
                return f"the server's schema is wrong: {error}"
        return self._checked[1](arguments)


class ToolServers:
    """The servers that run. `tools` are theirs; `pending` what waits for a person's approval;
    `complaints` are sentences about what cannot be used; `files` are those of the project that run
    as servers, relative to it, which no guest may write. Use as an async context manager."""

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        tools: Sequence[ServerTool],
        pending: Sequence[Brought],
        complaints: Sequence[str],
        files: Sequence[str] = (),
    ) -> None:
        self.tools = tuple(tools)
        self.pending = tuple(pending)
        self.complaints = tuple(complaints)
        self.files = tuple(files)
        self._connections = tuple(connections)

    async def __aenter__(self) -> ToolServers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pending_sentence(self) -> str:
        """One sentence on what waits for approval, or ''."""
        if not self.pending:
            return ""
        names = ", ".join(
            repr(clean(str(item.content["definition"]["name"]))) for item in self.pending
        )
        return (
            f"This project wants to run tool servers ({names}) that nobody approved; they stay off"
            " until `etude approve` was used."
        )

    async def close(self) -> None:
        """End all servers. Idempotent."""
        await asyncio.gather(*(connection.close() for connection in self._connections))


def _say_nothing(sentence: str) -> None:
    pass


def brought_servers(project: Path) -> tuple[Brought, ...]:
    """What the project's own files want to run, for approving it."""
    found = read_definitions(project).servers
    return tuple(item.brought(project) for item in found if item.origin is Origin.PROJECT)


async def open_servers(
    project: Path,
    *,
    given: Sequence[ServerDefinition] = (),
    ask: AskPerson | None = None,
    say: Callable[[str], None] = _say_nothing,
    approvals: Approvals | None = None,
    definitions: Definitions | None = None,
) -> ToolServers:
    """Start every server that may run, side by side. One that does not start becomes a complaint.
    `given` are the editor's, approved by being given. Raises EtudeError when the person's own
    settings are wrong."""
    project = project.resolve()
    found = definitions or await asyncio.to_thread(read_definitions, project, given)
    complaints = list(found.complaints)
    if not found.servers:
        return ToolServers((), (), (), complaints)
    store = approvals or Approvals()
    around = Surroundings(
        project, state_folder() / "servers", state_folder() / "logs", ask=ask, say=say
    )
    connections: list[ServerConnection] = []
    pending: list[Brought] = []
    files: list[str] = []
    for definition in found.servers:
        allowed = _allowed(definition, project, store)
        if await asyncio.to_thread(allowed):
            connections.append(ServerConnection(definition, around, allowed))
            files += definition.files(project)
        else:
            pending.append(definition.brought(project))
    if connections and importlib.util.find_spec("mcp") is None:
        complaints.append(
            "Tool servers are set up, but the package that speaks to them is not installed: `pip"
            " install 'etude[editor]'`."
        )
        connections = []
    _log_to(around.logs / "mcp.log")
    ends = await asyncio.gather(*(item.start() for item in connections), return_exceptions=True)
    tools: list[ServerTool] = []
    for connection, end in zip(connections, ends, strict=True):
        if isinstance(end, EtudeError):
            complaints.append(f"{str(end)[:1].upper()}{str(end)[1:]}.")
        elif isinstance(end, BaseException):
            await asyncio.gather(*(item.close() for item in connections))
            raise end
        else:
            lent, faults = _tools_of(connection)
            tools += lent
            complaints += faults
    return ToolServers(connections, tools, pending, complaints, files)


def _allowed(definition: ServerDefinition, project: Path, store: Approvals) -> Callable[[], bool]:
    """Looked at anew before each start."""

    def allowed() -> bool:
        if definition.origin is not Origin.PROJECT:
            return True
        brought = definition.brought(project)
        return store.approved(brought.kind, brought.project, brought.content)

    return allowed


def _tools_of(server: ServerConnection) -> tuple[list[ServerTool], list[str]]:
    """The server's tools under names that a model can use, and what is left out."""
    tools: dict[str, ServerTool] = {}
    faults: list[str] = []
    for own_name, listed in list(server.listed.items())[:MAX_TOOLS]:
        prefix = f"mcp__{server.name}__"
        name = prefix + clean_name(own_name, _MAX_NAME - len(prefix))
        shown = f"The tool {name} of the server {server.name} is left out:"
        if name in tools:
            faults.append(f"{shown} there is another of that name.")
            continue
        if len(json.dumps(listed.input_schema)) > _MAX_SCHEMA:
            faults.append(f"{shown} its schema is longer than {_MAX_SCHEMA >> 10} KiB.")
            continue
        try:
            checker(listed.input_schema)
        except ValueError as error:
            faults.append(f"{shown} its schema is wrong ({clean(str(error))[:200]}).")
            continue
        description = clean(listed.description or listed.title or "").strip()[:_MAX_DESCRIPTION]
        spec = ToolSpec(name, description, listed.input_schema)
        tools[name] = ServerTool(server, own_name, spec)
    if len(server.listed) > MAX_TOOLS:
        faults.append(
            f"The server {server.name} has more than {MAX_TOOLS} tools; the rest is left out."
        )
    return list(tools.values()), faults


def _log_to(path: Path) -> None:
    """What the SDK has to say goes to a file, never to a screen."""
    logger = logging.getLogger("mcp")
    if not logger.handlers:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        logger.addHandler(
            logging.handlers.RotatingFileHandler(path, maxBytes=1 << 20, backupCount=1)
        )
        logger.propagate = False
