"""Which events show what the final message claims, or that nothing does."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from etude.agent.explain.claims import Claim, ClaimKind
from etude.agent.explain.commands import only_looks, parse
from etude.agent.explain.deeds import (
    Command,
    Deeds,
    FileUse,
    Outcome,
    Place,
    one_line,
    quoted,
    relative,
)

_SHOWN_EVENTS = 5


class Verdict(StrEnum):
    """What the record says of a claim."""

    SHOWN = "shown"
    PARTLY = "partly"
    CONTRADICTED = "contradicted"
    NOTHING = "nothing in the record shows this"


@dataclass(frozen=True)
class Evidence:
    """An event that bears on a claim, by turn and call; `what` says what happened there."""

    turn: int
    call_id: str
    what: str


@dataclass(frozen=True)
class Judged:
    """A claim with what the record says of it. `reason` is one sentence without full stop, or ''
    where the evidence speaks for itself."""

    claim: Claim
    verdict: Verdict
    evidence: tuple[Evidence, ...] = ()
    reason: str = ""


def judge(claim: Claim, deeds: Deeds) -> Judged:
    """What the record says of one claim."""
    return _JUDGES[claim.kind](claim, deeds)


def _at(place: Place, what: str) -> Evidence:
    return Evidence(place.turn, place.call_id, what)


def _of_command(command: Command) -> Evidence:
    told = command.told if command.tests is None else _test_words(command)
    return _at(command.place, f"{quoted(command.command)}: {told}")


def _test_words(command: Command) -> str:
    counted = f" ({command.passed} passed)" if command.passed is not None else ""
    if command.result is Outcome.UNKNOWN:
        return f"{command.told}, but that does not say how the tests came out"
    words = command.result.value
    code = f", {command.told}" if command.told.startswith("exit code") else ""
    return f"tests {words}{counted}{code}"


def _of_use(use: FileUse) -> Evidence:
    return _at(use.place, f"{'made' if use.made else 'changed'} {quoted(use.path)}")


def _after_last_change(deeds: Deeds, commands: Sequence[Command]) -> list[Command]:
    last = deeds.last_change()
    return [c for c in commands if last is None or c.place.order >= last.order]


def _last_run(
    claim: Claim, deeds: Deeds, runs: Sequence[Command], *, none: str, bad: str
) -> Judged | None:
    """Why the last run of some kind does not show a claim, or None when it does: it was well and
    came after the last change. `none` and `bad` are the reasons when there is none, or it was
    not."""
    if not runs:
        return Judged(claim, Verdict.NOTHING, reason=none)
    run = runs[-1]
    evidence = (_of_command(run),)
    if run.result in (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.NO_TESTS):
        return Judged(claim, Verdict.CONTRADICTED, evidence, bad)
    last = deeds.last_change()
    stale = last is not None and (run.place.order < last.order or run.changes_behind)
    if last is not None and stale:
        shown = (*evidence, _change_at(deeds, last))
        return Judged(claim, Verdict.NOTHING, shown, "the last run came before the last change")
    if run.result is Outcome.UNKNOWN:
        return Judged(claim, Verdict.NOTHING, evidence, "the run does not show how it came out")
    return None


def _change_at(deeds: Deeds, place: Place) -> Evidence:
    for use in deeds.changed:
        if use.place == place:
            return _of_use(use)
    for command in deeds.commands:
        if command.place == place:
            return _at(place, f"{quoted(command.command)} may have changed files")
    return _at(place, "a sub-agent that could change files")


def _tests_pass(claim: Claim, deeds: Deeds) -> Judged:
    """The last run after the last change counts, and every other run after it must be well too."""
    runs = [c for c in deeds.commands if c.tests is not None and c.outcome is not Outcome.NOT_RUN]
    bad = "the last run of tests did not pass"
    objection = _last_run(claim, deeds, runs, none="no tests were run", bad=bad)
    if objection is not None:
        return objection
    fresh = _after_last_change(deeds, runs)
    # A later, narrower run does not undo an earlier failure.
    failed = [c for c in fresh if c.result is not Outcome.PASSED and not _repeated(c, fresh)]
    evidence = tuple(_of_command(c) for c in [*failed, *fresh[-2:]][:_SHOWN_EVENTS])
    if failed:
        reason = "another run after the last change did not pass"
        return Judged(claim, Verdict.CONTRADICTED, evidence, reason)
    counts = [c.passed for c in fresh if c.passed is not None]
    if claim.count is not None and counts and claim.count not in counts:
        reason = f"{counts[-1]} passed by the output, {claim.count} by the message"
        return Judged(claim, Verdict.CONTRADICTED, evidence, reason)
    if claim.whole and all(c.tests is not None and c.tests.narrow for c in fresh):
        return Judged(claim, Verdict.PARTLY, evidence, "only some of the tests were asked for")
    return Judged(claim, Verdict.SHOWN, evidence)


def _repeated(run: Command, runs: Sequence[Command]) -> bool:
    """Whether the same command, or one that runs all tests, passed later."""
    return any(
        later.place.order > run.place.order
        and later.result is Outcome.PASSED
        and (later.command == run.command or (later.tests is not None and not later.tests.narrow))
        for later in runs
    )


def _checks_pass(claim: Claim, deeds: Deeds) -> Judged:
    words = claim.subject.lower()
    wanted = {
        kind
        for kind, names in (
            ("lint", ("lint", "ruff", "flake8", "pylint", "eslint", "clippy", "warning", "style")),
            ("types", ("type", "mypy", "pyright", "tsc")),
            ("build", ("build", "compil")),
        )
        if any(name in words for name in names)
    }
    named = [
        n for n in ("ruff", "flake8", "pylint", "eslint", "mypy", "pyright", "tsc") if n in words
    ]
    runs = [
        c
        for c in deeds.commands
        if c.outcome is not Outcome.NOT_RUN
        and (c.check is not None or (c.tests is not None and not wanted))
        and (not wanted or c.check in wanted)
        and (not named or any(name in c.command for name in named))
    ]
    none, bad = "nothing of this kind was run", "the last run found something"
    objection = _last_run(claim, deeds, runs, none=none, bad=bad)
    return objection or Judged(claim, Verdict.SHOWN, (_of_command(runs[-1]),))


def _same_file(path: str, subject: str) -> bool:
    """Whether a message's name of a file fits a path of the record."""
    name = relative(subject.removeprefix("./").rstrip("/"))
    path = path.removeprefix("./")
    return path == name or path.endswith(f"/{name}") or path.startswith(f"{name}/")


def _commands_on(deeds: Deeds, subject: str, *, changing: bool) -> list[Command]:
    """Commands that ended well and name the file."""
    return [
        c
        for c in deeds.commands
        if c.outcome is Outcome.PASSED
        and (c.changes or not changing)
        and any(
            _same_file(relative(word), subject)
            for step in parse(c.command).steps
            for word in (*step.words, *step.writes)
            if "/" in word or "." in word or word == subject
        )
    ]


def _changed(claim: Claim, deeds: Deeds) -> Judged:
    uses = [use for use in deeds.changed if _same_file(use.path, claim.subject)]
    commands = _commands_on(deeds, claim.subject, changing=True)
    evidence = tuple(_of_use(use) for use in uses) + tuple(_of_command(c) for c in commands)
    if not evidence:
        return _no_use(claim, deeds)
    last = max([u.place.order for u in uses] + [c.place.order for c in commands])
    evidence = evidence[-_SHOWN_EVENTS:]
    undone = [c for c in deeds.commands if c.undoes and c.place.order > last]
    undone = [c for c in undone if c.outcome is not Outcome.NOT_RUN]
    if undone:
        shown = (*evidence, _of_command(undone[-1]))
        return Judged(claim, Verdict.PARTLY, shown, "a later command may have undone it")
    if claim.kind is ClaimKind.MADE and not commands and not any(use.made for use in uses):
        return Judged(claim, Verdict.PARTLY, evidence, "it was there before and was changed")
    return Judged(claim, Verdict.SHOWN, evidence)


def _no_use(claim: Claim, deeds: Deeds) -> Judged:
    """Nothing changed the file; say so, and whether it was tried."""
    tried = [a for a in deeds.failed if _same_file(a.path, claim.subject)]
    if tried:
        shown = tuple(_at(a.place, f"{quoted(a.path)}: {a.error}") for a in tried)
        return Judged(
            claim, Verdict.CONTRADICTED, shown[-_SHOWN_EVENTS:], "every attempt on it failed"
        )
    handed = tuple(_at(place, "a sub-agent that could change files") for place in deeds.delegated)
    reason = "a sub-agent may have done it; see its own record" if handed else "no call changed it"
    return Judged(claim, Verdict.NOTHING, handed[-_SHOWN_EVENTS:], reason)


def _removed(claim: Claim, deeds: Deeds) -> Judged:
    commands = _commands_on(deeds, claim.subject, changing=True)
    if not commands:
        return _no_use(claim, deeds)
    return Judged(claim, Verdict.SHOWN, tuple(_of_command(c) for c in commands[-_SHOWN_EVENTS:]))


def _read(claim: Claim, deeds: Deeds) -> Judged:
    uses = [use for use in deeds.read if _same_file(use.path, claim.subject)]
    commands = _commands_on(deeds, claim.subject, changing=False)
    evidence = tuple(_at(use.place, f"read {quoted(use.path)}") for use in uses)
    evidence += tuple(_of_command(c) for c in commands)
    if evidence:
        return Judged(claim, Verdict.SHOWN, evidence[-_SHOWN_EVENTS:])
    return Judged(claim, Verdict.NOTHING, reason="no call read it")


def _done(claim: Claim, deeds: Deeds) -> Judged:
    """Something was fixed or built: a change that names it, and tests that pass after it. A name
    may also be that of a file without a suffix."""
    subject = claim.subject
    if subject and any(use.path.split("/")[-1] == subject for use in deeds.changed):
        return _changed(claim, deeds)
    name = posixpath.basename(claim.subject.replace(".", "/"))
    uses = [use for use in deeds.changed if not name or name in use.text or name in use.path]
    commands = [
        c
        for c in deeds.commands
        if c.changes and c.outcome is Outcome.PASSED and (not name or name in c.command)
    ]
    if not uses and not commands:
        if deeds.delegated:
            return _no_use(claim, deeds)
        what = f"no change names {quoted(name)}" if name else "no file was changed"
        return Judged(claim, Verdict.NOTHING, reason=what)
    evidence = tuple(_of_use(use) for use in uses) + tuple(_of_command(c) for c in commands)
    tests = _tests_pass(claim, deeds)
    shown = (*evidence[-_SHOWN_EVENTS + 1 :], *tests.evidence[:1])
    if tests.verdict is Verdict.SHOWN:
        return Judged(claim, Verdict.SHOWN, shown)
    return Judged(claim, Verdict.PARTLY, shown, f"it was changed, but {tests.reason}")


def _ran(claim: Claim, deeds: Deeds) -> Judged:
    if claim.subject == "tests":
        commands = [c for c in deeds.commands if c.tests is not None]
    else:
        wanted = " ".join(claim.subject.split())
        commands = [c for c in deeds.commands if wanted in " ".join(c.command.split())]
    ran = [c for c in commands if c.outcome is not Outcome.NOT_RUN]
    if ran:
        return Judged(claim, Verdict.SHOWN, tuple(_of_command(c) for c in ran[-2:]))
    if commands:
        shown = (_of_command(commands[-1]),)
        return Judged(claim, Verdict.CONTRADICTED, shown, "it was asked for and did not run")
    return Judged(claim, Verdict.NOTHING, reason="no such command was run")


def _verified(claim: Claim, deeds: Deeds) -> Judged:
    """Something that could have shown a fault was run after the last change, and ended well."""
    ran = [c for c in deeds.commands if c.outcome is not Outcome.NOT_RUN]
    fresh = [c for c in _after_last_change(deeds, ran) if not c.changes]
    last_tests = [c for c in fresh if c.tests is not None or c.check is not None]
    shown = (last_tests or fresh)[-1:]
    if not shown:
        return Judged(claim, Verdict.NOTHING, reason="nothing was run after the last change")
    command = shown[0]
    well = command.result if command.tests is not None or command.check else command.outcome
    evidence = (_of_command(command),)
    if well is Outcome.PASSED and last_tests:
        return Judged(claim, Verdict.SHOWN, evidence)
    if well is Outcome.PASSED:
        reason = "a command ended well; whether it checks this is not known"
        return Judged(claim, Verdict.PARTLY, evidence, reason)
    if well is Outcome.UNKNOWN:
        return Judged(claim, Verdict.NOTHING, evidence, "the run does not show how it came out")
    return Judged(claim, Verdict.CONTRADICTED, evidence, "what was run did not end well")


def _committed(claim: Claim, deeds: Deeds) -> Judged:
    word = "push" if "pushed" in claim.sentence.lower() else "commit"
    commands = [c for c in deeds.commands if f"git {word}" in one_line(c.command, 10_000)]
    well = [c for c in commands if c.outcome is Outcome.PASSED]
    if well:
        return Judged(claim, Verdict.SHOWN, (_of_command(well[-1]),))
    if commands:
        return Judged(
            claim, Verdict.CONTRADICTED, (_of_command(commands[-1]),), "it did not succeed"
        )
    return Judged(claim, Verdict.NOTHING, reason=f"no `git {word}` was run")


def _unchanged(claim: Claim, deeds: Deeds) -> Judged:
    """That nothing was changed is shown where every command surely only read."""
    surely = [c for c in deeds.changing_commands() if c.outcome is Outcome.PASSED]
    evidence = [_of_use(use) for use in deeds.changed]
    evidence += [_at(c.place, f"{quoted(c.command)} may have changed files") for c in surely]
    if evidence:
        reason = "files were changed" if deeds.changed else "a command that writes was run"
        shown = tuple(evidence[:_SHOWN_EVENTS])
        return Judged(claim, Verdict.CONTRADICTED, shown, reason)
    ran = [c for c in deeds.commands if c.outcome is not Outcome.NOT_RUN]
    open_ends = [_of_command(c) for c in ran if not only_looks(c.command)]
    open_ends += [_at(place, "a sub-agent that could change files") for place in deeds.delegated]
    if open_ends:
        reason = "no call is known to have changed a file, but not all of them only read"
        return Judged(claim, Verdict.PARTLY, tuple(open_ends[:_SHOWN_EVENTS]), reason)
    return Judged(claim, Verdict.SHOWN, reason="no call changed a file")


_JUDGES: dict[ClaimKind, Callable[[Claim, Deeds], Judged]] = {
    ClaimKind.TESTS_PASS: _tests_pass,
    ClaimKind.CHECKS_PASS: _checks_pass,
    ClaimKind.MADE: _changed,
    ClaimKind.CHANGED: _changed,
    ClaimKind.REMOVED: _removed,
    ClaimKind.READ: _read,
    ClaimKind.DONE: _done,
    ClaimKind.RAN: _ran,
    ClaimKind.VERIFIED: _verified,
    ClaimKind.COMMITTED: _committed,
    ClaimKind.UNCHANGED: _unchanged,
}
