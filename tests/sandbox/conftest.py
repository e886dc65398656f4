from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image, Limits
from etude.sandbox.settings import SandboxSettings
from etude.sandbox.workspace import BubblewrapWorkspace

Opener = Callable[..., AbstractAsyncContextManager[BubblewrapWorkspace]]


@pytest.fixture(scope="session")
def sandbox() -> Generator[BubblewrapSandbox]:
    made = BubblewrapSandbox()
    fault = asyncio.run(made.probe())
    if fault is not None:
        pytest.skip(fault)
    yield made
    made.close()


@pytest.fixture(scope="session")
def ungrouped(sandbox: BubblewrapSandbox) -> Generator[BubblewrapSandbox]:
    """The backend as on a machine where no control groups can be made."""
    made = BubblewrapSandbox(SandboxSettings(use_cgroups=False))
    yield made
    made.close()


@pytest.fixture
def image(tmp_path: Path) -> Image:
    root = tmp_path / "image"
    (root / "d" / "e").mkdir(parents=True)
    (root / "a.txt").write_text("alpha\n")
    (root / "d" / "x").write_text("ex\n")
    (root / "d" / "e" / "z").write_text("zed\n")
    return Image(root)


@pytest.fixture
def opened(sandbox: BubblewrapSandbox, image: Image) -> Opener:
    @asynccontextmanager
    async def opener(
        limits: Limits | None = None, backend: BubblewrapSandbox = sandbox
    ) -> AsyncGenerator[BubblewrapWorkspace]:
        workspace = await backend.create(image, limits)
        try:
            yield workspace
        finally:
            await workspace.close()

    return opener
