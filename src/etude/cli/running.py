"""Running a coroutine as a program, and ending one."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""Exit code of a program that a signal ended, as shells have it."""


def run(function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a coroutine function to its end. SIGTERM ends it as Ctrl-C does, so that sandboxes are
    closed either way: it is cancelled, a second signal ends that too, and KeyboardInterrupt is
    raised. That holds where SIGINT is ignored, as in what a script starts with `&`."""
    terminated = False

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def terminate(number: int, frame: FrameType | None) -> None:
            nonlocal terminated
            if terminated:
                raise KeyboardInterrupt
            terminated = True
            task.cancel()
            # The loop may wait for something; a handler alone does not wake it.
            loop.call_soon_threadsafe(int)

        signal.signal(signal.SIGTERM, terminate)
        try:
            return await function(*args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, _interrupt)

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise


def expect_signals() -> None:
    """From now on SIGINT and SIGTERM end this program with 130 and without a traceback, wherever
    they meet it."""
    sys.excepthook = _told_quietly
    # The interpreter's last act takes the handlers away; what comes then comes too late to count.
    for number in _SIGNALS:
        atexit.register(signal.signal, number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)


def expect_the_end() -> None:
    """The work is over: from now on a signal only hastens the end, which may wait for threads."""
    for number in _SIGNALS:
        signal.signal(number, _leave)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # RuntimeError: the signal came in the middle of such a flush.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def _told_quietly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Python's own report of what was not caught, save for an interrupt and what it led to: an
    import that is interrupted, for one, ends in an error of another kind."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, KeyboardInterrupt):
            _leave(signal.SIGINT, None)
        link = link.__cause__ or link.__context__
    sys.__excepthook__(kind, error, trace)
