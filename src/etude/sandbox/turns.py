"""Many may use a workspace's files at a time, or one may copy them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """A lock that many share or one has alone. Who waits to have it alone goes before those that
    come later to share it."""

    def __init__(self) -> None:
        self._sharing = 0
        self._alone = asyncio.Lock()
        self._none = asyncio.Event()
        self._none.set()

    @asynccontextmanager
    async def shared(self) -> AsyncGenerator[None]:
        """Beside others."""
        async with self._alone:
            self._sharing += 1
            self._none.clear()
        try:
            yield
        finally:
            self._sharing -= 1
            if self._sharing == 0:
                self._none.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None]:
        """Alone."""
        async with self._alone:
            await self._none.wait()
            yield
