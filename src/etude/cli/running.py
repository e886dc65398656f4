"""Running a coroutine as a program."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def run(function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a coroutine function to its end. SIGTERM ends it as Ctrl-C does, so that sandboxes are
    closed either way."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    return asyncio.run(function(*args, **kwargs))
