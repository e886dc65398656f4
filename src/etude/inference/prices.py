"""What models cost and how much they can hold: a table that ships with Etude and that a person can
add to."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.errors import EtudeError

_Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SHIPPED = "prices.toml"


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens: read anew, read from a cache, sampled."""

    input: float
    cached: float
    output: float

    def cost(self, prompt_tokens: int, cached_tokens: int, sampled_tokens: int) -> float:
        """Dollars of one exchange; `cached_tokens` are part of `prompt_tokens`."""
        fresh = prompt_tokens - cached_tokens
        dollars = fresh * self.input + cached_tokens * self.cached + sampled_tokens * self.output
        return dollars / 1e6


FREE = Price(0.0, 0.0, 0.0)
"""Of a model that runs on one's own machine."""


class _Entry(BaseModel):
    """One `[[model]]` of a price file. Either both prices or none; `context_length` in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str = Field(min_length=1)
    input: _Dollars | None = None
    cached: _Dollars | None = None
    output: _Dollars | None = None
    context_length: int | None = Field(default=None, ge=1)

    def price(self) -> Price | None:
        """None when the entry only tells a context length. Raises ValueError for half a price."""
        if self.input is None or self.output is None:
            if (self.input, self.cached, self.output) != (None, None, None):
                raise ValueError(f"{self.pattern!r} needs both input and output")
            return None
        return Price(self.input, self.input if self.cached is None else self.cached, self.output)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: tuple[_Entry, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """What the table knows of a model; None where it knows nothing."""

    price: Price | None
    context_length: int | None


@dataclass(frozen=True)
class PriceTable:
    """Entries in the order in which they count."""

    entries: tuple[_Entry, ...]

    def find(self, model: str) -> ModelFacts:
        """The facts of a model. The price is that of the first entry that fits and has one, and
        so is the context length, so an entry of a person's own may tell only one of them."""
        fitting = [
            entry
            for entry in self.entries
            if fnmatchcase(model.casefold(), entry.pattern.casefold())
        ]
        prices = [price for entry in fitting if (price := entry.price()) is not None]
        lengths = [entry.context_length for entry in fitting if entry.context_length is not None]
        return ModelFacts(prices[0] if prices else None, lengths[0] if lengths else None)


def own_prices_file() -> Path:
    """Where a person's own prices stand, whether there are any or not."""
    folder = os.environ.get("ETUDE_CONFIG")
    return (Path(folder) if folder else Path.home() / ".config" / "etude") / _SHIPPED


def read_prices(own: Path | None = None) -> PriceTable:
    """The person's entries (in `own`; None: in `own_prices_file()`), then those that ship with
    Etude. A file that is not there has none. Raises EtudeError for one that cannot be used."""
    path = own_prices_file() if own is None else own
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise EtudeError(f"The prices in {path} cannot be read ({error}).") from error
    shipped = resources.files("etude.inference").joinpath(_SHIPPED).read_text(encoding="utf-8")
    return PriceTable((*_parse(text, str(path)), *_parse(shipped, _SHIPPED)))


def _parse(text: str, where: str) -> tuple[_Entry, ...]:
    try:
        entries = _File.model_validate(tomllib.loads(text)).model
        for entry in entries:
            entry.price()
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise EtudeError(f"The prices in {where} are wrong at {place}: {fault['msg']}.") from error
    except ValueError as error:
        raise EtudeError(f"The prices in {where} are wrong: {error}.") from error
    return entries
