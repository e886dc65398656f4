"""Exact replacement in a file's text: line endings, byte-order mark and every byte outside the
replaced span stay as they are.

Files are decoded as UTF-8 with `surrogateescape`, so that bytes which are no UTF-8 survive an edit
of another line. The model sees and says `\\n`; a file's `\\r\\n` is matched by it and kept.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Sequence

BOM = "\ufeff"

_PREFIX = re.compile(r"[ \t]*\d+(?:: ?|\t|→|[ \t]*\| ?)")
_NEAREST_LINES = 20_000
"""Beyond so many lines nothing near is looked for: it would take seconds."""


def decode(data: bytes) -> str:
    """Bytes as text, reversible by `encode`."""
    return data.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    """Inverse of `decode`."""
    return text.encode("utf-8", "surrogateescape")


def shown(text: str) -> str:
    """Text as a model is shown it: no byte-order mark, `\\n` endings, no lone surrogates."""
    return unix(text.removeprefix(BOM)).encode("utf-8", "replace").decode()


def unix(text: str) -> str:
    """Text with `\\n` line endings."""
    return text.replace("\r\n", "\n")


def occurrences(text: str, part: str, *, overlapping: bool = True) -> list[int]:
    """Where `part` starts in `text`."""
    starts: list[int] = []
    step = 1 if overlapping else len(part)
    at = text.find(part)
    while at >= 0:
        starts.append(at)
        at = text.find(part, at + step)
    return starts


def line_of(text: str, index: int) -> int:
    """Number of the line, from 1, that holds `index`."""
    return text.count("\n", 0, index) + 1


def _newline_at(raw: str, index: int) -> str:
    """The line ending in use at `index`: of that line, else of the one before."""
    end = raw.find("\n", index)
    if end < 0:
        end = raw.rfind("\n", 0, index)
    return "\r\n" if end > 0 and raw[end - 1] == "\r" else "\n"


def splice(raw: str, starts: Sequence[int], old: str, new: str) -> str:
    """`raw` with each `old` that starts at an index of `unix(raw)` in `starts` (rising, not
    overlapping) replaced by `new`. `old` and `new` have `\\n` endings. What they share at both
    ends is not touched, so that every kept line keeps its own ending."""
    shortest = min(len(old), len(new))
    head = 0
    while head < shortest and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shortest - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    inserted = new[head : len(new) - tail]
    # Each "\r\n" of the file is one character shorter in unix(raw): the k-th one's "\n" stands at
    # its place in raw less k + 1.
    places = [match.end() - 1 for match in re.finditer("\r\n", raw)]
    crlf = [place - k - 1 for k, place in enumerate(places)]
    pieces: list[str] = []
    kept = 0
    for at in starts:
        start, end = at + head, at + len(old) - tail
        raw_start = start + bisect_left(crlf, start)
        raw_end = end + bisect_left(crlf, end)
        newline = _newline_at(raw, raw_end) if "\n" in inserted else ""
        pieces += [raw[kept:raw_start], inserted.replace("\n", newline)]
        kept = raw_end
    return "".join([*pieces, raw[kept:]])


def without_line_numbers(text: str) -> tuple[str, str] | None:
    """(the first prefix, the text without prefixes) when every line that is not blank begins with
    a line number as `read` shows it, else None."""
    lines = text.split("\n")
    found = [_PREFIX.match(line) for line in lines]
    first = next((match for match in found if match), None)
    if first is None or any(
        line.strip() and not match for line, match in zip(lines, found, strict=True)
    ):
        return None
    bare = [
        line[match.end() :] if match else line for line, match in zip(lines, found, strict=True)
    ]
    return first.group().lstrip(), "\n".join(bare)


def numbered(lines: list[str], first: int) -> str:
    """Lines as `read` shows them; `first` is the number of the first."""
    return "\n".join(f"{number}: {line}" for number, line in enumerate(lines, first))


def nearest(text: str, part: str) -> str:
    """The lines of `text` most like `part`, numbered, or an empty string when none is like it.
    Both have `\\n` endings."""
    lines = text.split("\n")
    wanted = part.split("\n")
    anchor = max(range(len(wanted)), key=lambda index: len(wanted[index].strip()))
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted[anchor].strip())
    best, best_ratio = -1, 0.5
    for index, line in enumerate(lines[:_NEAREST_LINES]):
        matcher.set_seq1(line.strip())
        if matcher.real_quick_ratio() <= best_ratio or matcher.quick_ratio() <= best_ratio:
            continue
        ratio = matcher.ratio()
        if ratio > best_ratio:
            best, best_ratio = index, ratio
    if best < 0:
        return ""
    start = max(0, best - min(anchor, 6))
    return numbered(lines[start : start + min(max(len(wanted), 3), 12)], start + 1)


def changes(before: str, after: str, limit: int = 30) -> str:
    """What differs, as the lines of a unified diff, at most `limit` of them."""
    lines = list(difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=1))[2:]
    cut = [f"[{len(lines) - limit} more lines]"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + cut)


def head_and_tail(text: str, limit: int) -> str:
    """Text of at most about `limit` characters: the first two thirds and the last third, cut at
    line ends where there are any near, with a marker between that says how much is missing."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    line_end = head.rfind("\n")
    head = head[: line_end + 1] if line_end > len(head) // 2 else head
    line_start = tail.find("\n") + 1
    tail = tail[line_start:] if 0 < line_start < len(tail) // 2 else tail
    cut = len(text) - len(head) - len(tail)
    return f"{head.rstrip()}\n[... {cut} characters cut ...]\n{tail}"


def clean(text: str) -> str:
    """Text that can be encoded: lone surrogates (undecodable bytes of a file or a terminal)
    become question marks."""
    return text.encode("utf-8", "replace").decode()
