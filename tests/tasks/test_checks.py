"""Held-out checks, the literals they are made of, and the scan of answers."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_repository import BASKET, HOLE, START, answer, make_repository, make_task

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.tasks.checks import MAX_CHECKS, locate, record_all_checks, record_checks
from etude.tasks.grading import Grader
from etude.tasks.guest import calls
from etude.tasks.literals import BINARY, UNARY, Named, agrees, parse, same, vary
from etude.tasks.runner import SuiteRunner
from etude.tasks.task import Check

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
keys = st.one_of(st.integers(), st.text(max_size=5), st.tuples(st.integers(), st.text(max_size=2)))
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(keys, min_size=1, max_size=4),
    ),
    max_leaves=8,
)


@given(values)
def test_input_text_is_a_literal_of_the_value(value: Any) -> None:
    text = calls.input_text(value)
    assert same(ast.literal_eval(text), value)
    assert same(calls.parse_input(text), value)
    assert same(parse(text), value)


@given(values)
def test_result_text_agrees_with_itself_alone(value: Any) -> None:
    text = repr(("returns", calls.output(value)))
    assert agrees(text, text)
    assert not agrees(text, repr(("returns", [value])))


@given(values, st.integers(0, 1000))
def test_variations_keep_the_type_and_stay_small(value: Any, seed: int) -> None:
    random = Random(seed)
    varied = value
    for _ in range(12):
        varied = vary(varied, random)
        assert type(varied) is type(value)
    assert same(parse(repr(varied)), varied)
    if isinstance(varied, list | tuple):
        assert len(varied) <= max(30, len(value))


@pytest.mark.parametrize("name", UNARY + BINARY)
def test_every_stand_in_is_a_callable_the_guest_knows(name: str) -> None:
    assert callable(calls.parse_input(name))
    assert calls.input_text(calls.parse_input(name)) == name
    assert vary(Named(name), Random(0)).name in UNARY + BINARY


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("('returns', 1)", "('returns', True)"),
        ("('returns', 1)", "('returns', 1.0)"),
        ("('returns', [1])", "('returns', (1,))"),
        ("('yields', [1])", "('returns', [1])"),
        ("('returns', {1: 1})", "('returns', {True: 1})"),
        ("('raises', 'KeyError')", "('raises', 'ValueError')"),
        ("__import__('os')", "('returns', 1)"),
        ("(" * 500, "('returns', 1)"),
        ("", "('returns', None)"),
    ],
)
def test_different_results_do_not_agree(mine: str, theirs: str) -> None:
    assert not agrees(mine, theirs)


def test_order_counts_in_lists_only() -> None:
    assert agrees("{1: 2, 3: 4}", "{3: 4, 1: 2}")
    assert not agrees("[1, 2]", "[2, 1]")
    assert agrees("0.30000000000000004", "0.3")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (iter([1, (2,)]), "('yields', [1, (2,)])"),
        (range(3), "('range', [0, 1, 2])"),
        ({3, 1}, "('set', [1, 3])"),
        (float("inf"), "('named', 'inf')"),
        (len, "('named', 'len')"),
        ((n for n in range(500)), repr(("yields", list(range(100))))),
    ],
)
def test_results_that_are_no_plain_literals(value: Any, text: str) -> None:
    assert repr(calls.output(value)) == text


def test_objects_have_no_literal() -> None:
    with pytest.raises(calls.NoLiteral):
        calls.output([object()])
    with pytest.raises(calls.NoLiteral):
        calls.input_text({"a": object()})


def test_functions_are_found_with_their_first_line(tmp_path: Path) -> None:
    repository = make_repository(tmp_path)
    names = ["total", "Basket.label", "Basket.absent", "chunks"]
    found = locate(repository, [f"shop/basket.py::{name}" for name in names])
    lines = BASKET.splitlines()
    assert list(found) == [f"shop/basket.py::{name}" for name in names if "absent" not in name]
    assert lines[found["shop/basket.py::Basket.label"].line - 1].strip() == "@staticmethod"
    assert lines[found["shop/basket.py::total"].line - 1].startswith("def total")


def record(folder: Path, *names: str) -> dict[str, list[Check]]:
    async def main() -> dict[str, list[Check]]:
        repository = make_repository(folder)
        async with SuiteRunner(repository, BubblewrapSandbox(), workers=1) as runner:
            functions = [f"shop/basket.py::{name}" for name in names]
            found = await record_all_checks(repository, runner, functions, repository.tests)
            one = await record_checks(repository, runner, functions[0], None)
            assert one == found[functions[0]]
            return {name: found[f"shop/basket.py::{name}"] for name in names}

    return asyncio.run(main())


def test_recorded_checks_hold_for_the_reference_and_catch_wrong_code(tmp_path: Path) -> None:
    checks = record(
        tmp_path / "repository", "total", "chunks", "apply", "first", "Basket.add", "Basket.label"
    )
    assert checks["Basket.add"] == []
    for name in ("total", "chunks", "apply", "first", "Basket.label"):
        assert 3 <= len(checks[name]) <= MAX_CHECKS
        assert {check.function for check in checks[name]} == {f"shop.basket:{name}"}
    assert any(check.expected == "('raises', 'IndexError')" for check in checks["first"])
    assert any("('yields', " in check.expected for check in checks["chunks"])

    # An independent computation of what the checks of `total` must say.
    for check in checks["total"]:
        prices, rebate = ast.literal_eval(check.args)
        whole = sum(prices)
        assert ast.literal_eval(check.expected) == ("returns", whole - whole * rebate // 100)

    async def main() -> list[float | None]:
        repository = make_repository(tmp_path / "again")
        task = make_task(checks["total"])
        constants = "{(1, 2): 3, (): 0, (4,): 4, (50, 50): 90}.get(tuple(prices))"
        async with SuiteRunner(repository, BubblewrapSandbox(), workers=1) as runner:
            grader = Grader(repository, runner)
            expressions = (HOLE, constants)
            return [(await grader.grade(task, answer(text))).score for text in expressions]

    assert asyncio.run(main()) == [1.0, 0.0]
    assert START != BASKET
