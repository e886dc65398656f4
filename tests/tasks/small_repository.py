"""A small real repository for the tests of runner, grading and checks; its environment is the one
that runs the tests, so nothing has to be installed."""

from __future__ import annotations

import sys
from pathlib import Path

from etude.tasks.repository import Repository
from etude.tasks.task import Check, Edit, Rung, Split, Task

BASKET = '''\
"""Baskets of a shop."""

from itertools import islice


def total(prices, rebate=0):
    """Sum of the prices less a rebate in percent."""
    whole = sum(prices)
    return whole - whole * rebate // 100


def chunks(items, size):
    """Lists of at most `size` items."""
    items = iter(items)
    while True:
        piece = list(islice(items, size))
        if not piece:
            return
        yield piece


def apply(function, items):
    """The function of each item."""
    return [function(item) for item in items]


def first(items):
    """The first item. Raises IndexError if there is none."""
    return items[0]


class Basket:
    """Things with prices."""

    def __init__(self):
        self.prices = {}

    def add(self, name, price):
        self.prices[name] = self.prices.get(name, 0) + price

    @staticmethod
    def label(name, price):
        return f"{name}: {price}"
'''

FILES = """\
def read(path):
    with open(path) as file:
        return file.read()
"""

TEST_BASKET = """\
import pytest

from shop.basket import Basket, apply, chunks, first, total


@pytest.mark.parametrize("prices, expected", [([1, 2], 3), ([], 0), ([4], 4)])
def test_total(prices, expected):
    assert total(prices) == expected


def test_rebate():
    assert total([50, 50], 10) == 90


def test_chunks():
    assert list(chunks([1, 2, 3], 2)) == [[1, 2], [3]]
    assert list(chunks("abc", 3)) == [["a", "b", "c"]]


def test_apply():
    assert apply(lambda x: x + 1, [1, 2]) == [2, 3]
    assert apply(str, (1, 2)) == ["1", "2"]


def test_first():
    assert first([7, 8]) == 7
    with pytest.raises(IndexError):
        first([])


class TestBasket:
    def test_add(self, basket):
        basket.add("pear", 2)
        assert basket.prices == {"pear": 4}

    def test_label(self):
        assert Basket.label("pear", 2) == "pear: 2"
"""

TEST_FILES = """\
import unittest

from shop.files import read


class ReadTest(unittest.TestCase):
    def test_read(self):
        self.assertIn("pytest", read("pyproject.toml"))
"""

CONFTEST = """\
import pytest

from shop.basket import Basket


@pytest.fixture
def basket():
    basket = Basket()
    basket.add("pear", 2)
    return basket
"""

PYPROJECT = """\
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["-x", "--no-such-flag-of-an-absent-plugin"]
filterwarnings = ["error"]
"""

TESTS = (
    *(f"tests/test_basket.py::test_total[prices{n}-{m}]" for n, m in ((0, 3), (1, 0), (2, 4))),
    "tests/test_basket.py::test_rebate",
    "tests/test_basket.py::test_chunks",
    "tests/test_basket.py::test_apply",
    "tests/test_basket.py::test_first",
    "tests/test_basket.py::TestBasket::test_add",
    "tests/test_basket.py::TestBasket::test_label",
    "tests/test_files.py::ReadTest::test_read",
)
TARGETS = [*TESTS[:4]]
HOLE = "whole - whole * rebate // 100"
START = BASKET.replace(HOLE, "MISSING")


def make_repository(folder: Path) -> Repository:
    """Write the repository's files into a folder."""
    texts = {
        "shop/__init__.py": "",
        "shop/basket.py": BASKET,
        "shop/files.py": FILES,
        "tests/conftest.py": CONFTEST,
        "tests/test_basket.py": TEST_BASKET,
        "tests/test_files.py": TEST_FILES,
        "pyproject.toml": PYPROJECT,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Repository(
        key="small",
        name="shop",
        source=str(folder),
        root=folder,
        env=Path(sys.prefix),
        source_files=("shop/__init__.py", "shop/basket.py", "shop/files.py"),
        test_files=("tests/conftest.py", "tests/test_basket.py", "tests/test_files.py"),
        tests=TESTS,
        suite_seconds=0.5,
    )


def make_task(checks: list[Check] | None = None) -> Task:
    """The task to put the expression of `total` back."""
    return Task(
        id="small-0",
        repository="small",
        kind="deletion",
        rung=Rung.EXPRESSION,
        split=Split.PRACTICE,
        path="shop/basket.py",
        function="shop/basket.py::total",
        prompt="An expression is missing.",
        files={"shop/basket.py": START},
        reference={"shop/basket.py": BASKET},
        answer=Edit(path="shop/basket.py", old="MISSING", new=HOLE),
        target_tests=TARGETS,
        allowed_paths=["shop/basket.py"],
        checks=checks or [],
    )


def answer(expression: str) -> dict[str, str | None]:
    """A change that puts an expression in the place of the missing one."""
    return {"shop/basket.py": START.replace("MISSING", expression)}
