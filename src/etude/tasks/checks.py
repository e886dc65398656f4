"""Held-out checks: calls of the reference on inputs that no visible test shows.

The tests are run on the pristine code while the calls of the wanted functions are recorded; the
literal ones are varied by small steps; the reference answers them in the sandbox, twice and under
two hash seeds; what is the same both times is a check. Weak tests pay for wrong code, and a check
is also judged outside of the process that a candidate controls.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from etude.tasks.literals import agrees, parse, vary
from etude.tasks.repository import Repository
from etude.tasks.runner import RecordedCall, SuiteRunner, WantedCalls
from etude.tasks.task import Check

MAX_CHECKS = 12
MAX_INPUTS = 36
"""Inputs of one function that the reference is asked about."""
SECOND_HASH_SEED = 7
UNFAIR = frozenset(("TypeError", "AttributeError", "NameError", "RecursionError", "MemoryError"))
"""What a reference raises for an input it was never meant for; another right answer may differ."""


@dataclass(frozen=True)
class _Input:
    """A call to ask the reference about; `fresh` if no test makes it."""

    call: RecordedCall
    fresh: bool


async def record_checks(
    repository: Repository,
    runner: SuiteRunner,
    function: str,
    tests: Sequence[str] | None,
    *,
    timeout: float = 120.0,
) -> list[Check]:
    """Checks of one function, `path::qualname`; empty when nothing could be recorded."""
    found = await record_all_checks(repository, runner, [function], tests, timeout=timeout)
    return found[function]


async def record_all_checks(
    repository: Repository,
    runner: SuiteRunner,
    functions: Sequence[str],
    tests: Sequence[str] | None,
    *,
    timeout: float = 120.0,
) -> dict[str, list[Check]]:
    """Checks of many functions (`path::qualname`) from one recorded run of `tests` (None: all).

    Calls are recorded under two hash seeds, and those seen in both count: what a test draws by
    chance is no basis for a check. At most `MAX_CHECKS` for each function, fresh inputs
    first and different results before equal ones. Raises WorkspaceError if the sandbox fails.
    """
    wanted = locate(repository, functions)
    places = list(wanted.values())
    recording, again = await asyncio.gather(
        runner.run({}, tests, timeout=timeout, record=places),
        runner.run({}, tests, timeout=timeout, record=places, hash_seed=SECOND_HASH_SEED),
    )
    steady = set(again.recorded)
    inputs: list[_Input] = []
    owners: list[str] = []
    for at, function in enumerate(wanted):
        calls = [call for call in recording.recorded if call.wanted == at and call in steady]
        varied = list(vary_calls(calls, Random(function))) if calls else []
        inputs += varied
        owners += [function] * len(varied)
    answers = await ask(runner, [item.call for item in inputs], timeout)
    checks: dict[str, list[Check]] = {function: [] for function in functions}
    for function in wanted:
        mine = [
            (item, answer)
            for item, owner, answer in zip(inputs, owners, answers, strict=True)
            if owner == function and answer is not None and fair(answer, item.fresh)
        ]
        checks[function] = choose(mine)
    return checks


def locate(repository: Repository, functions: Iterable[str]) -> dict[str, WantedCalls]:
    """Where each `path::qualname` is defined; those nested in functions are left out, since they
    cannot be called from outside."""
    found: dict[str, WantedCalls] = {}
    tables: dict[str, dict[str, WantedCalls]] = {}
    for function in functions:
        path, _, qualname = function.partition("::")
        if path not in tables:
            tree = ast.parse((repository.root / path).read_bytes())
            tables[path] = dict(_definitions(path, tree, ""))
        if qualname in tables[path]:
            found[function] = tables[path][qualname]
    return found


def _definitions(path: str, node: ast.AST, prefix: str) -> Iterable[tuple[str, WantedCalls]]:
    """Functions of a module and of its classes; the last definition of a name wins."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            qualname = prefix + child.name
            first = min([child.lineno, *(item.lineno for item in child.decorator_list)])
            yield qualname, WantedCalls(path, first, child.name, qualname)
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(path, child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _definitions(path, child, prefix)


def vary_calls(calls: Sequence[RecordedCall], random: Random) -> Iterable[_Input]:
    """Fresh inputs first, then the recorded ones, `MAX_INPUTS` in all, each once."""
    seen = {(call.args, call.kwargs) for call in calls}
    originals = list(calls)[: MAX_INPUTS // 3]
    wanted = MAX_INPUTS - len(originals)
    for at in range(wanted * 4):
        if wanted <= 0:
            break
        call = calls[at % len(calls)]
        args, kwargs = list(parse(call.args)), parse(call.kwargs)
        place = random.randrange(len(args) + len(kwargs)) if args or kwargs else 0
        if place < len(args):
            args[place] = vary(args[place], random)
        elif kwargs:
            name = list(kwargs)[place - len(args)]
            kwargs[name] = vary(kwargs[name], random)
        varied = (repr(tuple(args)), repr(kwargs))
        if varied not in seen:
            seen.add(varied)
            wanted -= 1
            yield _Input(RecordedCall(call.wanted, call.function, *varied), fresh=True)
    for call in originals:
        yield _Input(call, fresh=False)


async def ask(
    runner: SuiteRunner, calls: Sequence[RecordedCall], timeout: float
) -> list[str | None]:
    """What the pristine code returns for each call, None where it is no literal, takes too long
    or is not the same in two processes with different hash seeds."""
    if not calls:
        return []
    asked = [Check(function=c.function, args=c.args, kwargs=c.kwargs, expected="") for c in calls]
    first, second = await asyncio.gather(
        runner.run({}, (), timeout=timeout, checks=asked),
        runner.run({}, (), timeout=timeout, checks=asked, hash_seed=SECOND_HASH_SEED),
    )
    return [
        mine if mine is not None and theirs is not None and agrees(mine, theirs) else None
        for mine, theirs in zip(first.call_results, second.call_results, strict=True)
    ]


def fair(answer: str, fresh: bool) -> bool:
    """Whether any right answer must agree: errors of a reference that was fed nonsense are out."""
    kind, what = ast.literal_eval(answer)[:2]
    return kind != "raises" or (not fresh and what not in UNFAIR)


def choose(answered: Sequence[tuple[_Input, str]]) -> list[Check]:
    """At most `MAX_CHECKS`: results not seen before come first, in the given order."""
    seen: set[str] = set()
    new: list[Check] = []
    again: list[Check] = []
    for item, answer in answered:
        call = item.call
        check = Check(function=call.function, args=call.args, kwargs=call.kwargs, expected=answer)
        (again if answer in seen else new).append(check)
        seen.add(answer)
    return (new + again)[:MAX_CHECKS]
