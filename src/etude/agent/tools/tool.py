"""What a tool is, and the one place where a call is run."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError

from etude.models.renderer import ToolCall, ToolSpec
from etude.sandbox.protocol import Workspace, WorkspaceError


class ErrorClass(StrEnum):
    """Why a call failed. Dashboards, rewards and hints all read this one field."""

    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    NOT_FOUND = "not_found"
    WRONG_KIND = "wrong_kind"
    """A folder where a file is needed, or a file that is no text."""
    NO_MATCH = "no_match"
    SEVERAL_MATCHES = "several_matches"
    NO_CHANGE = "no_change"
    STALE = "stale"
    DENIED = "denied"
    """The file system of the guest did not allow it."""
    TIMEOUT = "timeout"
    NONZERO_EXIT = "nonzero_exit"
    REFUSED = "refused"
    """A rule, a mode or a person did not allow the call."""
    SERVER = "server"
    """A tool server said that the call failed, or gave no answer."""
    INTERRUPTED = "interrupted"
    """The call was cut off while it ran, or may have been: what it did until then is done."""
    NOT_RUN = "not_run"
    """The session ended, or was cancelled, before the call was over."""
    UNAVAILABLE = "unavailable"
    """What the tool needs is not there: a person to ask, a program, a page of the network."""
    SANDBOX = "sandbox"
    """The sandbox itself failed; the session ends as not measured."""


@dataclass(frozen=True)
class ToolResult:
    """What a call gave. `text` is what the model is told; `final` ends the session; `changed`
    says that an edit of the workspace succeeded."""

    text: str
    error_class: ErrorClass | None = None
    final: bool = False
    changed: bool = False


Diagnose = Callable[[Workspace, str, bytes | None, bytes], Awaitable[str]]
"""What a change of a file broke: workspace, path, bytes before (None: no file) and after → lines
for the model, or ''."""


class Effect(StrEnum):
    """What a tool can do to the world; permissions and modes go by it."""

    TALK = "talk"
    """Nothing outside the session: ending it, its to-do list, a question to the person."""
    READ = "read"
    """Reads the workspace; such calls of one turn may run side by side."""
    WRITE = "write"
    EXECUTE = "execute"
    NETWORK = "network"
    DELEGATE = "delegate"
    """Starts a session whose own calls are checked one by one."""


@dataclass(frozen=True)
class Todo:
    """One entry of the session's to-do list; `state` is open, doing, done or dropped."""

    text: str
    state: str = "open"


@dataclass
class StartedJob:
    """A background job: the model's own words for it, and how far its output was read (bytes)."""

    command: str
    read: int = 0


@dataclass
class ToolContext:
    """What a session lends to its tools: the workspace (made when first asked for), the deadline
    of a call in seconds, the bytes of each file as the session last saw them, by absolute path
    inside the guest (links not followed: a file with two names is two files here), the to-do
    list, the background jobs that `shell` started, `delegate`, which runs a sub-agent
    on a prompt and returns its final message (None where the driver lends no model for it), and
    `diagnose`, which is asked after each successful edit (None in rollouts: it costs time). `kept`
    holds what a tool remembers for the session, by its name."""

    workspace: Callable[[], Awaitable[Workspace]]
    timeout: float
    seen: dict[str, bytes] = field(default_factory=dict[str, bytes])
    todos: list[Todo] = field(default_factory=list[Todo])
    jobs: dict[str, StartedJob] = field(default_factory=dict[str, StartedJob])
    delegate: Callable[[str, bool], Awaitable[ToolResult]] | None = None
    diagnose: Diagnose | None = None
    kept: dict[str, object] = field(default_factory=dict[str, object])


class Arguments(BaseModel):
    """Base of all argument models."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL character")
    return text


Word = Annotated[str, StringConstraints(min_length=1), AfterValidator(_no_nul)]
"""A non-empty string that can stand in a command line or a path."""

A = TypeVar("A", bound=Arguments)


class Tool(ABC, Generic[A]):
    """One tool. Tools keep no state of a session's, so one object serves every session."""

    name: str
    description: str
    arguments: type[A]
    effect: Effect
    patient: bool = False
    """Whether a call may outlast the tool deadline: it waits for a person or for a sub-agent."""

    @abstractmethod
    async def run(self, context: ToolContext, args: A) -> ToolResult:
        """Do it. A failure that the model can mend is a result with an `error_class`. Raises
        WorkspaceError when the sandbox fails; an OSError that the guest saw is told by
        `invoke`."""

    def subject(self, args: A) -> str:
        """What the call is about, for rules and for a person who is asked: a path, a command, an
        address."""
        return str(getattr(args, "path", ""))

    def objection(self, args: A) -> ToolResult | None:
        """Why a call with valid arguments can never succeed, or None. Told to the model before any
        person is asked about the call; must not wait for anything."""
        return None

    def side_by_side(self, args: A) -> bool:
        """Whether the call may run at the same time as others of its turn."""
        return self.effect is Effect.READ

    def spec(self) -> ToolSpec:
        """The tool as the model is told of it."""
        schema = self.arguments.model_json_schema()
        schema = _inlined(schema, schema.pop("$defs", {}))
        schema.pop("description", None)
        schema.pop("title", None)
        for name, described in schema.get("properties", {}).items():
            # What may be left out is said by `required`; "or null" would only cost tokens.
            kinds = [kind for kind in described.get("anyOf", ()) if kind != {"type": "null"}]
            only = kinds[0] if len(kinds) == 1 else {}
            kept = {key: value for key, value in described.items() if key not in ("anyOf", "title")}
            schema["properties"][name] = {**only, **kept}
        return ToolSpec(self.name, self.description, schema)


AnyTool = Tool[Any]


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema with what it refers to in its place: not every model's format knows references."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        definition = definitions[schema["$ref"].rpartition("/")[2]]
        named = {key: value for key, value in definition.items() if key != "description"}
        return _untitled(_inlined(named, definitions))
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    schema.pop("title", None)
    for described in schema.get("properties", {}).values():
        described.pop("title", None)
    return schema


def _invalid(tool: AnyTool, error: ValidationError) -> ToolResult:
    """One line that names each wrong argument."""
    faults = [
        f"{'.'.join(str(part) for part in fault['loc']) or 'arguments'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    names = ", ".join(tool.arguments.model_fields)
    return ToolResult(
        f"invalid arguments for {tool.name}({names}): {'; '.join(faults)}",
        ErrorClass.INVALID_ARGUMENTS,
    )


def _told(error: OSError, path: str) -> ToolResult:
    """An error of the guest's file system in the model's words."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ToolResult(f"{path} does not exist.", ErrorClass.NOT_FOUND)
    if isinstance(error, IsADirectoryError):
        return ToolResult(f"{path} is a folder.", ErrorClass.WRONG_KIND)
    return ToolResult(f"{path}: permission denied.", ErrorClass.DENIED)


def _encodable(arguments: Mapping[str, Any]) -> bool:
    """JSON can spell lone surrogates (`"\\ud800"`), which no file and no token may hold."""
    try:
        json.dumps(dict(arguments), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Prepared:
    """A call whose tool is known and whose arguments are valid."""

    tool: AnyTool
    args: Any
    path: str

    @property
    def subject(self) -> str:
        """See `Tool.subject`."""
        return self.tool.subject(self.args)


def prepare(tools: Sequence[AnyTool], call: ToolCall) -> Prepared | ToolResult:
    """Find the tool of a call and check its arguments, or say what is wrong with it."""
    if call.error is not None:
        return ToolResult(f"malformed tool call: {call.error}", ErrorClass.MALFORMED_CALL)
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        known = ", ".join(tool.name for tool in tools)
        return ToolResult(
            f"there is no tool named {call.name!r}; the tools are: {known}.",
            ErrorClass.UNKNOWN_TOOL,
        )
    if not _encodable(call.arguments):
        return ToolResult("an argument is not valid Unicode.", ErrorClass.INVALID_ARGUMENTS)
    try:
        args = tool.arguments.model_validate(dict(call.arguments))
    except ValidationError as error:
        return _invalid(tool, error)
    objection = tool.objection(args)
    if objection is not None:
        return objection
    return Prepared(tool, args, str(call.arguments.get("path", ".")))


async def invoke(prepared: Prepared, context: ToolContext) -> ToolResult:
    """Run one call and return what came of it, within the context's deadline and some seconds of
    grace unless the tool is a patient one. Raises WorkspaceError when the sandbox itself
    failed."""
    tool = prepared.tool
    # The sandbox keeps the deadline of a command; this one is for a sandbox that does not.
    deadline = None if tool.patient else context.timeout + 30
    try:
        async with asyncio.timeout(deadline):
            return await tool.run(context, prepared.args)
    except TimeoutError as error:
        raise WorkspaceError(f"the sandbox did not answer {tool.name} in time") from error
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        return _told(error, prepared.path)
