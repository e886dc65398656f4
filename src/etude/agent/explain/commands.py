"""What a shell command was for, by its text: running tests, checking, changing files.

Only for explaining what was done; nothing is allowed or run because of it. When in doubt a command
is taken for one that proves nothing and may have changed files.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Literal

from etude.agent.permissions.bash import analyse
from etude.agent.permissions.reading import reads_only

Check = Literal["lint", "types", "build"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\\\n)
    | (?P<redirect>&>>?|\d*(?:<<<?-?|>>?\|?|<)(?:&\d*-?)?)
    | (?P<joint>&&|\|\||\|&?|;+|&|\n)
    | (?P<bracket>[()])
    | (?P<single>'[^']*')
    | (?P<double>"(?:\\.|[^"\\])*")
    | (?P<escaped>\\.)
    | (?P<plain>[^\s'"\\;&|<>()]+|['"\\])""",
    re.VERBOSE | re.DOTALL,
)
_OPAQUE = re.compile(r"\$\(|`|<<|(?:^|[\s;&|])(?:if|for|while|until|case|function|eval|trap|\{)\b")
_LONGEST = 20_000


@dataclass(frozen=True)
class Step:
    """One simple command: its words with quotes taken off, the files it writes by redirection, and
    what stands behind it ("", "&&", "||", "|", ";" or "&")."""

    words: tuple[str, ...]
    writes: tuple[str, ...] = ()
    joint: str = ""


@dataclass(frozen=True)
class Parsed:
    """A command line in steps. `opaque`: there is more in it than a list of simple commands."""

    steps: tuple[Step, ...]
    opaque: bool


def parse(command: str) -> Parsed:
    """The steps of a command line, as far as its text tells."""
    if len(command) > _LONGEST:
        return Parsed((), opaque=True)
    steps: list[Step] = []
    words: list[str] = []
    writes: list[str] = []
    opaque = _OPAQUE.search(command) is not None
    glued = False
    target: str | None = None
    for token in _TOKEN.finditer(command):
        kind, text = token.lastgroup, token.group()
        if kind in ("joint", "bracket"):
            opaque = opaque or kind == "bracket"
            if words or writes:
                steps.append(Step(tuple(words), tuple(writes), ";" if text == "\n" else text))
            words, writes, glued, target = [], [], False, None
        elif kind == "redirect":
            target = ">" if ">" in text and "&" not in text[1:] else "<"
            target = None if re.search(r"&\d|&-", text) else target
            glued = False
        elif kind == "space":
            glued = False
        else:
            piece = _unquoted(kind, text)
            if target is not None:
                writes += [piece] if target == ">" else []
                target = None
            elif glued and words:
                words[-1] += piece
            else:
                words.append(piece)
            glued = True
    if words or writes:
        steps.append(Step(tuple(words), tuple(writes)))
    return Parsed(tuple(steps), opaque)


def _unquoted(kind: str | None, text: str) -> str:
    if kind in ("single", "double"):
        return text[1:-1]
    return text[1:] if kind == "escaped" else text


_WRAPPER = re.compile(
    r"""(?:[A-Za-z_]\w*=\S*
    | (?:\S*/)?(?:sudo|time|command|exec|nohup|npx|bunx|xvfb-run|env|nice)
    | (?:\S*/)?timeout(?:[ ]-\S+)*[ ]\S+
    | (?:\S*/)?(?:uv|poetry|pipenv|pdm|hatch|rye|pixi)[ ]run
    | bundle[ ]exec
    | (?:\S*/)?python[\d.]*(?:[ ]-[BbEIOqsSuvx]+|[ ]-[WX][ ]?\S+)*[ ]-m(?=[ ]\S)
    | (?:\S*/)?coverage[ ]run(?:[ ]-m)?(?=[ ]\S)
    )[ ]""",
    re.VERBOSE,
)


def bare(words: tuple[str, ...]) -> str:
    """What really runs, as one line: without assignments, wrappers and the folder of a program."""
    line = " ".join(words)
    while wrapper := _WRAPPER.match(line):
        line = line[wrapper.end() :]
    name, space, rest = line.partition(" ")
    return f"{posixpath.basename(name)}{space}{rest}"


_TESTS = re.compile(
    r"""(?:pytest|py\.test|unittest|trial|tox|nox|ctest|rspec|phpunit|jest|vitest|mocha|ava|bats)\b
    | (?:go|cargo|dotnet|mix|swift|deno|bun|rake|sbt|stack|cabal|flutter)[ ](?:\S+[ ])*?test\b
    | cargo[ ]nextest[ ]run\b | rake[ ]spec\b | dune[ ](?:runtest|test)\b
    | mvnw?[ ](?:\S+[ ])*?(?:test|verify)\b | gradlew?[ ](?:\S+[ ])*?(?:test|check)\b
    | (?:npm|pnpm|yarn)[ ](?:run[ ])?(?:t|tst|test(?:[:-]\S+)?)(?=[ ]|$)
    | (?P<target>(?:make|just|task|ninja)[ ](?:\S+[ ])*?(?:\S*test\S*|check)(?=[ ]|$))
    | (?P<script>doctest\b|(?:python[\d.]*|node|ruby|sh|bash)[ ](?:-\S+[ ])*(?:\S*/)?
      (?:test_\w+\.\w+|\w+[_.](?:test|spec)\.\w+|(?:run_?)?tests?\.\w+))""",
    re.VERBOSE,
)
_NOT_RUN = re.compile(r"(?:^| )(?:--version|--help|-h|--collect-only|--co|--fixtures|--markers)\b")
_NARROWING = re.compile(
    r"""-k|-m$|--lf|--last-failed|--deselect|--ignore|-run\b|--filter|-t$
    | (?!-)(?!\.{1,2}/?$|(?:\./)?tests?/?$|\./\.\.\.$|discover$|run$|--$)""",
    re.VERBOSE,
)
_WITH_VALUE = re.compile(r"(?:^| )(?:-[npcoWj]|--(?:tb|timeout|maxfail|cov))[ =]\S+")
_CHECKS: tuple[tuple[str, Check], ...] = (
    (r"(?:flake8|pylint|pyflakes|eslint|golangci-lint|shellcheck|rubocop|stylelint)\b", "lint"),
    (r"ruff (?:check\b|.*--check\b)|(?:black|isort|prettier)\b.* --check|gofmt -l", "lint"),
    (r"go vet\b|cargo clippy\b|biome (?:check|lint)\b", "lint"),
    (r"(?:mypy|pyright|basedpyright|pyre|ty|tsc)\b", "types"),
    (r"(?:py_compile|compileall|gcc|g\+\+|clang|javac|rustc|cmake --build)\b", "build"),
    (r"(?:go|cargo) build\b|cargo check\b|(?:make|ninja)$", "build"),
    (r"(?:make|just|npm|pnpm|yarn|ninja) (?:run )?\S*(?:lint|style)", "lint"),
    (r"(?:make|just|npm|pnpm|yarn|ninja) (?:run )?\S*type", "types"),
    (r"(?:make|just|npm|pnpm|yarn|ninja) (?:run )?\S*(?:build|compile|all\b)", "build"),
)
_CHANGER = re.compile(r"(?:tee|mv|cp|rm|rmdir|ln|touch|truncate|dd|patch|install|unzip|wget)\b")
_CHANGES = re.compile(
    r"""git[ ](?:-\S+[ ]\S+[ ])*(?:checkout|switch|restore|reset|stash|apply|am|revert|merge|rebase
        |cherry-pick|pull|clean|mv|rm)\b
    | (?:sed|perl)[ ].*?-p?i | gofmt[ ].*-w | prettier[ ].*--write | (?:ruff|eslint)[ ].*--fix
    | (?:ruff|cargo)[ ](?:format|fmt|fix)\b(?!.*--check)
    | (?:black|isort|autopep8|yapf|rustfmt)\b(?!.*--(?:check|diff))
    | curl[ ].*?-(?:\w*[oO]\b|-output|-remote-name) | tar[ ](?:-?\w*x|--extract)
    | git[ ](?:-\S+[ ]\S+[ ])*(?:clone|init)\b
    | xargs[ ](?:\S+[ ])*?(?:sed|rm|mv|cp|perl|tee)\b | find[ ].*-(?:delete|exec)\b""",
    re.VERBOSE,
)
_UNDOES = re.compile(
    r"git (?:-\S+ \S+ )*(?:checkout|restore|reset|stash|clean|revert|switch|rebase)\b"
)
_SHELL = re.compile(r"(?:ba|da|z|k)?sh (?:-\w+ )*-\w*c ")
_DEEPEST = 3
_SCRIPT = re.compile(r"\bpython[\d.]*\s+(?:-c|-\s|<<)|\bnode\s+-e|\bperl\s+-e")
_WRITING = re.compile(r"write|unlink|remove|rename|replace\(|rmtree|open\([^)]*['\"][wa]")


@dataclass(frozen=True)
class TestRun:
    """A run of tests; `narrow` when only some of them were asked for."""

    narrow: bool

    __test__ = False


def find_test_run(words: tuple[str, ...]) -> TestRun | None:
    """Whether this runs tests."""
    line = bare(words)
    found = _TESTS.match(line)
    if found is None or _NOT_RUN.search(line):
        return None
    if found["target"]:
        return TestRun(narrow=False)
    rest = _WITH_VALUE.sub("", line[found.end() :]).split()
    return TestRun(bool(found["script"]) or any(_NARROWING.match(word) for word in rest))


def find_check_run(words: tuple[str, ...]) -> Check | None:
    """Whether this checks the code without running it, and what for."""
    line = bare(words)
    if _NOT_RUN.search(line):
        return None
    return next((kind for pattern, kind in _CHECKS if re.match(pattern, line)), None)


def may_change(parsed: Parsed, command: str) -> bool:
    """Whether files of the repository may be others afterwards."""
    if not parsed.steps or any(_step_changes(step) for step in parsed.steps):
        return True
    if _SCRIPT.search(command) and _WRITING.search(command):
        return True
    return _hidden_change(parsed, command, 0)


def only_looks(command: str) -> bool:
    """Whether the command surely changed nothing: what a session runs without a question."""
    return reads_only(command)


def _hidden_change(parsed: Parsed, command: str, depth: int) -> bool:
    """Whether a step inside a loop, a condition, a substitution or `sh -c` may change files."""
    inner = [step.words[-1] for step in parsed.steps if _SHELL.match(bare(step.words))]
    if depth < _DEEPEST:
        for text in inner:
            below = parse(text)
            if any(map(_step_changes, below.steps)) or _hidden_change(below, text, depth + 1):
                return True
    if not parsed.opaque or len(command) > _LONGEST:
        return False
    found = (tuple(word.text for word in simple.words) for simple in analyse(command).commands)
    return any(_step_changes(Step(words)) for words in found)


def undoes(parsed: Parsed) -> bool:
    """Whether earlier changes may be gone afterwards."""
    return any(_UNDOES.match(bare(step.words)) for step in parsed.steps)


def _step_changes(step: Step) -> bool:
    if any(not _elsewhere(path) for path in step.writes):
        return True
    line = bare(step.words)
    if _CHANGER.match(line):
        targets = [word for word in line.split()[1:] if not word.startswith("-")]
        return not targets or not all(_elsewhere(path) for path in targets)
    return _CHANGES.match(line) is not None


def _elsewhere(path: str) -> bool:
    return path.startswith(("/dev/", "/tmp/", "/var/tmp/"))
