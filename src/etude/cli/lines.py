"""Lines of the transcript: styled, safe, and as long as they are.

A line is never broken here. The terminal wraps it, so what a person copies is what was written,
and a terminal that reflows does so by itself. For one that does not, rows are counted as a
terminal counts them.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text
from wcwidth import wcwidth

from etude.cli.visible import visible

Line = Text

_TAB = 4
_CONTEXT = 2
LONGEST = 2000
"""Characters of one line of a tool's output or of a diff that are shown."""


def line(*parts: str | tuple[str, str]) -> Line:
    """One line of pieces, each a text or a text with its style. All of it is made visible, line
    breaks too."""
    text = Text(no_wrap=True, end="")
    column = 0
    for part in parts:
        words, style = (part, "") if isinstance(part, str) else part
        shown, column = _expanded(visible(words).replace("\n", "\u240a"), column)
        text.append(shown, style or None)
    return text


def _expanded(text: str, column: int) -> tuple[str, int]:
    """Tabs as spaces, so that a line is as wide in every terminal; and the column at its end."""
    if "\t" not in text:
        return text, column + len(text)
    out: list[str] = []
    for char in text:
        out.append(" " * (_TAB - column % _TAB) if char == "\t" else char)
        column += len(out[-1])
    return "".join(out), column


def lines(text: str, style: str = "", *, first: str = "", rest: str = "") -> list[Line]:
    """A text as lines; `first` stands before the first one, `rest` before the others."""
    return [
        line((first if index == 0 else rest, style), (part, style))
        for index, part in enumerate(text.split("\n"))
    ]


def folded(text: str, most: int, style: str = "", *, first: str = "", rest: str = "") -> list[Line]:
    """The first `most` lines, and how many more there are. One more is shown rather than told."""
    parts = text.strip("\n").split("\n")
    kept = parts if len(parts) <= most + 1 else parts[:most]
    out = lines("\n".join(shortened(part) for part in kept), style, first=first, rest=rest)
    if len(kept) < len(parts):
        out.append(line((f"{rest}… {len(parts) - len(kept)} more lines", "dim")))
    return out


def shortened(text: str, most: int = LONGEST) -> str:
    """A text of one line, cut where it is far too long."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most} more characters"


def difference(
    old: str, new: str, indent: str = "", most: int | None = None, *, whole: bool = False
) -> list[Line]:
    """What changes from one text to another, in colour; at most `most` lines of it, and of long
    lines the beginning unless `whole`."""
    longest = max(len(old), len(new)) if whole else LONGEST
    before, after = _split(old), _split(new)
    groups = difflib.SequenceMatcher(None, before, after).get_grouped_opcodes(_CONTEXT)
    out: list[Line] = []
    for number, group in enumerate(groups):
        if number:
            out.append(line((f"{indent}…", "dim")))
        for kind, from_old, to_old, from_new, to_new in group:
            if kind == "equal":
                out += _marked(f"{indent}  ", before[from_old:to_old], "dim", longest)
                continue
            out += _marked(f"{indent}- ", before[from_old:to_old], "red", longest)
            out += _marked(f"{indent}+ ", after[from_new:to_new], "green", longest)
    if most is not None and len(out) > most + 1:
        return [*out[:most], line((f"{indent}… {len(out) - most} more lines", "dim"))]
    return out


def _marked(mark: str, parts: Sequence[str], style: str, longest: int) -> list[Line]:
    return [line((mark + shortened(part, longest), style)) for part in parts]


def _split(text: str) -> list[str]:
    """Lines without their ends; none for an empty text."""
    parts = text.split("\n")
    return parts[:-1] if parts[-1] == "" else parts


def patch(text: str) -> list[Line]:
    """A unified diff in colour."""
    return [line((shortened(part), _patch_style(part))) for part in text.rstrip("\n").split("\n")]


def _patch_style(part: str) -> str:
    if part.startswith(("+++", "---", "diff ", "index ")):
        return "bold"
    if part.startswith("@@"):
        return "cyan"
    return {"+": "green", "-": "red"}.get(part[:1], "")


def columns_of(char: str) -> int:
    """Cells that a character takes."""
    return max(0, wcwidth(char))


def row_starts(text: str, width: int) -> list[int]:
    """Where in a line each of its rows begins when a terminal of this width wraps it."""
    if text.isascii():
        return list(range(0, max(1, len(text)), width))
    starts, column = [0], 0
    for index, char in enumerate(text):
        cells = columns_of(char)
        if column and column + cells > width:
            starts.append(index)
            column = 0
        column += cells
    return starts


def last_rows(text: Sequence[Line], width: int, rows: int) -> list[Line]:
    """The end of a transcript that fills at most so many rows; its first line may be the rest of
    a longer one."""
    kept: list[Line] = []
    left = rows
    for item in reversed(text):
        if left < 1:
            break
        starts = row_starts(item.plain, width)
        if len(starts) > left:
            rest = item[starts[-left] :]
            rest.end = ""
            kept.append(rest)
            break
        kept.append(item)
        left -= len(starts)
    return kept[::-1]


def count_rows(text: Iterable[Line], width: int) -> int:
    """Rows that lines fill."""
    return sum(len(row_starts(item.plain, width)) for item in text)


class Ansi:
    """Lines as text for a terminal: their words and colours, nothing else. Without `colour` only
    the words. The environment says how many colours there are (TERM, COLORTERM, NO_COLOR)."""

    def __init__(self, *, colour: bool) -> None:
        self._buffer = io.StringIO()
        self._console = Console(
            file=self._buffer,
            force_terminal=colour,
            highlight=False,
            markup=False,
            emoji=False,
            width=80,
            legacy_windows=False,
        )

    def encode(self, text: Iterable[Line]) -> Iterator[str]:
        """Each line without a line end."""
        for item in text:
            self._console.print(item, soft_wrap=True, end="")
            yield self._buffer.getvalue()
            self._buffer.seek(0)
            self._buffer.truncate()
