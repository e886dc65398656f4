"""The real sandbox, a real tokenizer, and a scripted model that remembers its prompts."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.agent.tools.programs import with_tools
from etude.inference.protocol import Sampling
from etude.inference.scripted import ScriptedEngine
from etude.models.dialects.hermes import HermesRenderer
from etude.models.tiny import train_tokenizer
from etude.models.tokenizer import ByteTokenizer
from etude.sandbox.protocol import Image, Sandbox

Calls = Sequence[tuple[str, Mapping[str, Any]]]


class Script:
    """A model that gives the answers one after the other and keeps the prompts it was shown."""

    def __init__(self, renderer: HermesRenderer, tokens: ByteTokenizer) -> None:
        self.renderer = renderer
        self.tokens = tokens
        self.answers: list[list[int]] = []
        self.prompts: list[list[int]] = []

    def calls(self, *calls: tuple[str, Mapping[str, Any]], text: str = "") -> "Script":
        """An answer with calls."""
        self.answers.append(self.renderer.expert(text, calls))
        return self

    def says(self, text: str, *, end: bool = True) -> "Script":
        """An answer of just this text, markers and all."""
        ids = self.tokens.encode(text)
        self.answers.append([*ids, self.renderer.stop_ids[0]] if end else ids)
        return self

    def engine(self, **options: Any) -> ScriptedEngine:
        """The engine that speaks it."""

        def answer(prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
            self.prompts.append(list(prompt_ids))
            return self.answers[len(self.prompts) - 1]

        return ScriptedEngine(answer, **options)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer(1024)


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> HermesRenderer:
    return HermesRenderer(tokenizer)


@pytest.fixture
def script(renderer: HermesRenderer, tokenizer: Any) -> Script:
    return Script(renderer, ByteTokenizer(tokenizer))


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    from etude.sandbox.bubblewrap import BubblewrapSandbox

    backend = BubblewrapSandbox()
    complaint = asyncio.run(backend.probe())
    assert complaint is None, complaint
    yield backend


@pytest.fixture
def image(tmp_path: Path) -> Callable[[Mapping[str, bytes]], Image]:
    def make(files: Mapping[str, bytes]) -> Image:
        root = tmp_path / "image"
        root.mkdir()
        for name, data in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return with_tools(Image(root))

    return make
