"""Recorded calls and held-out checks: arguments and results as the text of literals."""

from __future__ import annotations

import ast
import collections
import importlib
import itertools
import math
import operator
import os
import signal
import types
from collections.abc import Callable
from typing import Any, NoReturn

from .wire import ROOT, words

CALL_SECONDS = 0.5
"""Ceiling of one recorded or checked call."""
MAX_ITEMS = 100
MAX_TEXT = 2_000
MAX_DEPTH = 5
RECORDED_CALLS = 40
"""Distinct calls kept for one function."""

_functions = [
    *(abs, all, any, bool, dict, float, int, len, list, max, min, repr, reversed, set, sorted),
    *(str, sum, tuple, type),
]
NAMED: dict[str, Any] = {function.__name__: function for function in _functions}
NAMED.update(
    ("operator." + name, getattr(operator, name))
    for name in words("add sub mul neg lt gt le ge eq ne and_ or_ xor mod concat")
)
"""Callables that may stand, by name, beside the literals of a recorded call."""
NAMES = {id(value): name for name, value in NAMED.items()}


class NoLiteral(Exception):
    """A value that cannot be written down as a literal."""


class CallTooLong(BaseException):
    """A checked call used up its time; not an Exception, so that the call cannot swallow it."""


def _too_long(_number: int, _frame: Any) -> NoReturn:
    raise CallTooLong


class CallRecorder:
    """Notes the literal arguments with which some functions are called, by their code."""

    def __init__(self, wanted: list[dict[str, Any]], emit: Callable[..., None]) -> None:
        self.places = {(f["path"], f["line"], f["name"]): at for at, f in enumerate(wanted)}
        self.emit = emit
        self.codes: dict[int, tuple[Any, int]] = {}
        self.seen: list[set[str]] = [set() for _ in wanted]

    def profile(self, frame: types.FrameType, event: str, _argument: Any) -> None:
        """`sys.setprofile` callback."""
        if event != "call":
            return
        code = frame.f_code
        known = self.codes.get(id(code))
        if known is None:
            path = os.path.relpath(os.path.realpath(code.co_filename), ROOT)
            known = code, self.places.get((path, code.co_firstlineno, code.co_name), -1)
            self.codes[id(code)] = known
        at = known[1]
        if at < 0 or len(self.seen[at]) >= RECORDED_CALLS:
            return
        call = call_text(frame)
        if call is None or repr(call) in self.seen[at]:
            return
        self.seen[at].add(repr(call))
        module = str(frame.f_globals.get("__name__", ""))
        self.emit({"call": at, "module": module, "args": call[0], "kwargs": call[1]})


def call_text(frame: types.FrameType) -> tuple[str, str] | None:
    """The arguments of a frame that just began, as text, or None if they are no literals."""
    code, values = frame.f_code, frame.f_locals
    count, named = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    try:
        positional = [input_text(values[name]) for name in names[:count]]
        keywords = {name: input_text(values[name]) for name in names[count : count + named]}
        extra = count + named
        if code.co_flags & 0x04:  # CO_VARARGS
            positional += [input_text(value) for value in values[names[extra]]]
            extra += 1
        if code.co_flags & 0x08:  # CO_VARKEYWORDS
            more = values[names[extra]]
            keywords.update({str(name): input_text(value) for name, value in more.items()})
    except (KeyError, NoLiteral):
        return None
    body = "".join(text + ", " for text in positional)
    kwargs = ", ".join(f"{name!r}: {text}" for name, text in keywords.items())
    if len(body) + len(kwargs) > MAX_TEXT:
        return None
    return f"({body})", f"{{{kwargs}}}"


def input_text(value: Any, depth: int = 0) -> str:
    """Text of a literal or of a named callable. Raises NoLiteral for anything else."""
    if id(value) in NAMES:
        return NAMES[id(value)]
    if type(value) is types.FunctionType:
        return stand_in(value)
    text = plain(value) if is_plain(value) else collection_text(value, depth)
    if len(text) > MAX_TEXT:
        raise NoLiteral
    return text


def is_plain(value: Any) -> bool:
    """Whether `repr` alone is a literal of the value."""
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str, bytes)


def plain(value: Any) -> str:
    """Text of a plain value. Raises NoLiteral for an integer too long to print."""
    try:
        return repr(value)
    except ValueError:
        raise NoLiteral from None


def collection_text(value: Any, depth: int) -> str:
    """Text of a list, tuple, set, dict or short range of literals."""
    if depth > MAX_DEPTH:
        raise NoLiteral
    kind = type(value)
    if kind is dict:
        pairs = value.items()
        texts = [f"{input_text(k, depth + 1)}: {input_text(v, depth + 1)}" for k, v in pairs]
        return "{" + ", ".join(texts) + "}"
    if kind not in (list, tuple, set, range) or len(value) > MAX_ITEMS or value == set():
        raise NoLiteral
    items = [input_text(item, depth + 1) for item in value]
    if kind is tuple:
        return "(" + "".join(item + ", " for item in items) + ")"
    if kind is set:
        return "{" + ", ".join(sorted(items)) + "}"
    return "[" + ", ".join(items) + "]"


def stand_in(function: types.FunctionType) -> str:
    """A named callable of the same arity for a function that has no name here."""
    code = function.__code__
    if code.co_flags & 0x0C or code.co_kwonlyargcount or function.__defaults__:
        raise NoLiteral
    # Chosen by the name, so that one call with two functions gets two of them.
    choices = {1: ("bool", "str", "operator.neg"), 2: ("operator.add", "max", "operator.mul")}
    if code.co_argcount not in choices:
        raise NoLiteral
    names = choices[code.co_argcount]
    return names[sum(function.__name__.encode()) % len(names)]


def parse_input(text: str) -> Any:
    """Inverse of `input_text`. Raises ValueError for text that is anything more."""
    return from_tree(ast.parse(text, mode="eval").body)


def from_tree(node: ast.AST) -> Any:
    """The value of a literal's syntax tree in which named callables may stand."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return NAMED[ast.unparse(node)]
    if isinstance(node, ast.Tuple):
        return tuple(from_tree(item) for item in node.elts)
    if isinstance(node, ast.List):
        return [from_tree(item) for item in node.elts]
    if isinstance(node, ast.Set):
        return {from_tree(item) for item in node.elts}
    if isinstance(node, ast.Dict):
        keys = [from_tree(key) for key in node.keys if key is not None]
        return {key: from_tree(value) for key, value in zip(keys, node.values)}  # noqa: B905 - 3.9
    return ast.literal_eval(node)


def output(value: Any, depth: int = 0) -> Any:
    """A result as a literal. Iterators are read for 100 items, other collections are tagged.

    Raises NoLiteral for a value that has no such form.
    """
    if is_plain(value):
        return value
    if type(value) is float or id(value) in NAMES:
        return ("named", NAMES.get(id(value), repr(value)))
    if depth > MAX_DEPTH:
        raise NoLiteral
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        table = {output(key, depth + 1): output(item, depth + 1) for key, item in value.items()}
        return table if kind is dict else (kind.__name__, table)
    lazy = hasattr(kind, "__next__")
    if not lazy and kind not in (list, tuple, set, frozenset, collections.deque, range):
        raise NoLiteral
    items = [output(item, depth + 1) for item in itertools.islice(value, MAX_ITEMS)]
    if kind in (list, tuple):
        return kind(items)
    if kind in (set, frozenset):
        return ("set", sorted(items, key=repr))
    return ("yields" if lazy else kind.__name__, items)


def evaluate(function: str, args: str, kwargs: str) -> str | None:
    """Call `module:qualname` and give its result as text; None where that has no literal form."""
    signal.setitimer(signal.ITIMER_REAL, CALL_SECONDS)
    try:
        module, _, qualname = function.partition(":")
        target = operator.attrgetter(qualname)(importlib.import_module(module))
        result: Any = ("returns", output(target(*parse_input(args), **parse_input(kwargs))))
        text = repr(result)
        return text if len(text) <= MAX_TEXT and ast.literal_eval(text) == result else None
    except (CallTooLong, NoLiteral):
        return None
    except Exception as error:  # noqa: BLE001 - whatever the function raises is its outcome
        return repr(("raises", type(error).__name__))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_calls(job: dict[str, Any], first: int, emit: Callable[..., None]) -> None:
    """Body of the checks' child: every call from `first` on."""
    signal.signal(signal.SIGALRM, _too_long)
    for at, call in enumerate(job["calls"][first:], first):
        emit({"begun": at})
        emit({"result": at, "text": evaluate(call["function"], call["args"], call["kwargs"])})
    emit({"end": job["nonce"], "status": 0})
