"""A chat service over real sockets that says what a script tells it to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Serve = Callable[["Wire"], Awaitable[None]]


class Wire:
    """One request and the connection on which it is answered."""

    def __init__(
        self, path: str, headers: Mapping[str, str], body: Any, writer: asyncio.StreamWriter
    ) -> None:
        self.path, self.headers, self.body, self.writer = path, headers, body, writer
        self.keep = True

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def whole(
        self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def begin(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def chunk(self, data: bytes) -> None:
        if data:
            await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def hang_up(self) -> None:
        self.keep = False
        self.writer.transport.abort()


class ChatServer:
    """Answers the n-th request with the n-th of `answers`. `gone` holds when clients hung up in
    the middle of an answer."""

    def __init__(self, *answers: Serve) -> None:
        self.answers = list(answers)
        self.requests: list[Wire] = []
        self.connections = 0
        self.gone: list[float] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def messages(self) -> list[list[dict[str, Any]]]:
        return [request.body["messages"] for request in self.requests]

    async def __aenter__(self) -> ChatServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while wire := await _read(reader, writer):
                self.requests.append(wire)
                serve = self.answers[len(self.requests) - 1]
                answering = asyncio.ensure_future(serve(wire))
                left = asyncio.ensure_future(reader.read(1))
                await asyncio.wait([answering, left], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    self.gone.append(time.monotonic())
                    answering.cancel()
                    await asyncio.gather(answering, return_exceptions=True)
                    return
                await answering
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
                if not wire.keep:
                    return
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()
            self._tasks.discard(task)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Wire | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:]) if n}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Wire(head[0].split(" ")[1], headers, json.loads(body), writer)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()


def delta(finish: str | None = None, **parts: Any) -> dict[str, Any]:
    """One chunk of an answer."""
    choice = {"index": 0, "delta": parts, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def answer_chunks(
    text: str = "",
    calls: Sequence[tuple[str, str]] = (),
    *,
    thinking: str = "",
    finish: str | None = None,
    usage: Mapping[str, Any] | None = None,
    piece: int = 3,
) -> list[dict[str, Any]]:
    """An answer as a real service streams it: in pieces of a few characters."""
    chunks = [delta(role="assistant", content="")]
    pieces = [range(0, len(part), piece) for part in (thinking, text)]
    chunks += [delta(reasoning_content=thinking[at : at + piece]) for at in pieces[0]]
    chunks += [delta(content=text[at : at + piece]) for at in pieces[1]]
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": ""}
        call = {"index": index, "id": f"id-{index}", "type": "function", "function": function}
        chunks.append(delta(tool_calls=[call]))
        for at in range(0, len(arguments), piece):
            part = {"index": index, "function": {"arguments": arguments[at : at + piece]}}
            chunks.append(delta(tool_calls=[part]))
    chunks.append(delta(finish or ("tool_calls" if calls else "stop")))
    if usage is not None:
        chunks.append({"id": "c", "choices": [], "usage": dict(usage)})
    return chunks


COUNTED = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 60},
}


def speaks(text: str = "", calls: Sequence[tuple[str, str]] = (), **options: Any) -> Serve:
    """A whole streamed answer; `options` as in `answer_chunks`."""
    options.setdefault("usage", COUNTED)

    async def serve(wire: Wire) -> None:
        await wire.begin()
        for chunk in answer_chunks(text, calls, **options):
            await wire.chunk(event(chunk))
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.end()

    return serve


def refuses(status: int, body: Any = None, kind: str = "application/json", **headers: str) -> Serve:
    """An answer that is an error."""
    data = body.encode() if isinstance(body, str) else json.dumps(body or {}).encode()

    async def serve(wire: Wire) -> None:
        await wire.whole(status, data, kind, {n.replace("_", "-"): v for n, v in headers.items()})

    return serve


def sends(*steps: bytes | float, end: str = "end", kind: str = "text/event-stream") -> Serve:
    """Raw bytes of a stream with pauses between. `end`: end the body, hang up, or stay silent."""

    async def serve(wire: Wire) -> None:
        await wire.begin(kind)
        for step in steps:
            if isinstance(step, bytes):
                await wire.chunk(step)
            else:
                await asyncio.sleep(step)
        if end == "end":
            await wire.end()
        elif end == "hang up":
            await asyncio.sleep(0.05)
            wire.hang_up()
        else:
            await asyncio.sleep(60)

    return serve


async def hangs_up(wire: Wire) -> None:
    """No answer at all."""
    wire.hang_up()


async def hangs(wire: Wire) -> None:
    """Silence."""
    await asyncio.sleep(60)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for a condition, but not for ever."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
