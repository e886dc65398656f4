"""What a diff changes, file by file, set beside the repository that it belongs to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk, PatchedFile, PatchSet

from etude.errors import EtudeError

_LONGEST_DIFF = 8 << 20
_LONGEST_FILE = 1 << 20


class Status(StrEnum):
    """What happens to a file."""

    ADDED = "added"
    REMOVED = "removed"
    RENAMED = "renamed"
    CHANGED = "changed"


@dataclass(frozen=True)
class FileChange:
    """One file of a diff. `added` and `removed` are (line number, text), counted in the new and in
    the old file. `functions` are the qualified names of functions and classes whose lines changed
    (for Python), else what the diff says stands around the changes. `new` and `old` are the whole
    texts, None where they are not known; `fits` says whether the diff fits the repository."""

    path: str
    old_path: str
    status: Status
    binary: bool
    added: tuple[tuple[int, str], ...]
    removed: tuple[tuple[int, str], ...]
    functions: tuple[str, ...]
    new: str | None
    old: str | None
    fits: bool

    @property
    def python(self) -> bool:
        """Whether this is Python source."""
        return self.path.endswith((".py", ".pyi"))


def read_diff(text: str, repository: Path | None) -> tuple[FileChange, ...]:
    """The changes of a unified diff. The repository may hold the files as they are before the diff
    or after it. Raises EtudeError for what is no diff."""
    if len(text) > _LONGEST_DIFF:
        raise EtudeError(f"The diff is longer than {_LONGEST_DIFF >> 20} MiB; review it in parts.")
    try:
        files = list(PatchSet(text))
    except UnidiffParseError as error:
        reason = " ".join(str(error).split())
        raise EtudeError(f"The diff cannot be read: {reason}.") from error
    if not files:
        raise EtudeError("The diff holds no change of a file; give the output of `git diff`.")
    return tuple(_change(file, repository) for file in files)


def _change(file: PatchedFile, repository: Path | None) -> FileChange:
    path, old_path = _path(file.target_file, "b/"), _path(file.source_file, "a/")
    status = Status.CHANGED
    if file.is_added_file or file.source_file == "/dev/null":
        status, old_path = Status.ADDED, path
    elif file.is_removed_file or file.target_file == "/dev/null":
        status, path = Status.REMOVED, old_path
    elif file.is_rename or path != old_path:
        status = Status.RENAMED
    hunks = list(file)
    lines = [line for hunk in hunks for line in hunk]
    added = tuple((x.target_line_no or 0, _bare(x.value)) for x in lines if x.is_added)
    removed = tuple((x.source_line_no or 0, _bare(x.value)) for x in lines if x.is_removed)
    old, new, fits = _texts(hunks, status, path, old_path, repository)
    change = FileChange(
        path=path,
        old_path=old_path,
        status=status,
        binary=file.is_binary_file,
        added=added,
        removed=removed,
        functions=(),
        new=new,
        old=old,
        fits=fits,
    )
    return replace(change, functions=tuple(_functions(change, hunks)))


def _path(name: str, prefix: str) -> str:
    """The path as it is, from what stands in the diff: git quotes unusual ones."""
    if len(name) > 1 and name[0] == name[-1] == '"':
        raw = re.sub(
            rb"\\([0-7]{3}|.)",
            lambda m: _escape(m[1]),
            name[1:-1].encode("utf-8", "surrogateescape"),
        )
        name = raw.decode("utf-8", "surrogateescape")
    return name.removeprefix(prefix)


def _escape(code: bytes) -> bytes:
    if len(code) == 3:
        return bytes([int(code, 8) & 255])
    letters = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f"}
    return letters.get(code, code)


def _bare(line: str) -> str:
    return line.removesuffix("\n").removesuffix("\r")


def _texts(
    hunks: Sequence[Hunk], status: Status, path: str, old_path: str, repository: Path | None
) -> tuple[str | None, str | None, bool]:
    """(old text, new text, whether the diff fits). A diff of a whole new or removed file holds its
    text itself."""
    if status is Status.ADDED:
        new = "\n".join(text for hunk in hunks for text in _side(hunk, "+"))
        return None, new, True
    if status is Status.REMOVED:
        return "\n".join(text for hunk in hunks for text in _side(hunk, "-")), None, True
    after, before = _read(repository, path), _read(repository, old_path)
    applied = after is not None and _matches(after, hunks, "+")
    waiting = before is not None and _matches(before, hunks, "-")
    if applied and waiting and before is not None:
        # Equal lines next to one another fit both ways; a last hunk that ends with the file tells.
        applied = not _reaches_end(before, hunks, "-") or _reaches_end(before, hunks, "+")
    if applied and after is not None:
        return "\n".join(_replaced(after, hunks, "+", "-")), "\n".join(after), True
    if waiting and before is not None:
        return "\n".join(before), "\n".join(_replaced(before, hunks, "-", "+")), True
    return None, None, False


def _reaches_end(lines: Sequence[str], hunks: Sequence[Hunk], side: str) -> bool:
    count = len(lines) - (lines[-1] == "")
    return bool(hunks) and _span(hunks[-1], side)[1] == count


def _side(hunk: Hunk, side: str) -> list[str]:
    """The lines of a hunk as they stand in the new (`+`) or in the old file (`-`)."""
    return [_bare(line.value) for line in hunk if line.line_type in (" ", "", side)]


def _span(hunk: Hunk, side: str) -> tuple[int, int]:
    """[start, end) of a hunk in the lines of its new or old file, counted from 0."""
    start, length = (
        (hunk.target_start, hunk.target_length)
        if side == "+"
        else (hunk.source_start, hunk.source_length)
    )
    # An empty side names the line before it.
    begin = start if length == 0 else start - 1
    return begin, begin + length


def _matches(lines: Sequence[str], hunks: Sequence[Hunk], side: str) -> bool:
    for hunk in hunks:
        start, end = _span(hunk, side)
        if start < 0 or [_bare(line) for line in lines[start:end]] != _side(hunk, side):
            return False
    return True


def _replaced(lines: Sequence[str], hunks: Sequence[Hunk], side: str, other: str) -> Iterator[str]:
    """The file with each hunk's one side replaced by its other."""
    at = 0
    for hunk in hunks:
        start, end = _span(hunk, side)
        yield from lines[at:start]
        yield from _side(hunk, other)
        at = end
    yield from lines[at:]


def _read(repository: Path | None, path: str) -> list[str] | None:
    """The lines of a file, or None when it is not there, no text, too long, or not inside the
    repository: the paths of a diff are somebody else's, and so are the links."""
    if repository is None or "\0" in path:
        return None
    root = repository.resolve()
    place = (root / path).resolve()
    try:
        if not place.is_relative_to(root) or not place.is_file():
            return None
        if place.stat().st_size > _LONGEST_FILE:
            return None
        return place.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError):
        return None


def _functions(change: FileChange, hunks: Sequence[Hunk]) -> Iterator[str]:
    """The names around the changed lines, each once, in order."""
    seen: set[str] = set()
    if change.python and (change.new is not None or change.old is not None):
        names = [
            name
            for text, lines in ((change.new, change.added), (change.old, change.removed))
            for name in _enclosing(text or "", [number for number, line in lines if line.strip()])
        ]
    else:
        names = [" ".join(hunk.section_header.split()) for hunk in hunks]
    for name in names:
        if name and name not in seen:
            seen.add(name)
            yield name


def _enclosing(text: str, lines: Sequence[int]) -> Iterator[str]:
    """The innermost function or class around each line."""
    spans = sorted(definitions(text), key=lambda span: span[1] - span[0])
    for line in lines:
        for start, end, name in spans:
            if start <= line <= end:
                yield name
                break


def definitions(text: str) -> list[tuple[int, int, str]]:
    """(first line, last line, qualified name) of every function and class; none when the text is
    no Python."""
    if len(text) > _LONGEST_FILE:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[tuple[int, int, str]] = []
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, prefix = waiting.pop()
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}"
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found.append((first, child.end_lineno or child.lineno, inner))
                inner += "."
            waiting.append((child, inner))
    return found
