"""Arguments and results of recorded calls, as text: read, varied, compared.

The text is a Python literal in which callables of a fixed table (`len`, `operator.add`, ...) may
stand by name; `guest.calls.NAMED` is that table. Here on the host nothing is ever called, so a
name stays a `Named`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, cast

UNARY = ("bool", "str", "operator.neg", "len", "abs")
BINARY = ("operator.add", "operator.mul", "max", "min", "operator.sub")
MAX_LENGTH = 30
"""Longest sequence that a variation makes."""


@dataclass(frozen=True)
class Named:
    """A callable of the table; its repr is its name, so that values print as input text."""

    name: str

    def __repr__(self) -> str:
        return self.name


def parse(text: str) -> Any:
    """The value of input text. Raises ValueError (or SyntaxError) for anything but literals and
    names."""
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Name() | ast.Attribute():
            return Named(ast.unparse(node))
        case ast.Tuple():
            return tuple(_value(item) for item in node.elts)
        case ast.List():
            return [_value(item) for item in node.elts]
        case ast.Set():
            return {_value(item) for item in node.elts}
        case ast.Dict():
            keys = [_value(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(_value, node.values), strict=True))
        case _:
            return ast.literal_eval(node)


def agrees(text: str, expected: str) -> bool:
    """Whether a candidate's result, as text, is the reference's: same types, same values.

    The text comes from a process that ran the candidate; anything but a literal agrees with
    nothing. Order counts in sequences, not in dicts and sets; floats may differ by 1e-9 relative.
    """
    try:
        mine, theirs = ast.literal_eval(text), ast.literal_eval(expected)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return same(mine, theirs)


def same(mine: Any, theirs: Any) -> bool:
    """Structural equality that, unlike `==`, tells `1`, `1.0` and `True` apart."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, float):
        return mine == theirs or math.isclose(mine, theirs, rel_tol=1e-9)
    if isinstance(mine, list | tuple):
        ours = cast(list[Any], mine)
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(mine, dict):
        table = cast(dict[Any, Any], mine)
        keys = {(type(key), key) for key in table} == {(type(key), key) for key in theirs}
        return keys and all(same(table[key], theirs[key]) for key in table)
    return bool(mine == theirs)


def vary(value: Any, random: Random) -> Any:
    """One random step from `value`: another number, string or callable, a longer or shorter
    collection, swapped or changed elements."""
    steps: dict[type, Callable[[Any, Random], Any]] = {
        bool: lambda value, _random: not value,
        int: _vary_int,
        float: lambda value, random: value + random.choice((-1.5, -0.5, 0.25, 1.0, 2.0)),
        str: _vary_text,
        bytes: _vary_text,
        list: _vary_sequence,
        tuple: _vary_sequence,
        dict: _vary_dict,
        set: lambda value, random: set(_vary_sequence(sorted(value, key=repr), random)),
        Named: _vary_named,
    }
    step = steps.get(type(value))
    return value if step is None else step(value, random)


def _vary_int(value: int, random: Random) -> int:
    """A neighbour of a large number, a small number for a small one."""
    if abs(value) > 50:
        return value + random.choice((-2, -1, 1, 2, 3))
    return random.randint(-3, 9)


def _vary_named(value: Named, random: Random) -> Named:
    """Another callable of the same arity."""
    for table in (UNARY, BINARY):
        if value.name in table:
            return Named(random.choice(table))
    return value


def _vary_text(value: Any, random: Random) -> Any:
    """`str` or `bytes`: rotated, doubled, cut, a piece of it repeated."""
    if not value:
        return value + (b"q" if isinstance(value, bytes) else "q")
    at = random.randrange(len(value))
    step = random.choice(("cut", "rotate", "repeat", "reverse"))
    if step == "cut":
        return value[:at]
    if step == "rotate":
        return value[at:] + value[:at]
    if step == "repeat" and len(value) < MAX_LENGTH:
        return value + value[at:]
    return value[::-1]


def _vary_sequence(value: Any, random: Random) -> Any:
    """A list or tuple: an element dropped, doubled, swapped, changed, or all of them gone."""
    items = list(value)
    kind = type(value)
    if not items:
        return value
    step = random.choice(("drop", "double", "swap", "change", "change", "change", "grow", "empty"))
    at = random.randrange(len(items))
    if step == "drop":
        del items[at]
    elif step == "double" and len(items) < MAX_LENGTH:
        items.insert(random.randrange(len(items) + 1), items[at])
    elif step == "swap":
        other = random.randrange(len(items))
        items[at], items[other] = items[other], items[at]
    elif step == "grow" and len(items) < MAX_LENGTH:
        items += [vary(item, random) for item in items[: MAX_LENGTH - len(items)]]
    elif step == "empty" and random.random() < 0.4:
        items = []
    else:
        items[at] = vary(items[at], random)
    return kind(items)


def _vary_dict(value: dict[Any, Any], random: Random) -> dict[Any, Any]:
    """A key dropped or renamed, or a value changed."""
    if not value:
        return value
    table = dict(value)
    key = random.choice(list(table))
    step = random.choice(("drop", "rename", "change", "change"))
    if step == "drop":
        del table[key]
    elif step == "rename":
        renamed = vary(key, random)
        table = {renamed if name == key else name: item for name, item in table.items()}
    else:
        table[key] = vary(table[key], random)
    return table
