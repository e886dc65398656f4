"""An editor made with the SDK's client, and `etude acp` as a process of its own."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from acp import spawn_agent_process
from acp.client import ClientSideConnection
from acp.schema import RequestPermissionResponse

START = "from etude.cli.app import main; main()"
"""`etude`, whatever is on PATH."""

Turn = tuple[str, Sequence[tuple[str, dict[str, Any]]]]
Choose = Callable[[dict[str, Any], list[dict[str, Any]]], str | None]


def script(path: Path, *turns: Turn, slow: float = 0.0) -> str:
    """A model that says these turns; returns its name."""
    said = [{"text": text, "calls": [list(call) for call in calls]} for text, calls in turns]
    path.write_text(json.dumps({"turns": said, "seconds_per_token": slow}))
    return f"script:{path}"


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "ETUDE_STATE": str(folder / "state"),
        "ETUDE_CONFIG": str(folder / "config"),
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }


class Editor:
    """Keeps every update and answers questions by `choose` (None: takes the question back)."""

    def __init__(self, choose: Choose | None = None) -> None:
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.questions: list[dict[str, Any]] = []
        self.raw: list[dict[str, Any]] = []
        self.choose: Choose = choose or (lambda call, options: "once")
        self.hold = asyncio.Event()
        self.hold.set()
        self._news = asyncio.Event()

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append((session_id, update.model_dump(by_alias=True, exclude_none=True)))
        self._news.set()

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **_: Any
    ) -> RequestPermissionResponse:
        call = tool_call.model_dump(by_alias=True, exclude_none=True)
        offered = [option.model_dump(by_alias=True) for option in options]
        self.questions.append({"session": session_id, "call": call, "options": offered})
        self._news.set()
        await self.hold.wait()
        chosen = self.choose(call, offered)
        outcome = {"outcome": "cancelled"}
        if chosen is not None:
            outcome = {"outcome": "selected", "optionId": chosen}
        return RequestPermissionResponse.model_validate({"outcome": outcome})

    def on_connect(self, conn: Any) -> None:
        pass

    def of(self, kind: str, session_id: str | None = None) -> list[dict[str, Any]]:
        """Updates of a kind (of a session)."""
        return [
            update
            for session, update in self.updates
            if update["sessionUpdate"] == kind and session_id in (None, session)
        ]

    def said(self, session_id: str | None = None, kind: str = "agent_message_chunk") -> str:
        return "".join(update["content"]["text"] for update in self.of(kind, session_id))

    async def until(self, true: Callable[[], Any], seconds: float = 30) -> None:
        """Wait for updates or questions until something holds."""
        async with asyncio.timeout(seconds):
            while not true():
                self._news.clear()
                await self._news.wait()


@contextlib.asynccontextmanager
async def started(
    folder: Path, model: str, *options: str, editor: Editor | None = None
) -> AsyncIterator[tuple[Editor, ClientSideConnection, asyncio.subprocess.Process]]:
    """The agent as an editor starts it, initialized."""
    editor = editor or Editor()
    arguments = ["-c", START, "acp", "--model", model, *options]
    async with spawn_agent_process(
        editor,  # type: ignore[arg-type]
        sys.executable,
        *arguments,
        env=environment(folder),
        transport_kwargs={"limit": 64 << 20, "stderr": None, "shutdown_timeout": 15},
        observers=[lambda event: editor.raw.append(event.message)],
    ) as (connection, process):
        answer = await connection.initialize(protocol_version=1)
        assert answer.protocol_version == 1
        yield editor, connection, process
