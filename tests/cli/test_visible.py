"""No text from outside can forge the screen."""

from __future__ import annotations

import itertools
import re
import unicodedata

import pyte
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.cli.lines import Ansi, difference, folded, last_rows, line, lines, patch, row_starts
from etude.cli.show import Show
from etude.cli.visible import visible
from etude.models.stream import Delta
from etude.records import Event, EventKind

UNTIMED = settings(deadline=None)

HOSTILE = st.sampled_from(
    [
        "\x1b[2J",
        "\x1b[31m",
        "\x1b]0;title\x07",
        "\x1b]8;;http://x\x1b\\",
        "\x9b2J",
        "\x1bc",
        "\x1b[?1049h",
        "\r",
        "\b\b",
        "\x7f",
        "\x00",
        "\u202e",
        "\u2066",
        "\u200b",
        "\u2028",
        "\ufeff",
        "\U000e0041",
        "\ud800",
        "[bold red]x[/]",
        "\n",
        "\t",
        "\x0e",
        "\x85",
    ]
)
TEXT = st.lists(st.one_of(st.text(st.characters(), max_size=20), HOSTILE), max_size=12).map("".join)


def forbidden(text: str) -> set[str]:
    """Characters that could move, hide or reorder; newline and tab may stay."""
    return {
        char
        for char in text
        if char not in "\n\t"
        and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn")
    }


@UNTIMED
@given(TEXT)
def test_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    shown = visible(text)
    assert not forbidden(shown)
    assert visible(shown) == shown
    shown.encode()  # No lone surrogate is left.


@UNTIMED
@given(TEXT, st.data())
def test_a_text_may_be_cut_anywhere(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    assert visible(text[:at]) + visible(text[at:]) == visible(text)


@UNTIMED
@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    hidden = set("\u115f\u1160\u3164\uffa0\u17b4\u17b5")
    assert visible(text) == text or hidden & set(text)


SGR = re.compile(r"\x1b\[[0-9;]*m")


@UNTIMED
@given(TEXT, st.sampled_from(["", "red", "bold", "dim italic"]))
def test_lines_hold_colours_and_nothing_else(text: str, style: str) -> None:
    made = [
        line("a", (text, style)),
        *lines(text, style, first="› ", rest="  "),
        *folded(text, 3, style),
        *difference(text, text[::-1], "  ", 8),
        *difference("", text, whole=True),
        *patch(text),
    ]
    for encoded in Ansi(colour=True).encode(made):
        assert not forbidden(SGR.sub("", encoded))
        assert "\n" not in encoded and "\t" not in encoded


@UNTIMED
@given(TEXT)
def test_a_terminal_that_is_shown_it_keeps_cursor_colours_and_title(text: str) -> None:
    """The oracle is a terminal emulator."""
    screen = pyte.Screen(400, 50)
    stream = pyte.Stream(screen)
    stream.feed("\x1b]2;mine\x07")
    modes = set(screen.mode)
    shown = lines(text)[:40]
    for encoded in Ansi(colour=True).encode(item[:300] for item in shown):
        stream.feed(f"{encoded}\r\n")
    assert screen.title == "mine"
    assert screen.mode == modes
    assert screen.cursor.x == 0
    rows = sum(len(row_starts(item.plain[:300], 400)) for item in shown)
    assert screen.cursor.y == min(49, rows)
    attributes = screen.cursor.attrs
    assert (attributes.fg, attributes.bg, attributes.bold) == ("default", "default", False)
    assert not any(cell.reverse for row in screen.buffer.values() for cell in row.values())


@UNTIMED
@given(TEXT, TEXT, st.lists(st.integers(0, 400), max_size=6))
def test_what_is_streamed_is_safe_however_it_is_cut(
    thinking: str, text: str, cuts: list[int]
) -> None:
    """And a session read from its log shows the same lines as one that was streamed."""
    streamed, replayed = Show(), Show()
    out = []
    for kind, whole in (("thinking", thinking), ("text", text)):
        edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
        for start, end in itertools.pairwise(edges):
            out += streamed.delta(Delta(kind, whole[start:end]))  # type: ignore[arg-type]
            assert not forbidden(visible(streamed.partial[0]))
    said = Event(EventKind.ASSISTANT, 0, {"text": text, "thinking": thinking})
    out += streamed.event(said)
    again = replayed.event(said)
    assert [item.plain for item in out] == [item.plain for item in again]
    for encoded in Ansi(colour=True).encode(out):
        assert not forbidden(SGR.sub("", encoded))


@UNTIMED
@given(TEXT, TEXT, TEXT)
def test_names_arguments_and_results_are_safe(name: str, argument: str, result: str) -> None:
    show = Show()
    call = {"id": "1", "name": name, "malformed": False}
    out = show.event(
        Event(EventKind.TOOL_CALL, 0, {**call, "arguments": {"path": argument, "new": result}})
    )
    out += show.event(
        Event(EventKind.TOOL_RESULT, 0, {"id": "1", "name": name, "text": result} | NO_ERROR)
    )
    out += show.event(Event(EventKind.STOP, 0, {"reason": name, "detail": argument}))
    out += show.event(Event(EventKind.USER, 0, {"text": result}))
    for encoded in Ansi(colour=True).encode(out):
        assert not forbidden(SGR.sub("", encoded))


NO_ERROR = {"error_class": None}
NARROW = st.text(st.sampled_from("ab éx-"), max_size=60)
COMBINING = st.text(st.sampled_from("ab\u0301"), max_size=15)
WIDE = st.text(st.sampled_from("漢字한"), max_size=40)
"""The emulator cuts a wide character that does not fit where terminals wrap it, and wraps before an
accent behind a full row where terminals put it on that row. So wide ones are shown at even widths
only and accents in rows that do not fill; `test_tmux` has the other cases."""
LINES_AND_WIDTH = st.one_of(
    st.tuples(st.lists(NARROW, min_size=1, max_size=8), st.integers(2, 30)),
    st.tuples(st.lists(COMBINING, min_size=1, max_size=8), st.integers(16, 30)),
    st.tuples(st.lists(WIDE, min_size=1, max_size=8), st.integers(1, 15).map(lambda n: 2 * n)),
)


@UNTIMED
@given(LINES_AND_WIDTH)
def test_rows_are_counted_as_a_terminal_wraps(case: tuple[list[str], int]) -> None:
    (text, *_), width = case
    screen = pyte.Screen(width, 80)
    pyte.Stream(screen).feed(f"{text}\r\n")
    assert screen.cursor.y == len(row_starts(text, width))


@UNTIMED
@given(LINES_AND_WIDTH, st.integers(1, 20))
def test_the_end_of_a_transcript_is_what_a_terminal_would_still_show(
    case: tuple[list[str], int], rows: int
) -> None:
    """Writing only the last rows gives the screen that writing everything gives."""
    texts, width = case

    def shown(items: list[str]) -> list[str]:
        # One more row: the cursor stands on it.
        screen = pyte.Screen(width, rows + 1)
        stream = pyte.Stream(screen)
        for item in items:
            stream.feed(f"{item}\r\n")
        return [text.rstrip() for text in screen.display]

    kept = last_rows([line(text) for text in texts], width, rows)
    assert shown([item.plain for item in kept]) == shown(texts)
