"""Searching the workspace."""

from __future__ import annotations

import posixpath
import re
from collections import Counter

from pydantic import Field

from etude.agent.tools.files import guest_path
from etude.agent.tools.globs import regex_of_glob
from etude.agent.tools.programs import RIPGREP
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)
from etude.sandbox.protocol import WORKSPACE_ROOT, ExecResult

WALK = ("--no-config", "--hidden", "--no-require-git", "--glob=!.git")
"""How ripgrep walks: `.gitignore` files count everywhere, hidden files are files."""
NO_RIPGREP = ToolResult(
    "this sandbox shows no ripgrep, which is needed to search; use shell with grep or find.",
    ErrorClass.UNAVAILABLE,
)
_OUTPUT = (
    "--line-number",
    "--no-heading",
    "--with-filename",
    "--null",
    "--color=never",
    "--max-columns=300",
    "--max-columns-preview",
    "--engine=auto",
)
_GLOBBED = """
rg=$1 path=$2 names=$3 walk=$4; shift 4
"$rg" --files --null --sort=path $walk -- "$path" | "$rg" --no-config --null-data -e "$names" |
  xargs -0 -r "$rg" "$@"
"""
_MATCHES_PER_FILE = 50
_LINES = 200
_LINE = re.compile(r"(\d+)([:-])(.*)", re.DOTALL)


class GrepArguments(Arguments):
    """A regular expression; `path` is a file or folder, `glob` keeps only the files it names,
    `context` shows lines around each match, `files_only` names the files alone."""

    pattern: Word
    path: Word = "."
    glob: Word | None = None
    ignore_case: bool = False
    context: int = Field(default=0, ge=0, le=20)
    files_only: bool = False


class Grep(Tool[GrepArguments]):
    """Lines that match, as `path:line:text`, files in order of their names, what `.gitignore`
    names left out. The search runs inside the sandbox."""

    name = "grep"
    description = "search a file or folder for a regular expression"
    arguments = GrepArguments
    effect = Effect.READ

    async def run(self, context: ToolContext, args: GrepArguments) -> ToolResult:
        """See `Tool.run`."""
        options = [*_OUTPUT, "--sort=path", f"--context={args.context}"]
        options += ["--ignore-case"] if args.ignore_case else []
        # One match more than is shown tells whether there are more.
        options += ["--files-with-matches"] if args.files_only else [f"-m{_MATCHES_PER_FILE + 1}"]
        search = [*options, *WALK, "-e", args.pattern, "--"]
        path = inside(args.path)
        argv = [RIPGREP, *search, path]
        if args.glob is not None:
            try:
                names = regex_of_glob(args.glob, path)
            except ValueError as error:
                return ToolResult(f"glob: {error}.", ErrorClass.INVALID_ARGUMENTS)
            argv = ["sh", "-c", _GLOBBED, "sh", RIPGREP, path, names, " ".join(WALK), *search]
        workspace = await context.workspace()
        result = await workspace.exec(argv, timeout=context.timeout)
        if result.timed_out:
            return ToolResult(f"stopped after {context.timeout:g} s.", ErrorClass.TIMEOUT)
        if not result.stdout:
            return _nothing(args, result)
        return _names(result) if args.files_only else _lines(result)


def inside(path: str) -> str:
    """`path` relative to the workspace where it is in there, else absolute."""
    relative = posixpath.relpath(guest_path(path), WORKSPACE_ROOT)
    return guest_path(path) if relative == ".." or relative.startswith("../") else relative


def more(cut: bool) -> str:
    """The last line of a list that was cut."""
    return "\n(there are more; narrow the search)" if cut else ""


def _names(result: ExecResult) -> ToolResult:
    names = [name.removeprefix("./") for name in result.stdout.split("\0") if name.strip("\n")]
    cut = len(names) > _LINES or result.truncated
    return ToolResult("\n".join(names[:_LINES]) + more(cut))


def _lines(result: ExecResult) -> ToolResult:
    """ripgrep's `path NUL number separator text` with the separator for the NUL. Lines without a
    NUL stand between groups or say that a file is binary."""
    shown: list[str] = []
    matches: Counter[str] = Counter()
    cut = result.truncated
    for line in result.stdout.splitlines():
        path, _, rest = line.removeprefix("./").partition("\0")
        parsed = _LINE.fullmatch(rest)
        if parsed is None:
            shown.append(line.replace("\0", ":"))
            continue
        number, separator, text = parsed.groups()
        matches[path] += separator == ":"
        if matches[path] > _MATCHES_PER_FILE:
            cut = True
            continue
        shown.append(f"{path}{separator}{number}{separator}{text}")
    return ToolResult("\n".join(shown[:_LINES]) + more(cut or len(shown) > _LINES))


def _nothing(args: GrepArguments, result: ExecResult) -> ToolResult:
    """Why there is no line: ripgrep exits with 1 when nothing matches and 2 when it could not
    search, xargs with 123 for both."""
    message = result.stderr.strip()
    if result.exit_code == 127 or "rg: not found" in message:
        return NO_RIPGREP
    if not message:
        return ToolResult(f"no match for {args.pattern!r}.")
    if "No such file" in message:
        return ToolResult(f"{args.path} does not exist.", ErrorClass.NOT_FOUND)
    if "regex parse error" in message or "PCRE2: error" in message:
        return ToolResult(message, ErrorClass.INVALID_ARGUMENTS)
    return ToolResult(f"no match for {args.pattern!r}; not searched: {message}", ErrorClass.DENIED)
