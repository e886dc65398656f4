"""The gate of a person's session: rules, modes, questions."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from etude.agent.permissions.approvals import Approvals, Brought
from etude.agent.permissions.bash import analyse
from etude.agent.permissions.gate import Permission, Request
from etude.agent.permissions.hidden import HiddenFiles
from etude.agent.permissions.hooks import Hooks
from etude.agent.permissions.loading import load
from etude.agent.permissions.modes import MODE_NOTES, Mode
from etude.agent.permissions.reading import (
    in_another_folder,
    moves,
    only_reads,
    reads_only,
)
from etude.agent.permissions.rules import (
    READING,
    WRITING,
    Kind,
    PathRule,
    Placed,
    ShellRule,
    Touch,
    parse_rule,
    suggested,
)
from etude.agent.permissions.settings import remember, user_settings_path
from etude.agent.tools.files import guest_path
from etude.agent.tools.tool import Effect, ToolResult
from etude.sandbox.protocol import WORKSPACE_ROOT, Rights

_PLAIN_SHELL = frozenset({"command", "timeout", "cwd", "background"})


BUILT_IN = (Placed(Kind.ASK, parse_rule("edit(.etude/**)"), "built in"),)
"""A session does not change its own rules unasked."""


class Remember(StrEnum):
    """How long a person's answer counts."""

    ONCE = "once"
    SESSION = "session"
    ALWAYS = "always"


@dataclass(frozen=True)
class Question:
    """What a person is asked. `why` says what made it a question; `rules` are those that would
    answer it in future, empty when no rule can (then ALWAYS is not to be offered)."""

    request: Request
    why: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """A person's answer. `reason` is told to the model. `rules` are the person's own wording of
    what to remember; None takes the question's."""

    allow: bool
    remember: Remember = Remember.ONCE
    reason: str = ""
    rules: tuple[str, ...] | None = None


Asker = Callable[[Question], Awaitable[Decision]]
BeforeChange = Callable[[Request], Awaitable[None]]


class _Answer(StrEnum):
    ALLOW = "allow"
    ASK = "ask"
    REFUSE = "refuse"


@dataclass(frozen=True)
class _Verdict:
    answer: _Answer
    by: str
    why: str = ""


@dataclass(eq=False)
class Permissions:
    """Implements `Gate` for one project.

    `asker` asks a person, one question at a time; without one, what would be asked is refused
    with the rule that would allow it. `before_change` is awaited before each allowed call that may
    change files (a checkpoint). `settings` is the person's own file, for what is to be remembered.
    """

    project: Path
    rules: Sequence[Placed] = ()
    mode: Mode = Mode.ASK
    asker: Asker | None = None
    hooks: Hooks | None = None
    before_change: BeforeChange | None = None
    settings: Path = field(default_factory=user_settings_path)
    fetch_hosts: Sequence[str] = ()
    """Hosts that the person named for `web_fetch` when starting the session. In auto mode, and
    where nobody can be asked, they need no rule; `*` alone names none."""

    pending: Sequence[Brought] = ()
    failures: list[str] = field(default_factory=list[str])
    """What hooks failed at and nobody has been told yet."""

    @classmethod
    def load(
        cls,
        project: Path,
        mode: Mode | None = None,
        *,
        asker: Asker | None = None,
        before_change: BeforeChange | None = None,
        approvals: Approvals | None = None,
        settings: Path | None = None,
    ) -> Permissions:
        """What the person's file and the project's file say. `mode` None: the file's. `pending`
        is then what the project brought and nobody approved. Raises EtudeError for a file or a
        rule that is wrong."""
        loaded = load(project, approvals or Approvals(), settings)
        return cls(
            project.resolve(),
            loaded.rules,
            mode or loaded.mode,
            asker=asker,
            hooks=loaded.hooks,
            before_change=before_change,
            settings=settings or user_settings_path(),
            pending=loaded.pending,
        )

    def __post_init__(self) -> None:
        self._rules = [*BUILT_IN, *self.rules]
        self._exact: dict[str, bool] = {}
        self._run_outside: list[str] = [] if self.hooks is None else [*self.hooks.files]
        self._asking = asyncio.Lock()
        self._find_hidden()

    def _find_hidden(self) -> None:
        denied = [p.rule for p in self._rules if p.kind is Kind.DENY]
        files = [rule for rule in denied if isinstance(rule, PathRule) and rule.tool == "read"]
        self._hidden = HiddenFiles(self.project, files)
        kept = [r for r in denied if isinstance(r, PathRule) and r.tool in ("edit", "write")]
        self._protected = HiddenFiles(self.project, kept, self._run_outside)

    def protect(self, files: Sequence[str]) -> None:
        """Let no guest write these files of the project (relative paths): they run outside, as the
        programs of tool servers, and hooks' files are kept anyway."""
        self._run_outside += files
        self._find_hidden()

    def set_mode(self, mode: Mode) -> str:
        """Change the mode, of running sub-agents too. Returns what to tell the model."""
        self.mode = mode
        return self.mode_note()

    def mode_note(self) -> str:
        """What the model is to be told of the present mode (`Session.note`)."""
        return MODE_NOTES[self.mode]

    def add(self, kind: Kind, text: str, source: str) -> None:
        """Add a rule for the rest of the session. Raises EtudeError for a wrong one."""
        self._rules.append(Placed(kind, parse_rule(text), source))
        self._find_hidden()

    def placed(self) -> tuple[Placed, ...]:
        """All rules, for showing them."""
        return tuple(self._rules)

    def rights(self) -> Rights:
        """See `Gate.rights`. Hidden is what exists now and a `deny read(...)` names; git's own
        store is not looked into, so what was ever committed stays in the history."""
        return Rights(self.mode.readonly, self._hidden.now(), self._protected.now())

    def narrowed(self, *, readonly: bool) -> Narrowed:
        """See `Gate.narrowed`."""
        return Narrowed(self, readonly)

    async def check(self, request: Request) -> Permission:
        """See `Gate.check`. Waits for a person without a deadline; being cancelled ends it."""
        verdict = self._verdict(request)
        if verdict.answer is not _Answer.REFUSE and self.hooks is not None:
            outcome = await self.hooks.before_tool(request)
            self.failures.extend(outcome.failures)
            if outcome.refusal is not None:
                return Permission(False, "hook", outcome.refusal)
        if verdict.answer is _Answer.ASK:
            async with self._asking:
                # Another question's answer, or a new mode, may have decided it meanwhile.
                verdict = self._verdict(request)
                if verdict.answer is _Answer.ASK:
                    verdict = await self._ask(request, verdict)
        if verdict.answer is not _Answer.ALLOW:
            return Permission(False, verdict.by, verdict.why)
        # What is taken to only read gets no question and no checkpoint: the mounts see to it.
        readonly = request.tool == "shell" and reads_only(request.subject)
        if self.before_change is not None and not readonly and self._changes(request):
            await self.before_change(request)
        return Permission(True, verdict.by, verdict.why, readonly)

    async def ran(self, request: Request, result: ToolResult) -> None:
        """See `Gate.ran`: tells the hooks."""
        if self.hooks is not None:
            outcome = await self.hooks.after_tool(request, result)
            self.failures.extend(outcome.failures)

    def _changes(self, request: Request) -> bool:
        """Whether files may be different afterwards."""
        if self.mode.readonly:
            return False
        if request.effect is Effect.EXECUTE:
            return True
        return request.effect is Effect.WRITE or request.tool.startswith("mcp__")

    async def _ask(self, request: Request, verdict: _Verdict) -> _Verdict:
        rules = self._missing(request) if verdict.by == "mode" else ()
        if self.asker is None:
            return _Verdict(_Answer.REFUSE, verdict.by, self._nobody(verdict, rules))
        decision = await self.asker(Question(request, verdict.why, rules))
        self._keep(request, decision, rules)
        answer = _Answer.ALLOW if decision.allow else _Answer.REFUSE
        reason = decision.reason or ("" if decision.allow else "the person said no")
        return _Verdict(answer, f"person ({decision.remember.value})", reason)

    def _missing(self, request: Request) -> tuple[str, ...]:
        """The rules that would allow a call and are not there yet."""
        known = {placed.rule.text for placed in self._rules if placed.kind is Kind.ALLOW}
        if request.tool == "shell" and not self._where_expected(request):
            return ()
        return tuple(rule for rule in suggested(request) if rule not in known)

    def _nobody(self, verdict: _Verdict, rules: Sequence[str]) -> str:
        """Why a call is refused where nobody can be asked (headless)."""
        text = f"{verdict.why}, and nobody can be asked here"
        if rules:
            names = " and ".join(f"`{rule}`" for rule in rules)
            text += f"; the rule {names} under `allow` in {self.settings} would allow it"
        return text

    def _keep(self, request: Request, decision: Decision, rules: Sequence[str]) -> None:
        """Remember an answer as long as the person said."""
        if decision.remember is Remember.ONCE:
            return
        kept = rules if decision.rules is None else decision.rules
        if not kept:
            self._exact[_exactly(request)] = decision.allow
            return
        kind = Kind.ALLOW if decision.allow else Kind.DENY
        for rule in kept:
            self.add(kind, rule, f"answer of this session ({decision.remember.value})")
            if decision.remember is Remember.ALWAYS:
                word = {kind.value: rule}
                remember(
                    self.settings, self.project, allow=word.get("allow"), deny=word.get("deny")
                )

    def _verdict(self, request: Request) -> _Verdict:
        """What rules and mode say of a call."""
        paths = self._paths(request)
        denied = self._touched(Kind.DENY, request, paths)
        if denied is not None and denied[1] is Touch.YES:
            return _Verdict(_Answer.REFUSE, str(denied[0]), f"the rule {denied[0]} forbids it")
        if self.mode.readonly and request.effect is Effect.WRITE:
            why = f"the session is in {self.mode.value} mode and the workspace is read-only"
            return _Verdict(_Answer.REFUSE, "mode", why)
        exact = self._exact.get(_exactly(request))
        if exact is False:
            return _Verdict(_Answer.REFUSE, "person (session)", "the person said no")
        if exact is True:
            return _Verdict(_Answer.ALLOW, "person (session)")
        asked = denied or self._touched(Kind.ASK, request, paths)
        if asked is not None:
            placed, touch = asked
            how = "wants a question" if touch is Touch.YES else "may be meant"
            return _Verdict(_Answer.ASK, str(placed), f"the rule {placed} {how}")
        return self._allowed(request, paths) or self._by_mode(request)

    def _touched(
        self, kind: Kind, request: Request, paths: Sequence[str]
    ) -> tuple[Placed, Touch] | None:
        """The rule of a kind that applies most surely."""
        best: tuple[Placed, Touch] | None = None
        for placed in self._rules:
            if placed.kind is kind:
                touch = placed.rule.touches(request, paths)
                if touch is Touch.YES:
                    return placed, touch
                if touch is Touch.MAYBE and best is None:
                    best = placed, touch
        return best

    def _allowed(self, request: Request, paths: Sequence[str]) -> _Verdict | None:
        """Whether rules allow the whole of a call."""
        allowing = [placed for placed in self._rules if placed.kind is Kind.ALLOW]
        for placed in allowing:
            by_words = isinstance(placed.rule, ShellRule)
            if not by_words and placed.rule.covers(request, paths):
                return _Verdict(_Answer.ALLOW, str(placed))
        return self._allowed_command(request, allowing) if request.tool == "shell" else None

    def _allowed_command(self, request: Request, allowing: Sequence[Placed]) -> _Verdict | None:
        """A command line is allowed if each of its simple commands only reads or is covered by a
        rule, and there is nothing else in it."""
        script = analyse(request.subject)
        if script.objection is not None or set(request.arguments) - _PLAIN_SHELL:
            return None
        elsewhere = not self._where_expected(request) or any(map(moves, script.commands))
        if elsewhere:
            return _Verdict(_Answer.ALLOW, "") if in_another_folder(script.commands) else None
        by = ""
        for command in script.commands:
            if only_reads(command):
                continue
            covering = [
                placed
                for placed in allowing
                if isinstance(placed.rule, ShellRule) and placed.rule.covers_command(command)
            ]
            if not covering:
                return None
            by = str(covering[0])
        return _Verdict(_Answer.ALLOW, by)

    @staticmethod
    def _where_expected(request: Request) -> bool:
        """Whether a command starts in the project's root, which is what rules are written for."""
        cwd = request.arguments.get("cwd")
        return cwd is None or guest_path(str(cwd)) == WORKSPACE_ROOT

    def _by_mode(self, request: Request) -> _Verdict:
        """What the mode says where no rule does."""
        outside = request.effect is Effect.NETWORK or request.tool.startswith("mcp__")
        if outside and self._named_by_person(request):
            return _Verdict(_Answer.ALLOW, "--allow-host")
        if outside:
            return _Verdict(_Answer.ASK, "mode", f"{request.tool} reaches outside the sandbox")
        if request.effect in (Effect.TALK, Effect.READ, Effect.DELEGATE):
            return _Verdict(_Answer.ALLOW, "")
        if self.mode is Mode.ASK:
            what = "changing files" if request.effect is Effect.WRITE else _what_runs(request)
            return _Verdict(_Answer.ASK, "mode", f"in ask mode {what} needs a person's yes")
        return _Verdict(_Answer.ALLOW, f"{self.mode.value} mode")

    def _named_by_person(self, request: Request) -> bool:
        """Whether a page's host is one that the person named, and no question is due."""
        hosts = tuple(host for host in self.fetch_hosts if host.partition(":")[0] != "*")
        if request.tool != "web_fetch" or not hosts:
            return False
        if self.mode is not Mode.AUTO and self.asker is not None:
            return False
        # Loads the HTTP client, which the tool itself needs; other sessions do without.
        from etude.agent.tools.web import FetchError, FetchSettings, checked

        try:
            checked(request.subject, FetchSettings(hosts))
        except FetchError:
            return False
        return True

    def _paths(self, request: Request) -> tuple[str, ...]:
        """All absolute names inside the guest of the file that a call is about: as it is written,
        and with the project's links followed."""
        if request.tool not in (*READING, *WRITING) and request.effect not in (
            Effect.READ,
            Effect.WRITE,
        ):
            return ()
        # Two slashes at the start are one to the guest, but not to `normpath`.
        written = "/" + guest_path(request.subject).lstrip("/")
        inside = posixpath.relpath(written, WORKSPACE_ROOT)
        if inside == ".." or inside.startswith("../"):
            return (written,)
        root = os.path.realpath(self.project)
        real = os.path.realpath(os.path.join(root, inside))  # noqa: PTH118 (links are the point)
        if real == root or real.startswith(f"{root}/"):
            real = posixpath.join(WORKSPACE_ROOT, os.path.relpath(real, root))
        return tuple(dict.fromkeys((written, posixpath.normpath(real))))


def _what_runs(request: Request) -> str:
    if request.tool != "shell":
        return request.tool
    objection = analyse(request.subject).objection
    return "a command that does more than read" + (f" ({objection})" if objection else "")


def _exactly(request: Request) -> str:
    return repr((request.tool, request.subject, sorted(request.arguments.items())))


@dataclass(frozen=True, eq=False)
class Narrowed:
    """A sub-agent's gate: a live view of its parent's, never more than that at any moment."""

    parent: Permissions | Narrowed
    readonly: bool

    def rights(self) -> Rights:
        """See `Gate.rights`."""
        rights = self.parent.rights()
        return replace(rights, readonly=rights.readonly or self.readonly)

    async def check(self, request: Request) -> Permission:
        """See `Gate.check`."""
        if self.readonly and request.effect is Effect.WRITE:
            return Permission(False, "mode", "this sub-agent may only read")
        return await self.parent.check(request)

    async def ran(self, request: Request, result: ToolResult) -> None:
        """See `Gate.ran`."""
        await self.parent.ran(request, result)

    def narrowed(self, *, readonly: bool) -> Narrowed:
        """See `Gate.narrowed`."""
        return Narrowed(self, readonly)
