"""One tool server: started, listened to, called, started again when it died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.mcp.definitions import Origin, ServerDefinition, clean_server_name, expanded
from etude.agent.mcp.elicit import AskPerson, ask_form
from etude.agent.mcp.results import told
from etude.agent.tools import ErrorClass, ToolResult
from etude.agent.tools.text import clean
from etude.errors import EtudeError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client.session import ClientRequestContext, IncomingMessage
    from mcp_types import ElicitRequestParams, ElicitResult, ErrorData, ListRootsResult, Tool

_GUARD = Path(__file__).with_name("guard.py")
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_CLOSE_SECONDS = 10.0
_MAX_PAGES = 20
_LAST_WORDS = 300


@dataclass(frozen=True)
class Surroundings:
    """What all servers of a session share. `home` is an empty folder for servers of the person's
    own to stand in; `logs` gets their standard error; `ask` answers questions of theirs (None:
    nobody is there); `say` is told in one sentence what a person should know."""

    project: Path
    home: Path
    logs: Path
    ask: AskPerson | None = None
    say: Callable[[str], None] = lambda sentence: None


class ServerConnection:
    """See the module. `allowed` is asked before each start, so that a server whose approved files
    were changed does not run."""

    def __init__(
        self,
        definition: ServerDefinition,
        around: Surroundings,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name = clean_server_name(definition.name)
        self.log = around.logs / f"mcp-{self.name}.log"
        self.listed: dict[str, Tool] = {}
        """The tools that the server has now, by its own names for them."""
        self.on_listed: Callable[[], None] = lambda: None
        self._definition = definition
        self._around = around
        self._allowed = allowed
        self._starting = asyncio.Lock()
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._changed = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._failures = 0
        self._not_before = 0.0
        self._deadlines: list[tuple[asyncio.Timeout, float]] = []
        self._silent = 0

    async def start(self) -> None:
        """Start the server and learn its tools, unless it runs. Raises EtudeError when it cannot
        be."""
        async with self._starting:
            if self._client is not None and self._work is not None and not self._work.done():
                return
            await self._drop()
            if not self._allowed():
                raise EtudeError(
                    f"the tool server {self.name} was changed since it was approved; look at it"
                    " with `etude approve`"
                )
            await asyncio.sleep(self._not_before - time.monotonic())
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._work = asyncio.create_task(self._serve(ready))
            try:
                async with asyncio.timeout(self._definition.settings.timeout):
                    await ready
            except TimeoutError as error:
                await self._failed(self._work)
                seconds = self._definition.settings.timeout
                raise EtudeError(
                    f"the tool server {self.name} did not start within {seconds:g} s"
                    f"{self._last_words()}"
                ) from error
            except EtudeError:
                await self._failed(self._work)
                raise
            except asyncio.CancelledError:
                await self._drop()
                raise

    async def call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """Call one of its tools, within `seconds`, starting the server first if it is not there.
        Never raises for what the server does."""
        try:
            async with asyncio.timeout(seconds) as deadline:
                await self.start()
                work = self._work
                if tool not in self.listed:
                    return self._error(f"no longer has the tool {tool!r}", ErrorClass.NOT_FOUND)
                with self._patience(deadline, seconds):
                    return await self._call(tool, arguments, work)
        except TimeoutError:
            self._silent += 1
            if self._silent > 1:
                await self._failed(self._work)
            return self._error(f"gave no answer within {seconds:g} s", ErrorClass.TIMEOUT)
        except EtudeError as error:
            return ToolResult(str(error), ErrorClass.SERVER)

    async def _call(
        self, tool: str, arguments: Mapping[str, Any], work: asyncio.Task[None] | None
    ) -> ToolResult:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST
        from pydantic import ValidationError

        assert self._client is not None
        try:
            result = await self._client.call_tool(tool, dict(arguments))
        except MCPError as error:
            over = error.code == CONNECTION_CLOSED or work is None or work.done()
            # A web server that was started again knows nothing of our session with it.
            forgotten = error.code == INVALID_REQUEST and self._definition.settings.url is not None
            if over or forgotten:
                await self._failed(work)
                return self._error(
                    "ended before it answered; the next call starts it again" + self._last_words()
                )
            return self._error(f"refused the call: {clean(error.message)[:2000]}")
        except (RuntimeError, ValidationError) as error:
            return self._error(f"broke the protocol: {clean(str(error))[:500]}")
        self._failures = self._silent = 0
        return told(self.name, result)

    async def close(self) -> None:
        """End the server with all its processes. Idempotent."""
        async with self._starting:
            await self._drop()

    def _error(self, what: str, error_class: ErrorClass = ErrorClass.SERVER) -> ToolResult:
        return ToolResult(f"the tool server {self.name} {what}", error_class)

    @contextlib.contextmanager
    def _patience(self, deadline: asyncio.Timeout, seconds: float) -> Generator[None]:
        """While a person thinks about a question of the server's, the clock stands still."""
        self._deadlines.append((deadline, seconds))
        try:
            yield
        finally:
            self._deadlines.remove((deadline, seconds))

    async def _failed(self, work: asyncio.Task[None] | None) -> None:
        """This life of it is over, or no use: be slower with each start that follows."""
        if work is not self._work:
            return  # Another call has seen it already.
        self._failures += 1
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (self._failures - 1))
        self._not_before = time.monotonic() + wait
        await self._drop()

    async def _drop(self) -> None:
        work, client = self._work, self._client
        self._work = self._client = None
        if work is None:
            return
        if client is None:
            work.cancel()  # It never came so far as to wait for its end.
        self._closing.set()
        _, slow = await asyncio.wait([work], timeout=_CLOSE_SECONDS)
        if slow:
            work.cancel()
            await asyncio.wait([work], timeout=_CLOSE_SECONDS)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """The server's life, in one task, as the SDK's scopes demand."""
        try:
            async with self._connected() as client:
                await self._list(client)
                self._client = client
                if not ready.done():
                    ready.set_result(None)
                listening = asyncio.create_task(self._listen(client))
                try:
                    await self._follow(client)
                finally:
                    listening.cancel()
                    await asyncio.wait([listening])
        except Exception as error:  # noqa: BLE001  the server's task boundary: all ends are told
            reason = clean(str(_leaf(error))) or type(_leaf(error)).__name__
            if not ready.done():
                ready.set_exception(
                    EtudeError(
                        f"the tool server {self.name} cannot be used: {reason[:500]}"
                        f"{self._last_words()}"
                    )
                )
            else:
                logging.getLogger("mcp").warning("%s ended: %s", self.name, reason)
        finally:
            if not ready.done():
                ready.cancel()

    async def _follow(self, client: Client) -> None:
        """Wait for the end; learn the tools anew when the server says that they changed."""
        while not self._closing.is_set():
            waits = [asyncio.create_task(e.wait()) for e in (self._closing, self._changed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self._changed.is_set() and not self._closing.is_set():
                self._changed.clear()
                before = set(self.listed)
                await self._list(client)
                self._say_news(before)

    def _say_news(self, before: set[str]) -> None:
        now = set(self.listed)
        news = [
            f"{len(names)} {what}"
            for names, what in ((now - before, "new tools"), (before - now, "tools gone"))
            if names
        ]
        if news:
            self._around.say(
                f"The tool server {self.name} changed: {', '.join(news)}; new ones can be used"
                " from the next session on."
            )

    async def _list(self, client: Client) -> None:
        found: dict[str, Tool] = {}
        cursor: str | None = None
        if client.server_capabilities.tools is not None:
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor, cache_mode="bypass")
                for tool in page.tools:
                    found.setdefault(tool.name, tool)
                cursor = page.next_cursor
                if cursor is None:
                    break
        self.listed = found
        self.on_listed()

    async def _listen(self, client: Client) -> None:
        """Newer servers tell of changes only to who asks for it."""
        from mcp import MCPError
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

        tools = client.server_capabilities.tools
        if tools is None or not tools.list_changed:
            return
        with contextlib.suppress(ListenNotSupportedError, SubscriptionLost, MCPError):
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._changed.set()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncGenerator[Client]:
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            transport = await self._transport(stack)
            client = Client(
                transport,
                message_handler=self._heard,
                list_roots_callback=self._roots,
                elicitation_callback=None if self._around.ask is None else self._asked,
                client_info=_about_us(),
            )
            yield await stack.enter_async_context(client)

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        settings = self._definition.settings
        if settings.command is None:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            headers = {key: self._value(text) for key, text in settings.headers.items()}
            timeout = httpx2.Timeout(30, read=300)
            http = httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=True)
            await stack.enter_async_context(http)
            return streamable_http_client(self._value(str(settings.url)), http_client=http)
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        log = stack.enter_context(_open_log(self.log))
        command = [settings.command, *settings.args]
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-I", "-S", str(_GUARD), str(os.getpid()), *map(self._value, command)],
            env={key: self._value(text) for key, text in settings.env.items()},
            cwd=self._folder(),
            encoding_error_handler="replace",
        )
        return stdio_client(parameters, errlog=log)

    def _value(self, text: str) -> str:
        """Variables replaced; an editor gives values that are ready."""
        return text if self._definition.origin is Origin.EDITOR else expanded(text)

    def _folder(self) -> Path:
        settings = self._definition.settings
        if settings.cwd is not None:
            return self._around.project / Path(self._value(settings.cwd)).expanduser()
        if self._definition.origin is Origin.PROJECT:
            return self._around.project
        self._around.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._around.home

    async def _heard(self, message: IncomingMessage) -> None:
        if getattr(message, "method", "") == "notifications/tools/list_changed":
            self._changed.set()

    async def _roots(self, context: ClientRequestContext) -> ListRootsResult:
        from mcp_types import ListRootsResult, Root

        uri: Any = self._around.project.as_uri()
        return ListRootsResult(roots=[Root(uri=uri, name=self._around.project.name)])

    async def _asked(
        self, context: ClientRequestContext, params: ElicitRequestParams
    ) -> ElicitResult | ErrorData:
        from mcp_types import INVALID_REQUEST, ErrorData

        if params.mode != "form" or self._around.ask is None:
            return ErrorData(code=INVALID_REQUEST, message="only forms can be shown")
        for deadline, _ in self._deadlines:
            deadline.reschedule(None)
        try:
            return await ask_form(self.name, params, self._around.ask)
        finally:
            now = asyncio.get_running_loop().time()
            for deadline, seconds in self._deadlines:
                deadline.reschedule(now + seconds)

    def _last_words(self) -> str:
        """Where its standard error is, and how it ends."""
        if self._definition.settings.command is None:
            return ""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS))
                lines = clean(file.read().decode("utf-8", "replace")).strip().splitlines()
        except OSError:
            return ""
        return f" (its last words, from {self.log}: {lines[-1]})" if lines else ""


def _open_log(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "w")


def _leaf(error: BaseException) -> BaseException:
    """The first real error in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _about_us() -> Any:
    from importlib.metadata import PackageNotFoundError, version

    from mcp_types import Implementation

    try:
        number = version("etude")
    except PackageNotFoundError:
        number = "0"
    return Implementation(name="etude", version=number)
