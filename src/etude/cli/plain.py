"""A session without a terminal: each line of standard input is a message, all output plain."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress

from etude.agent.live import Drivers
from etude.cli.choices import Choices
from etude.cli.lines import Ansi, Line
from etude.cli.opening import open_bench, open_session
from etude.cli.show import Show
from etude.records import Event, StopReason


async def converse(choices: Choices) -> None:
    """Until an empty line or the end of input. Nobody can be asked: what would be a question is
    refused. Raises EtudeError."""
    bench, target = open_bench(choices)
    show, ansi = Show(), Ansi(colour=False)

    def write(lines: Iterable[Line]) -> None:
        for text in ansi.encode(lines):
            sys.stdout.write(text.encode("utf-8", "replace").decode() + "\n")
        sys.stdout.flush()

    def on_event(event: Event) -> None:
        write(show.event(event))

    def say(text: str) -> None:
        write(show.say(text))

    drivers = Drivers(bench.backend, bench.sandbox, on_event=on_event, say=say)
    try:
        opened = await open_session(bench, target, drivers, say)
        live = opened.live
        try:
            write(show.say(f"{bench.name} on {live.options.project}; an empty line ends"))
            while text := await _line():
                if await live.prompt(text) is StopReason.FINISHED:
                    write(show.say("[finished]"))  # Any other reason has been shown.
        finally:
            await opened.close()
    finally:
        await bench.close()


async def _line() -> str:
    """A line of standard input. The thread that waits for it ends with the program: one of the
    loop's own would hold a Ctrl-C back until a line comes."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def deliver(text: str) -> None:
        if not answer.done():
            answer.set_result(text)

    def wait() -> None:
        text = sys.stdin.readline().strip()
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            loop.call_soon_threadsafe(deliver, text)

    threading.Thread(target=wait, daemon=True).start()
    return await answer
