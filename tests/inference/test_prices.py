"""The price table: what ships, what a person adds, what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.inference.prices import FREE, Price, own_prices_file, read_prices

NONE = Path("/nonexistent/prices.toml")


@pytest.mark.parametrize(
    ("model", "price"),
    [
        ("etude/standard", Price(0.50, 0.50, 2.50)),
        ("etude/fast", Price(3.00, 3.00, 15.00)),
        ("Etude/Fast", Price(3.00, 3.00, 15.00)),
        ("local/SmolLM2", FREE),
        ("unheard-of", None),
    ],
)
def test_what_ships(model: str, price: Price | None) -> None:
    assert read_prices(NONE).find(model).price == price


def test_own_entries_come_first_and_may_tell_only_one_thing(tmp_path: Path) -> None:
    own = tmp_path / "prices.toml"
    own.write_text(
        '[[model]]\npattern = "etude/*"\ninput = 1\noutput = 2\n'
        '[[model]]\npattern = "local/b"\ncontext_length = 5000\n'
    )
    table = read_prices(own)
    assert table.find("etude/fast").price == Price(1, 1, 2)
    assert table.find("local/b").price == FREE
    assert table.find("local/b").context_length == 5000


def test_the_own_file_is_in_the_configuration_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ETUDE_CONFIG", str(tmp_path))
    assert own_prices_file() == tmp_path / "prices.toml"
    (tmp_path / "prices.toml").write_text('[[model]]\npattern = "m"\ninput = 0\noutput = 4\n')
    assert read_prices().find("m").price == Price(0, 0, 4)
    monkeypatch.delenv("ETUDE_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_prices_file() == tmp_path / ".config" / "etude" / "prices.toml"


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        '[[model]]\npattern = "m"\ninput = -1\noutput = 2\n',
        '[[model]]\npattern = "m"\ninput = inf\noutput = 2\n',
        '[[model]]\npattern = "m"\ninput = 1\n',
        '[[model]]\npattern = "m"\ncached = 1\n',
        '[[model]]\npattern = ""\n',
        '[[model]]\npattern = "m"\nprice = 1\n',
        "[model]\npattern = 1\n",
        "[[model]]\ninput = 1\noutput = 1\n",
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_name(tmp_path: Path, text: str) -> None:
    own = tmp_path / "prices.toml"
    own.write_text(text)
    with pytest.raises(EtudeError, match=r"prices\.toml") as caught:
        read_prices(own)
    assert "\n" not in str(caught.value)


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="cannot be read"):
        read_prices(tmp_path)


TOKENS = st.integers(0, 10**6)
DOLLARS = st.floats(0, 100)


@given(TOKENS, TOKENS, TOKENS, DOLLARS, DOLLARS, DOLLARS)
def test_cost_is_the_sum_of_its_parts(
    fresh: int, cached: int, out: int, a: float, b: float, c: float
) -> None:
    price = Price(a, b, c)
    parts = price.cost(fresh, 0, 0) + price.cost(cached, cached, 0) + price.cost(0, 0, out)
    assert price.cost(fresh + cached, cached, out) == pytest.approx(parts)
