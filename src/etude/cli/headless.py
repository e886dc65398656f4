"""`etude -p`: one message, no questions, an answer for a person or a program."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from etude.agent.explain import explain
from etude.agent.live import Drivers, LiveSession
from etude.cli.choices import Choices
from etude.cli.opening import Bench, Target, open_bench, open_session
from etude.cli.visible import visible
from etude.errors import EtudeError
from etude.records import Event, EventKind, StopReason

_STDIN_SECONDS = 5.0
_STDIN_BYTES = 10 << 20


class Form(StrEnum):
    """What is written to standard output."""

    TEXT = "text"
    JSON = "json"
    STREAM = "stream-json"


class Exit:
    """Exit codes of a headless run; 2 is bad usage, as everywhere: whatever keeps a session from
    being opened."""

    FINISHED = 0
    DENIED = 3
    LIMIT = 4
    ERROR = 5
    INTERRUPTED = 130


_EXIT_OF = {
    StopReason.FINISHED: Exit.FINISHED,
    StopReason.CANCELLED: Exit.INTERRUPTED,
    StopReason.ERROR: Exit.ERROR,
}
"""All others are limits."""


@dataclass
class _Seen:
    """What happened in this run, sub-agents included."""

    streams: bool = False
    events: list[tuple[str, Event]] = field(default_factory=list[tuple[str, Event]])

    def take(self, session_id: str, event: Event) -> None:
        """An event of a session (`''`: the person's own)."""
        self.events.append((session_id, event))
        if self.streams:
            self._print(session_id, event)

    def stream(self, live: LiveSession, model: str) -> None:
        """From now on each event is printed, after those that there are."""
        _print_line({"type": "session", "id": live.session.session_id, "model": model})
        for session_id, event in self.events:
            self._print(session_id, event)
        self.streams = True

    @staticmethod
    def _print(session_id: str, event: Event) -> None:
        who = {"session": session_id} if session_id else {}
        told = {"type": event.kind.value, **who, "turn": event.turn}
        _print_line({**told, "data": dict(event.data)})


async def headless(choices: Choices, prompt: str, form: Form) -> int:
    """Run one message to its end; returns the exit code. What comes on standard input is added to
    the message. Raises EtudeError for bad usage."""
    text = _whole_prompt(prompt)
    bench, target = open_bench(choices)
    work = asyncio.ensure_future(_run(bench, target, text, form))
    _cancel_on_signals(work)
    try:
        code = await work
    except asyncio.CancelledError:
        # Before there was a session: nothing was begun.
        _tell(form, {"status": "interrupted", "session": None, "message": ""}, "interrupted")
        code = Exit.INTERRUPTED
    finally:
        loading = bench.loading
        await bench.close()
    if loading:
        # A model that is being read cannot be interrupted; everything else is closed.
        sys.stdout.flush()
        os._exit(code)
    return code


def _cancel_on_signals(work: asyncio.Future[int]) -> None:
    """The first signal ends the work; what closes things afterwards is not disturbed, it has
    deadlines of its own."""
    loop = asyncio.get_running_loop()
    told: list[bool] = []

    def interrupt() -> None:
        if not told:
            told.append(True)
            work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)


async def _run(bench: Bench, target: Target, text: str, form: Form) -> int:
    """The session of a headless run, whatever ends it."""
    seen = _Seen()
    drivers = Drivers(
        backend=bench.backend,
        open_sandbox=bench.sandbox,
        on_event=lambda event: seen.take("", event),
        on_child_event=seen.take,
        say=_warn,
    )
    # What cannot be opened was asked for wrongly: that is bad usage, told like all of it.
    opened = await open_session(bench, target, drivers, _warn)
    live, error = opened.live, ""
    try:
        if form is Form.STREAM:
            seen.stream(live, bench.name)
        before = live.session.budget.spent
        try:
            reason = await _prompt(live, text)
        except EtudeError as fault:
            error, reason = str(fault), StopReason.ERROR
        result = await _result(live, seen, reason, error)
        spent = live.session.budget.spent - before
        result["cost"] = None if bench.backend.price is None else spent
    finally:
        await opened.close()
    code = _exit_code(reason, result["denials"])
    _tell(form, result, error)
    return code


async def _prompt(live: LiveSession, text: str) -> StopReason:
    """Being interrupted ends the session's work, not this program's."""
    try:
        return await live.prompt(text)
    except asyncio.CancelledError:
        await live.session.cancel()
        return StopReason.CANCELLED


def _exit_code(reason: StopReason, denials: Sequence[object]) -> int:
    code = _EXIT_OF.get(reason, Exit.LIMIT)
    return Exit.DENIED if code == Exit.FINISHED and denials else code


async def _result(live: LiveSession, seen: _Seen, reason: StopReason, error: str) -> dict[str, Any]:
    """The document that `--json` prints."""
    denials = _denials(seen.events)
    code = _exit_code(reason, denials)
    names = {Exit.DENIED: "denied", Exit.INTERRUPTED: "interrupted"}
    stop = _stop(seen.events)
    return {
        "status": names.get(code, reason.value),
        "detail": error or ("" if stop is None else stop["detail"]),
        "session": live.session.session_id,
        "project": str(live.options.project),
        "message": _message(seen.events),
        "claims": explain(live.session.events).to_json()["claims"],
        "changes": await _changes(live),
        "denials": denials,
        "usage": _usage(seen.events),
    }


def _message(events: Sequence[tuple[str, Event]]) -> str:
    """The last word of the model: what it ended with, or its last answer."""
    own = [event for session_id, event in events if not session_id]
    stop = _stop(events)
    if stop is not None and stop["reason"] == StopReason.FINISHED.value and stop["detail"]:
        return str(stop["detail"])
    return next((str(e.data["text"]) for e in own[::-1] if e.kind is EventKind.ASSISTANT), "")


def _stop(events: Sequence[tuple[str, Event]]) -> Mapping[str, Any] | None:
    stops = [event.data for who, event in events if not who and event.kind is EventKind.STOP]
    return stops[-1] if stops else None


def _denials(events: Sequence[tuple[str, Event]]) -> list[dict[str, Any]]:
    """Every call that was refused, with the reason."""
    calls: dict[tuple[str, str], Mapping[str, Any]] = {}
    out: list[dict[str, Any]] = []
    for who, event in events:
        if event.kind is EventKind.TOOL_CALL:
            calls[who, event.data["id"]] = event.data
        elif event.kind is EventKind.PERMISSION and not event.data["allowed"]:
            call = calls.get((who, event.data["id"]), {})
            out.append(
                {
                    "tool": call.get("name"),
                    "arguments": call.get("arguments"),
                    "by": event.data["by"],
                    "reason": event.data["reason"],
                    **({"session": who} if who else {}),
                }
            )
    return out


_COUNTS = ("prompt_tokens", "cached_tokens", "sampled_tokens")


def _usage(events: Sequence[tuple[str, Event]]) -> dict[str, int]:
    """Tokens, turns and calls, sub-agents included."""
    answers = [e.data for _, e in events if e.kind in (EventKind.ASSISTANT, EventKind.SUMMARY)]
    counts = {name: sum(data[name] for data in answers) for name in _COUNTS}
    calls = sum(event.kind is EventKind.TOOL_CALL for _, event in events)
    return {**counts, "turns": len(answers), "tool_calls": calls}


async def _changes(live: LiveSession) -> list[dict[str, Any]]:
    """Files that are different now; none in a session that cannot change any."""
    if live.permissions.rights().readonly:
        return []
    try:
        return changed_files(await live.changes())
    except EtudeError:
        return []  # The message was not even said.


def changed_files(patch: str) -> list[dict[str, Any]]:
    """Path, added and removed lines of each file of a unified diff (None where it is no text)."""
    out: list[dict[str, Any]] = []
    inside = False
    for text in patch.split("\n"):
        if text.startswith("diff --git "):
            names = text.removeprefix("diff --git ")
            path = _unquoted(names[: len(names) // 2]).removeprefix("a/")
            out.append({"path": path, "added": 0, "removed": 0})
            inside = False
        elif text.startswith("@@"):
            inside = True
        elif text.startswith("Binary files ") and not inside:
            out[-1] |= {"added": None, "removed": None}
        elif inside and text[:1] in ("+", "-"):
            out[-1]["added" if text[0] == "+" else "removed"] += 1
    return out


def _unquoted(name: str) -> str:
    """A name as git writes it, read back."""
    if not name.startswith('"'):
        return name

    def char(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0].isdecimal():
            return chr(int(code, 8))
        return {"t": "\t", "n": "\n", "r": "\r"}.get(code, code)

    raw = re.sub(r"\\([0-7]{3}|.)", char, name[1:-1])
    return raw.encode("latin-1").decode("utf-8", "surrogateescape")


def _whole_prompt(prompt: str) -> str:
    """The message and what was piped in. `-` stands for the latter alone."""
    piped = _piped()
    text = piped if prompt == "-" else "\n\n".join(part for part in (prompt, piped) if part)
    if not text.strip():
        raise EtudeError("the message is empty; give -p TEXT, or pipe one in with -p -")
    return text


def _piped() -> str:
    """Standard input, when it is a file or a pipe. A pipe into which nobody writes is left alone
    after some seconds."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return ""
    if not select.select([0], [], [], _STDIN_SECONDS)[0]:
        _warn(f"nothing came on standard input for {_STDIN_SECONDS:g} s; going on without")
        return ""
    data = sys.stdin.buffer.read(_STDIN_BYTES + 1)
    if len(data) > _STDIN_BYTES:
        raise EtudeError("over 10 MiB came on standard input; name a file in the message instead")
    return data.decode("utf-8", "replace").strip("\n")


def _tell(form: Form, result: Mapping[str, Any], error: str) -> None:
    """The end of the run on standard output, what went wrong on standard error."""
    if form is Form.JSON:
        sys.stdout.write(_encoded(result, indent=2) + "\n")
    elif form is Form.STREAM:
        _print_line({"type": "result", **result})
    else:
        message = str(result["message"])
        shown = visible(message) if sys.stdout.isatty() else message
        if shown:
            sys.stdout.write(_safe(shown) + "\n")
        for denial in result.get("denials", ()):
            _warn(f"refused: {denial['tool']}: {denial['reason']}")
        if result["status"] not in ("finished", "denied"):
            _warn(f"{result['status']}: {result.get('detail') or 'see `etude explain last`'}")
    if error and form is not Form.TEXT:
        _warn(error)
    sys.stdout.flush()


def _print_line(value: Mapping[str, Any]) -> None:
    sys.stdout.write(_encoded(value) + "\n")
    sys.stdout.flush()


def _encoded(value: Mapping[str, Any], indent: int | None = None) -> str:
    """ASCII only, so that no terminal and no encoding gets in the way."""
    return json.dumps(value, indent=indent, default=str)


def _safe(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _warn(text: str) -> None:
    sys.stderr.write(f"etude: {visible(text)}\n")
