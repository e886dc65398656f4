"""What an edit broke: the findings of a language's checker that were not there before.

Checkers run inside the guest, on the bytes before and after, with none of the repository's own
configuration: it is as hostile as the rest of it.
"""

from __future__ import annotations

import posixpath
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from etude.agent.tools.programs import LIBRARY_FOLDER, RUFF
from etude.sandbox.protocol import ExecResult, Workspace

_LONGEST = 1 << 20
_SHOWN = 10


class Finding(NamedTuple):
    """One complaint of a checker; `line` counts from 1."""

    line: int
    message: str


class Checker(Protocol):
    """Knows one kind of file."""

    def applies(self, path: str) -> bool:
        """Whether it knows the file, by its name."""
        ...

    async def check(
        self, workspace: Workspace, path: str, data: bytes, seconds: float
    ) -> Sequence[Finding]:
        """What is wrong with a file of these bytes. Raises NotChecked."""
        ...


class NotChecked(Exception):
    """There are no findings, and why."""


@dataclass(frozen=True)
class RuffChecker:
    """Python: syntax, undefined and unused names."""

    select: str = "E9,F"

    def applies(self, path: str) -> bool:
        """See `Checker.applies`."""
        return path.endswith((".py", ".pyi"))

    async def check(
        self, workspace: Workspace, path: str, data: bytes, seconds: float
    ) -> Sequence[Finding]:
        """See `Checker.check`."""
        # Only what a name means to the rules is told, so that the answer can be parsed.
        name = posixpath.basename(path)
        name = name if name == "__init__.py" else f"file{posixpath.splitext(name)[1]}"
        argv = [RUFF, "check", "--isolated", "--no-cache", "--quiet", f"--select={self.select}"]
        argv += ["--target-version=py314", "--output-format=concise", "--stdin-filename", name, "-"]
        done = await _run(workspace, argv, data, seconds, "ruff")
        if done.exit_code not in (0, 1):
            raise NotChecked(f"ruff failed: {done.stderr.strip()[:200]}")
        found = re.findall(rf"^{re.escape(name)}:(\d+):\d+: (.*)$", done.stdout, re.MULTILINE)
        return [Finding(int(line), message) for line, message in found]


_SYNTAX = """
import sys
kind, data = sys.argv[1], sys.stdin.buffer.read()
try:
    if kind == "json":
        import json
        json.loads(data)
    elif kind == "toml":
        import tomllib
        tomllib.loads(data.decode())
    else:
        sys.path.insert(0, sys.argv[2])
        import yaml
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            pass
except ModuleNotFoundError as error:
    sys.exit(f"no module {error.name}")
except RecursionError:
    sys.exit("too deep")
except Exception as error:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark else getattr(error, "lineno", 0)
    text = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error)
    if not line and "(at line " in text:
        text, _, place = text.rpartition(" (at line ")
        line = int(place.split(",")[0])
    print(max(line, 1), " ".join(text.split()))
"""


@dataclass(frozen=True)
class SyntaxChecker:
    """JSON, TOML and YAML: syntax. The interpreter is the one that runs Etude."""

    kinds: Sequence[tuple[str, str]] = (
        (".json", "json"),
        (".toml", "toml"),
        (".yaml", "yaml"),
        (".yml", "yaml"),
    )
    python: str = f"{sys.base_prefix}/bin/python3"

    def _kind(self, path: str) -> str | None:
        if re.search(r"(^|/)([jt]sconfig[^/]*\.json|\.vscode/[^/]*)$", path):
            return None  # JSON with comments
        return next((kind for suffix, kind in self.kinds if path.endswith(suffix)), None)

    def applies(self, path: str) -> bool:
        """See `Checker.applies`."""
        return self._kind(path) is not None

    async def check(
        self, workspace: Workspace, path: str, data: bytes, seconds: float
    ) -> Sequence[Finding]:
        """See `Checker.check`."""
        argv = [self.python, "-IS", "-c", _SYNTAX, self._kind(path) or "", LIBRARY_FOLDER]
        done = await _run(workspace, argv, data, seconds, "python3")
        if done.exit_code != 0:
            raise NotChecked(f"the checker failed: {done.stderr.strip()[:200]}")
        line, _, message = done.stdout.strip().partition(" ")
        return [Finding(int(line), message)] if line else []


async def _run(
    workspace: Workspace, argv: Sequence[str], data: bytes, seconds: float, program: str
) -> ExecResult:
    done = await workspace.exec(argv, timeout=max(seconds, 0.1), stdin=data)
    if done.timed_out:
        raise NotChecked(f"{program} gave no answer in time")
    if done.exit_code == 127:
        raise NotChecked(f"this sandbox shows no {program}")
    return done


@dataclass(frozen=True)
class Diagnostics:
    """Set as `ToolContext.diagnose`. Takes at most `seconds` for an edit."""

    checkers: Sequence[Checker] = (RuffChecker(), SyntaxChecker())
    seconds: float = 10.0

    async def __call__(
        self, workspace: Workspace, path: str, before: bytes | None, after: bytes
    ) -> str:
        """The findings in `after` that `before` did not have, as lines for the model, or ''."""
        checker = next((checker for checker in self.checkers if checker.applies(path)), None)
        if checker is None or len(after) > _LONGEST:
            return ""
        deadline = time.monotonic() + self.seconds
        try:
            found = await checker.check(workspace, path, after, self.seconds)
            known: Counter[str] = Counter()
            if found and before:
                left = deadline - time.monotonic()
                known.update(f.message for f in await checker.check(workspace, path, before, left))
        except NotChecked as error:
            return f"(not checked: {error})"
        new: list[Finding] = []
        for finding in found:
            if known[finding.message]:
                known[finding.message] -= 1
            else:
                new.append(finding)
        if not new:
            return ""
        lines = [f"{path}:{finding.line}: {finding.message}" for finding in new[:_SHOWN]]
        more = [f"(and {len(new) - _SHOWN} more)"] if len(new) > _SHOWN else []
        return "\n".join(["New problems in the file:", *lines, *more])
