"""Runs tests on a changed repository in warm, single-use guests.

`SuiteRunner` keeps interpreters waiting that have already imported pytest on the pristine tree
(`guest.parent`). One job is handed to one guest, which is then killed with its whole namespace,
while the next one is warming. What the guest says of a candidate is a measurement; a guest that
fails before the job began is not, and is tried once more before `WorkspaceError` is raised.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self, cast

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.guest import Guest
from etude.sandbox.protocol import Limits, WorkspaceError
from etude.tasks.literals import agrees
from etude.tasks.repository import Repository
from etude.tasks.task import Check

HASH_SEED = 0
"""PYTHONHASHSEED of every run that asks for no other: a grade does not depend on luck."""
WARM_SECONDS = 45.0
"""Deadline for a guest to import pytest, generous because machines are shared."""
GRACE_SECONDS = 20.0
"""How long after its own deadline a guest may still need to report."""

_GUEST_CODE = Path(__file__).parent / "guest"
_START = """
import sys
sys.path[:] = ["/grader"] + [path for path in sys.path if path]
from etude_guest.parent import main
del sys.path[0]
main()
"""


@dataclass(frozen=True)
class WantedCalls:
    """A function whose calls are to be recorded: `path` relative to the root, `line` the first
    of its definition, decorators included, `name` its own name, `qualname` with its classes."""

    path: str
    line: int
    name: str
    qualname: str


@dataclass(frozen=True)
class RecordedCall:
    """A call seen on the pristine code: number in the wanted list, `module:qualname`, literal
    arguments as text."""

    wanted: int
    function: str
    args: str
    kwargs: str


@dataclass(frozen=True)
class SuiteResult:
    """What one run of tests showed.

    `outcomes` maps each asked test id (each collected one, when all were asked for) to passed,
    failed, error, skipped or missing. `finished` is false when the session did not end by itself:
    a crash, a hang, an exit from inside, or records that were tampered with (`tampered` says how).
    `seconds` is wall time of the job alone, `cpu_seconds` that of the processor with the warm-up.
    `check_results` are the agreements of the asked checks, in order, empty unless every test
    passed; `call_results` the raw texts of them, None where there was no literal result.
    `collection_errors` maps file to message; `tail` is the end of what was printed, never parsed.
    """

    outcomes: Mapping[str, str]
    finished: bool
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    check_results: tuple[bool, ...] = ()
    call_results: tuple[str | None, ...] = ()
    collection_errors: Mapping[str, str] = field(default_factory=dict[str, str])
    recorded: tuple[RecordedCall, ...] = ()
    timed_out: bool = False
    tampered: str = ""
    tail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the session ended by itself and every test of it passed."""
        return self.finished and set(self.outcomes.values()) <= {"passed"}


class _Lost(Exception):
    """The guest fell silent after it had accepted the job; the text says how."""


class _Noise(Exception):
    """The guest's output was no message."""


class SuiteRunner:
    """A pool of warm guests for one repository; use it as an async context manager.

    At most `workers` jobs run at a time, and as many guests wait warm.
    """

    def __init__(
        self,
        repository: Repository,
        sandbox: BubblewrapSandbox,
        *,
        workers: int = 2,
        limits: Limits | None = None,
    ) -> None:
        self.repository = repository
        self._sandbox = sandbox
        self._limits = limits or Limits()
        self._slots = asyncio.Semaphore(workers)
        self._workers = workers
        self._warming: list[asyncio.Task[Guest]] = []
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        self._refill()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        warming, self._warming = self._warming, []
        for task in warming:
            task.cancel()
        for end in await asyncio.gather(*warming, return_exceptions=True):
            if not isinstance(end, BaseException):
                await end.kill()

    async def run(
        self,
        changes: Mapping[str, str | None],
        tests: Sequence[str] | None,
        *,
        timeout: float,
        order_seed: int | None = None,
        hash_seed: int | None = None,
        checks: Sequence[Check] = (),
        stop_at_first_failure: bool = False,
        record: Sequence[WantedCalls] = (),
    ) -> SuiteResult:
        """Write `changes` over the pristine tree and run `tests` (None: all of them) in order.

        `timeout` is wall-clock seconds for tests and checks together. `checks` are compared only
        if all tests passed; with no tests (`()`) they alone are run. `record` notes the calls of
        functions with literal arguments. Raises ValueError for a path that leads out of the tree,
        WorkspaceError when the sandbox failed twice.
        """
        job = {
            "changes": {_inside(path): text for path, text in changes.items()},
            "tests": None if tests is None else list(tests),
            "timeout": timeout,
            "order_seed": order_seed,
            "stop_at_first_failure": stop_at_first_failure,
            "record": [vars(wanted) for wanted in record],
            "calls": [check.model_dump(include={"function", "args", "kwargs"}) for check in checks],
        }
        async with self._slots:
            answer = await self._measure(job, HASH_SEED if hash_seed is None else hash_seed)
        return _result(answer, checks, record)

    async def _measure(self, job: dict[str, Any], hash_seed: int) -> dict[str, Any]:
        """The guest's answer; a lost guest is tried once more, then it is the candidate's doing.

        A candidate can kill the guest, and so can a broken machine. The second time it happens a
        fresh guest tells the two apart: if it warms up, the machine works.
        """
        reason = ""
        for attempt in range(2):
            guest = await self._take(hash_seed)
            try:
                return await _hand_over(guest, job | _secrets())
            except _Lost as lost:
                reason = str(lost)
            except WorkspaceError:
                if attempt:
                    raise
                continue
            finally:
                await guest.kill()
        witness = await self._take(hash_seed)
        await witness.kill()
        missing = dict.fromkeys(job["tests"] or (), "missing")
        return {"outcomes": missing, "finished": False, "tail": f"the guest was lost: {reason}"}

    async def _take(self, hash_seed: int) -> Guest:
        """A guest that is ready; one that fails to warm up is replaced once."""
        if hash_seed != HASH_SEED:
            return await self._warm(hash_seed)
        if not self._open:
            raise RuntimeError("the suite runner is not open")
        for attempt in range(2):
            task = self._warming.pop(0) if self._warming else asyncio.create_task(self._warm())
            self._refill()
            try:
                return await _finish(task)
            except WorkspaceError:
                if attempt:
                    raise
        raise AssertionError

    def _refill(self) -> None:
        while self._open and len(self._warming) < self._workers:
            self._warming.append(asyncio.create_task(self._warm()))

    async def _warm(self, hash_seed: int = HASH_SEED) -> Guest:
        """Start a guest and wait until it has imported pytest."""
        image = self.repository.image()
        image = replace(image, readonly={**image.readonly, _GUEST_CODE: "/grader/etude_guest"})
        # Outside of the repository, so that nothing of it shadows a module of the interpreter.
        guest = await self._sandbox.spawn(
            image,
            [self.repository.python, "-s", "-B", "-c", _START],
            limits=self._limits,
            env={"PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
        )
        try:
            message = await _message(guest, WARM_SECONDS)
            if message != {"ready": True}:
                raise WorkspaceError(f"a grading guest did not become ready: {message}")
        except (_Lost, _Noise) as lost:
            await guest.kill()
            raise WorkspaceError(f"a grading guest did not start: {lost}") from lost
        except BaseException:
            await guest.kill()
            raise
        return guest


async def _finish(task: asyncio.Task[Guest]) -> Guest:
    """Await a warming guest; if the waiter is cancelled the guest is killed, not leaked."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        for end in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(end, BaseException):
                await end.kill()
        raise


async def _hand_over(guest: Guest, job: dict[str, Any]) -> dict[str, Any]:
    """Give the job to a warm guest. Raises WorkspaceError if it was dead before it accepted,
    _Lost if it fell silent afterwards."""
    try:
        await guest.write(json.dumps(job).encode("ascii") + b"\n")
        accepted = await _message(guest, GRACE_SECONDS)
    except (_Lost, _Noise, WorkspaceError) as lost:
        raise WorkspaceError(f"a grading guest died before its job: {lost}") from lost
    if accepted != {"accepted": True}:
        raise WorkspaceError(f"a grading guest did not accept its job: {accepted}")
    try:
        async with asyncio.timeout(job["timeout"] + GRACE_SECONDS):
            return await _signed(guest, job["token"])
    except TimeoutError:
        raise _Lost("no answer in time") from None


async def _signed(guest: Guest, token: str) -> dict[str, Any]:
    """The first answer with the token; a candidate may write what it likes in between."""
    while True:
        try:
            message = await _message(guest, None)
        except _Noise:
            continue
        if message.get("token") == token:
            if "answer" not in message:
                raise _Lost(str(message.get("lost")))
            return cast(dict[str, Any], message["answer"])


async def _message(guest: Guest, seconds: float | None) -> dict[str, Any]:
    """One message of the guest: JSON in pieces up to an empty line. Raises _Noise for anything
    else, _Lost at the end or after `seconds`."""
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                line = await guest.readline(seconds or WARM_SECONDS + GRACE_SECONDS)
                if not line:
                    raise _Lost(f"it ended. {guest.stderr_tail()}".strip())
                if line == b"\n":
                    break
                pieces.append(line.rstrip(b"\n"))
    except WorkspaceError as error:
        raise _Lost(str(error)) from error
    except TimeoutError:
        raise _Lost(f"no answer in time. {guest.stderr_tail()}".strip()) from None
    try:
        message = json.loads(b"".join(pieces))
    except (ValueError, RecursionError):
        raise _Noise from None
    if not isinstance(message, dict):
        raise _Noise
    return cast(dict[str, Any], message)


def _secrets() -> dict[str, Any]:
    """What a candidate would have to know to imitate the end of a session; the token never
    reaches the process that it runs in."""
    names = [f"test_{secrets.token_hex(4)}" for _ in range(2)]
    return {
        "token": secrets.token_hex(16),
        "nonce": secrets.token_hex(16),
        "secret": 32 + secrets.randbelow(90),
        "canaries": {"good": names[0], "bad": names[1]},
    }


def _inside(path: str) -> str:
    """The path itself. Raises ValueError unless it is relative and stays in the tree."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"not a path inside the repository: {path!r}")
    return path


def _result(
    answer: dict[str, Any], checks: Sequence[Check], record: Sequence[WantedCalls]
) -> SuiteResult:
    """The guest's answer as a record of the host's, checks compared here, where the candidate
    has no say."""
    texts: Mapping[str, str | None] = answer.get("results") or {}
    finished = bool(answer["finished"]) and not answer.get("tampered")
    measured = finished and set(answer["outcomes"].values()) <= {"passed"}
    results = tuple(texts.get(str(at)) for at in range(len(checks))) if measured else ()
    calls: list[RecordedCall] = []
    for call in answer.get("calls", ()):
        name = f"{call['module']}:{record[call['call']].qualname}"
        calls.append(RecordedCall(call["call"], name, call["args"], call["kwargs"]))
    return SuiteResult(
        outcomes=answer["outcomes"],
        finished=finished,
        seconds=float(answer.get("seconds", 0.0)),
        cpu_seconds=float(answer.get("cpu_seconds", 0.0)),
        check_results=tuple(
            text is not None and agrees(text, check.expected)
            for text, check in zip(results, checks, strict=bool(results))
        ),
        call_results=results,
        collection_errors=answer.get("collection_errors", {}),
        recorded=tuple(calls),
        timed_out=bool(answer.get("timed_out", False)),
        tampered=str(answer.get("tampered", "")),
        tail=str(answer.get("tail", "")),
    )
