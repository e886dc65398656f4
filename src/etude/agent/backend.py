"""Where a person's answers come from: a local model, a service by its address, or a script.

Opening is lazy and imports torch only for a local model, so that a prompt stands on the screen at
once while the model is still being read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.agent.policy import Policy
from etude.agent.token_policy import TokenPolicy
from etude.errors import EtudeError
from etude.inference.openai_client_settings import ChatServiceSettings
from etude.inference.prices import FREE, Price, read_prices
from etude.inference.protocol import Engine, Sampling
from etude.inference.scripted import ScriptedEngine
from etude.inference.settings import EngineSettings
from etude.models.renderer import Renderer

if TYPE_CHECKING:
    from etude.agent.chat_policy import ChatPolicy

SCRIPT_PREFIX = "script:"
_SCRIPT_VOCABULARY = 1024


class Backend(Protocol):
    """A model that sessions can be held with. `price` is None when nobody knows it."""

    @property
    def name(self) -> str: ...

    @property
    def price(self) -> Price | None: ...

    async def new_policy(self) -> Policy:
        """A conversation of its own. The first call opens the model. Raises EtudeError when it
        cannot be opened."""
        ...

    async def close(self) -> None: ...


class EngineBackend:
    """A model in this process: `open_engine` makes the engine and its dialect when first
    needed."""

    def __init__(self, name: str, open_engine: Callable[[], tuple[Engine, Renderer]]) -> None:
        self.name = name
        self.price: Price | None = FREE
        self._open_engine = open_engine
        self._opened: tuple[Engine, Renderer] | None = None
        self._opening = asyncio.Lock()

    async def new_policy(self) -> TokenPolicy:
        """See `Backend.new_policy`."""
        async with self._opening:
            if self._opened is None:
                self._opened = await asyncio.to_thread(self._open_engine)
        return TokenPolicy(*self._opened)

    async def close(self) -> None:
        """Free the model."""
        if self._opened is not None:
            await self._opened[0].close()
            self._opened = None


class ServiceBackend:
    """An OpenAI-compatible service. Sessions with it have events and no token ledger."""

    def __init__(self, settings: ChatServiceSettings) -> None:
        self.name = settings.model
        self._prices = read_prices()
        self.price = self._prices.find(settings.model).price
        self._settings = settings
        self._policies: list[ChatPolicy] = []

    async def new_policy(self) -> ChatPolicy:
        """See `Backend.new_policy`."""
        from etude.agent.chat_policy import ChatPolicy  # An HTTP library: only where it is used.

        policy = ChatPolicy(self._settings, prices=self._prices)
        self._policies.append(policy)
        return policy

    async def close(self) -> None:
        """Close the connections."""
        policies, self._policies = self._policies, []
        for policy in policies:
            await policy.close()


def local_backend(model: str, settings: EngineSettings, dialect: str | None = None) -> Backend:
    """A model by name, folder or hub id; `script:FILE` is a scripted one."""
    if model.startswith(SCRIPT_PREFIX):
        return script_backend(Path(model.removeprefix(SCRIPT_PREFIX)))

    def open_engine() -> tuple[Engine, Renderer]:
        from etude.models.pull import ensure_model

        folder = ensure_model(model)  # Before torch: a misspelt name is told at once.
        from etude.inference.engine import TorchEngine
        from etude.models.dialects.choose import renderer_for

        return TorchEngine(folder, settings), renderer_for(folder, dialect)

    return EngineBackend(model, open_engine)


class _ScriptTurn(BaseModel):
    """One answer: what is said, then calls as [name, arguments]."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


class _Script(BaseModel):
    """A scripted model: its turns in order, and how slowly it speaks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: tuple[_ScriptTurn, ...]
    seconds_per_token: Annotated[float, Field(ge=0)] = 0.0
    context_length: Annotated[int, Field(ge=64)] = 65536


def script_backend(path: Path) -> Backend:
    """A model that says what a JSON file holds: `{"turns": [{"text": …, "calls": [[name,
    {…}], …]}, …]}`. For demonstrations and for tests of every driver. It answers "Done." when
    its turns are over. Raises EtudeError when the file cannot be used."""
    try:
        script = _Script.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise EtudeError(f"The script {path} cannot be read ({error.strerror}).") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise EtudeError(f"The script {path} is wrong at {where}: {fault['msg']}.") from error
    except ValueError as error:
        raise EtudeError(f"The script {path} is no JSON ({error}).") from error

    def open_engine() -> tuple[Engine, Renderer]:
        from etude.models.dialects.hermes import HermesRenderer
        from etude.models.tiny import train_tokenizer

        renderer = HermesRenderer(train_tokenizer(_SCRIPT_VOCABULARY))
        turns = iter([renderer.expert(turn.text, turn.calls) for turn in script.turns])
        done = renderer.expert("Done.", [])

        def answer(prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
            return next(turns, done)

        engine = ScriptedEngine(
            answer,
            context_length=script.context_length,
            seconds_per_token=script.seconds_per_token,
        )
        return engine, renderer

    return EngineBackend(f"script {path.name}", open_engine)
