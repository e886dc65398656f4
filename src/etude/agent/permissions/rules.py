"""Rules: `shell(pytest *)`, `edit(src/**)`, `read(**/.env)`, `web_fetch(docs.python.org)`,
`mcp__server__tool`, or just the name of a tool.

A rule that allows is read narrowly: it covers a call only if all of the call is what the rule
says. A rule that asks or denies is read widely: with further arguments, behind `env` or `timeout`,
inside `bash -c`, under a folder that it names; where it cannot be seen whether it applies, the
answer is *maybe*, and a person is asked. A denial by text is no fence for commands: what no
command may read is hidden by mounts (`Permissions.rights`).
"""

from __future__ import annotations

import functools
import posixpath
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from urllib.parse import urlsplit

from etude.agent.permissions.bash import Simple, analyse
from etude.agent.permissions.gate import Request
from etude.agent.permissions.reading import only_reads
from etude.agent.tools.files import guest_path
from etude.agent.tools.tool import Effect
from etude.errors import EtudeError
from etude.sandbox.protocol import WORKSPACE_ROOT

READING = ("read", "grep", "glob", "semantic_search")
WRITING = ("edit", "write")
_OTHERS = ("shell", "job", "todo", "ask", "task", "skill", "web_fetch", "finish")
TOOLS = (*READING, *WRITING, *_OTHERS)
"""The names a rule may have, beside those of MCP tools."""
_MCP = "mcp__"
_RUNNERS = """
builtin busybox chroot command doas env exec find flock ionice nice nohup parallel setsid stdbuf
strace sudo taskset time timeout watch xargs
"""
_WRAPPERS = frozenset(_RUNNERS.split())
_SHELLS = frozenset({"ash", "bash", "dash", "eval", "ksh", "sh", "zsh"})
_FEEDS = frozenset({"parallel", "xargs"})
_DEEPEST = 3


class Kind(StrEnum):
    """What a rule does with a call; deny beats ask beats allow."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


class Touch(IntEnum):
    """Whether a rule that asks or denies applies."""

    NO = 0
    MAYBE = 1
    YES = 2


@dataclass(frozen=True)
class Rule(ABC):
    """One rule; `text` is as the person wrote it."""

    text: str
    tool: str

    def names(self, tool: str) -> bool:
        """Whether the rule is about a tool of this name."""
        return re.fullmatch(_name_regex(self.tool), tool) is not None

    @abstractmethod
    def covers(self, request: Request, paths: Sequence[str]) -> bool:
        """Read narrowly, for allowing. `paths` are all absolute names, inside the guest, of the
        file that the call is about."""

    @abstractmethod
    def touches(self, request: Request, paths: Sequence[str]) -> Touch:
        """Read widely, for asking and denying."""


@dataclass(frozen=True)
class ToolRule(Rule):
    """Every call of a tool, or of an MCP server's (`mcp__server`)."""

    def covers(self, request: Request, paths: Sequence[str]) -> bool:
        """See `Rule.covers`."""
        return self.names(request.tool)

    def touches(self, request: Request, paths: Sequence[str]) -> Touch:
        """See `Rule.touches`."""
        return Touch.YES if self.names(request.tool) else Touch.NO


@dataclass(frozen=True)
class ShellRule(Rule):
    """Commands by their words. In an unquoted word `*` stands for anything; a last word `*` stands
    for any further arguments, none included."""

    words: tuple[re.Pattern[str], ...]
    open_end: bool

    def covers(self, request: Request, paths: Sequence[str]) -> bool:
        """One simple command and nothing else; see `covers_command` for several."""
        script = analyse(request.subject)
        return (
            request.tool == self.tool
            and script.objection is None
            and all(self.covers_command(command) for command in script.commands)
        )

    def covers_command(self, command: Simple) -> bool:
        """Whether this simple command is what the rule says. What it reads from another is not
        said by any rule, nor is what the shell puts in place of a pattern; only `*` at the end
        takes the latter."""
        fixed = command.words[: len(self.words)]
        return (
            not command.piped
            and len(fixed) == len(self.words)
            and (self.open_end or len(command.words) == len(self.words))
            and all(word.literal for word in fixed)
            and all(p.fullmatch(w.text) for p, w in zip(self.words, fixed, strict=True))
        )

    def touches(self, request: Request, paths: Sequence[str]) -> Touch:
        """See `Rule.touches`."""
        return self._in_text(request.subject, 0) if request.tool == self.tool else Touch.NO

    def _in_text(self, text: str, depth: int) -> Touch:
        script = analyse(text)
        found = Touch.MAYBE if script.unclear or depth > _DEEPEST else Touch.NO
        if depth > _DEEPEST:
            return found
        return max((found, *(self._in_command(command, depth) for command in script.commands)))

    def _in_command(self, command: Simple, depth: int) -> Touch:
        words = command.words
        if not words[0].literal:
            return Touch.MAYBE
        names = [posixpath.basename(word.text) if word.literal else None for word in words]
        wrapped = names[0] in _WRAPPERS
        starts = range(len(words)) if wrapped else range(1)
        found = max(self._from(command, names, start) for start in starts)
        if names[0] in _SHELLS or (wrapped and any(name in _SHELLS for name in names)):
            arguments = [word.text for word in words[1:]]
            inner = [" ".join(arguments)] if names[0] == "eval" else arguments
            found = max((found, *(self._in_text(text, depth + 1) for text in inner)))
            found = max(found, Touch.NO if command.literal else Touch.MAYBE)
        if names[0] in _FEEDS and any(
            name is not None and self.words[:1] and self.words[0].fullmatch(name) for name in names
        ):
            found = max(found, Touch.MAYBE)  # What follows comes from standard input.
        return found

    def _from(self, command: Simple, names: Sequence[str | None], start: int) -> Touch:
        """Whether the rule's words stand, in order, in the words from `start` on: options such as
        `git -C folder push` may stand between."""
        if not self.words:
            return Touch.YES
        name = names[start]
        first = command.words[start]
        if name is None:
            return Touch.MAYBE
        if not (self.words[0].fullmatch(name) or self.words[0].fullmatch(first.text)):
            return Touch.NO
        rest = command.words[start + 1 :]
        at = 0
        for pattern in self.words[1:]:
            while at < len(rest) and not (
                rest[at].literal and pattern.fullmatch(rest[at].text) is not None
            ):
                at += 1
            if at == len(rest):
                return Touch.NO if all(word.literal for word in rest) else Touch.MAYBE
            at += 1
        return Touch.YES


@dataclass(frozen=True)
class PathRule(Rule):
    """Files by path, from the project's root: `*` within a name, `**` across folders, `\\` before
    a character that is meant as such. `read` is about every tool that shows files and, when it
    denies, about those that change them too; `edit` about every tool that changes files."""

    pattern: str

    def _tools(self) -> tuple[str, ...]:
        return {"read": READING, "edit": WRITING}.get(self.tool, (self.tool,))

    def covers(self, request: Request, paths: Sequence[str]) -> bool:
        """See `Rule.covers`."""
        regex = path_regex(self.pattern)
        return request.tool in self._tools() and all(regex.fullmatch(path) for path in paths)

    def touches(self, request: Request, paths: Sequence[str]) -> Touch:
        """See `Rule.touches`."""
        concerned = request.tool in self._tools()
        if self.tool == "read":
            concerned = concerned or request.effect in (Effect.READ, Effect.WRITE)
        if self.tool == "edit":
            concerned = concerned or request.effect is Effect.WRITE
        return Touch.YES if concerned and any(map(self.holds, paths)) else Touch.NO

    @property
    def regex(self) -> re.Pattern[str]:
        """What is denied, without what lies below it."""
        return path_regex(self.pattern.removesuffix("/**") or "/")

    def holds(self, path: str) -> bool:
        """Whether the pattern names this path or a folder above it. `folder/**` names the folder
        itself too: what is denied there shall not be listed either."""
        regex = self.regex
        while path not in ("/", "//", "", WORKSPACE_ROOT):
            if regex.fullmatch(path):
                return True
            path = posixpath.dirname(path)
        return regex.fullmatch(path) is not None


@dataclass(frozen=True)
class HostRule(Rule):
    """Addresses by host; `*.python.org` is every host below it."""

    host: str

    def covers(self, request: Request, paths: Sequence[str]) -> bool:
        """See `Rule.covers`. An address in which programs may see different hosts has none."""
        plain = re.fullmatch(
            r"https?://([A-Za-z0-9.-]+)(?::\d{1,5})?(?:[/?#][!-\[\]-~]*)?", request.subject
        )
        return request.tool == self.tool and plain is not None and self._is(plain.group(1))

    def touches(self, request: Request, paths: Sequence[str]) -> Touch:
        """See `Rule.touches`."""
        if request.tool != self.tool:
            return Touch.NO
        try:
            host = urlsplit(request.subject).hostname or ""
        except ValueError:
            return Touch.MAYBE
        return Touch.YES if self._is(host) else Touch.NO

    def _is(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return host == self.host


@dataclass(frozen=True)
class Placed:
    """A rule, what it does and where it stands."""

    kind: Kind
    rule: Rule
    source: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.rule.text} ({self.source})"


def parse_rule(text: str) -> Rule:
    """Read a rule. Raises EtudeError that says what is wrong with it."""
    match = re.fullmatch(r"\s*([A-Za-z0-9_*-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise _bad(text, "it must be a tool's name, or a name and a pattern: shell(git status)")
    name, pattern = match.group(1), match.group(2)
    if not name.startswith(_MCP) and name not in TOOLS:
        raise _bad(text, f"there is no tool {name!r}; the names are {', '.join(TOOLS)}, {_MCP}…")
    if pattern is None:
        return ToolRule(text, name)
    if not pattern.strip():
        raise _bad(text, "its pattern is empty; write just the name for every call")
    if name == "shell":
        return _shell_rule(text, name, pattern)
    if name == "web_fetch":
        if not re.fullmatch(r"(?:\*\.)?[A-Za-z0-9.-]+", pattern.strip()):
            raise _bad(text, "a host is wanted, such as docs.python.org or *.python.org")
        return HostRule(text, name, pattern.strip().lower().rstrip("."))
    if name in (*READING, *WRITING):
        if ".." in pattern.split("/"):
            raise _bad(text, "a path in it must not contain `..`")
        return PathRule(text, name, posixpath.join(WORKSPACE_ROOT, pattern.removeprefix("./")))
    raise _bad(text, f"{name} takes no pattern")


def _shell_rule(text: str, name: str, pattern: str) -> ShellRule:
    words = _split(text, pattern)
    open_end = words[-1] == [("*", False)]
    fixed = words[:-1] if open_end else words
    if not fixed:
        raise _bad(text, "write just `shell` for every command")
    return ShellRule(text, name, tuple(map(_word_regex, fixed)), open_end)


def _split(text: str, pattern: str) -> list[list[tuple[str, bool]]]:
    """Words of a pattern as (character, was quoted). Both kinds of quotes keep everything inside
    them as it is; nothing else is special."""
    words: list[list[tuple[str, bool]]] = []
    quote, inside = "", False
    for char in pattern:
        if quote:
            if char == quote:
                quote = ""
            else:
                words[-1].append((char, True))
        elif char.isspace():
            inside = False
        else:
            if not inside:
                words.append([])
                inside = True
            if char in "'\"":
                quote = char
            else:
                words[-1].append((char, False))
    if quote:
        raise _bad(text, "a quote in it is not closed")
    return words


def _word_regex(word: Iterable[tuple[str, bool]]) -> re.Pattern[str]:
    return re.compile(
        "".join(".*" if item == ("*", False) else re.escape(item[0]) for item in word), re.DOTALL
    )


def _name_regex(name: str) -> str:
    """`mcp__server` names all tools of that server."""
    regex = ".*".join(re.escape(part) for part in name.split("*"))
    return regex + (r"(?:__.*)?" if name.startswith(_MCP) else "")


@functools.cache
def path_regex(pattern: str) -> re.Pattern[str]:
    """A path pattern as a regular expression over absolute paths."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        if pattern.startswith("/**/", at):
            out.append("/(?:.*/)?")
            at += 4
        elif pattern.startswith("**", at):
            out.append(".*")
            at += 2
        elif pattern[at] == "\\" and at + 1 < len(pattern):
            out.append(re.escape(pattern[at + 1]))
            at += 2
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(pattern[at]) or re.escape(pattern[at]))
            at += 1
    return re.compile("".join(out), re.DOTALL)


def fixed_path(pattern: str) -> str | None:
    """The one path that a pattern names, or None when it may name several."""
    bare = re.sub(r"\\(.)", "", pattern)
    return None if re.search(r"[*?]", bare) else re.sub(r"\\(.)", r"\1", pattern)


def _bad(text: str, reason: str) -> EtudeError:
    return EtudeError(f"The rule {text!r} cannot be used: {reason}.")


def suggested(request: Request) -> tuple[str, ...]:
    """Rules that would allow exactly this call, for a person to remember; empty when no rule
    can."""
    if request.tool == "shell":
        script = analyse(request.subject)
        asked = [command for command in script.commands if not only_reads(command)]
        if script.objection is not None or any(c.piped or not c.literal for c in asked):
            return ()
        lines = [shlex.join(word.text for word in command.words) for command in asked]
        return tuple(f"shell({line})" for line in dict.fromkeys(lines))
    if request.tool == "web_fetch":
        plain = re.match(r"https?://([A-Za-z0-9.-]+)(?:[:/?#]|$)", request.subject)
        return (f"web_fetch({plain.group(1).lower()})",) if plain else ()
    if request.tool in (*READING, *WRITING):
        name = "edit" if request.tool in WRITING else request.tool
        inside = posixpath.relpath(guest_path(request.subject), WORKSPACE_ROOT)
        escaped = re.sub(r"([*?\\])", r"\\\1", inside)
        return () if inside.startswith("..") else (f"{name}({escaped})",)
    return (request.tool,) if request.tool in TOOLS or request.tool.startswith(_MCP) else ()
