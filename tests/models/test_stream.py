"""Cutting a turn, against the same rules written for whole texts."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.models.stream import Delta, MarkCutter, Marks, Piece, TurnReader

THINK = ("<think>", "</think>")
CALL = "<call>"
PIECES = st.lists(
    st.sampled_from([*THINK, CALL, "\n", "\n\n", "\r\n", " ", "a", "é", "<", "<th", "</thin"])
    | st.sampled_from(["<cal", "l>", "think>", "🦊"]),
    max_size=10,
).map("".join)


def _whole(text: str, before: int, gap: int | None) -> tuple[str, str, str]:
    """Thinking, text and calls of a whole turn, by regular expressions."""
    thinking, rest = "", text
    if (opened := re.match(r"\s*<think>", text)) is not None:
        thinking, closed, rest = text[opened.end() :].partition("</think>")
        if closed:
            rest = re.sub(r"^[\r\n]*" if gap is None else rf"^\n{{0,{gap}}}", "", rest)
    said, found, called = rest.partition(CALL)
    if found:
        said = re.sub(rf"\n{{0,{before}}}\Z", "", said)
    return thinking, said, found + called


def _read(reader: TurnReader, tokens: list[int]) -> list[Delta]:
    return [delta for token in tokens for delta in reader.feed(token)] + reader.end()


def _of(kind: str, deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


@settings(max_examples=400, deadline=None)
@given(
    text=PIECES,
    before=st.integers(0, 2),
    gap=st.none() | st.integers(0, 2),
    cuts=st.lists(st.integers(0, 80)),
)
def test_every_split_of_a_text_gives_the_same_turn(
    text: str, before: int, gap: int | None, cuts: list[int]
) -> None:
    """Split anywhere, inside characters too: markers found in the letters."""
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:end] for start, end in pairwise(edges)]
    reader = TurnReader(
        MarkCutter(Marks(CALL, THINK, gap=gap, before=before)), pieces.__getitem__, {}, ()
    )
    deltas = _read(reader, list(range(len(pieces))))
    assert (_of("thinking", deltas), _of("text", deltas), _of("call", deltas)) == _whole(
        text, before, gap
    )
    assert b"".join(piece.data for piece in reader.pieces) == data
    assert sum(reader.counts().values()) == len(pieces)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*THINK, CALL, "\n", " ", "a", "é", "(think)", "(call)"])),
    before=st.integers(0, 2),
    gap=st.none() | st.integers(0, 2),
)
def test_markers_that_are_tokens(parts: list[str], before: int, gap: int | None) -> None:
    """Each part is a token. In letters, the same markers mean nothing."""
    spelled = {"(think)": "<think>", "(call)": CALL}
    tokens = [spelled.get(part, part).encode() for part in parts]
    markers = {index: part for index, part in enumerate(parts) if part in (*THINK, CALL)}
    marks = Marks(CALL, THINK, frozenset([*THINK, CALL]), gap=gap, before=before)
    reader = TurnReader(MarkCutter(marks), tokens.__getitem__, markers, ())
    deltas = _read(reader, list(range(len(tokens))))
    thinking, said, called = _whole("".join(parts), before, gap)
    found = (_of("thinking", deltas), _of("text", deltas), _of("call", deltas))
    expected = [thinking, said, called]
    for marked, letters in spelled.items():
        expected = [text.replace(marked, letters) for text in expected]
    assert found == tuple(expected)
    assert sum(reader.counts().values()) == len(tokens)


def test_thinking_that_the_prompt_opened() -> None:
    marks = Marks(CALL, THINK, frozenset(THINK), gap=2, opened=True)
    tokens = [b"why", b"</think>", b"\n\n", b"so"]
    reader = TurnReader(MarkCutter(marks), tokens.__getitem__, {1: "</think>"}, ())
    assert _read(reader, [0, 1, 2, 3]) == [Delta("thinking", "why"), Delta("text", "so")]
    assert reader.counts() == {"thinking": 3, "text": 1, "call": 0}


def test_nothing_settled_is_held_back() -> None:
    """Only what may still become a marker waits, and no longer than until it cannot."""
    tokens = [b"a", b"<", b"cal", b"m>\n", b"b", b"\n<call", b">x"]
    reader = TurnReader(MarkCutter(Marks(CALL, THINK)), tokens.__getitem__, {}, ())
    shown = [[(d.kind, d.text) for d in reader.feed(token)] for token in range(len(tokens))]
    assert shown == [
        [("text", "a")],
        [],
        [],
        [("text", "<calm>")],
        [("text", "\nb")],
        [],
        [("call", "<call>x")],
    ]


def test_a_stop_id_ends_only_the_end() -> None:
    tokens = [b"a", b"<stop>", b"b", b"<stop>"]
    reader = TurnReader(MarkCutter(Marks(CALL)), tokens.__getitem__, {}, (1, 3))
    assert _read(reader, [0, 1, 2, 3]) == [
        Delta("text", "a"),
        Delta("text", "<stop>b"),
    ]
    assert reader.counts()["text"] == 4


def test_half_a_character_waits_for_the_other_half() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    reader = TurnReader(MarkCutter(Marks(CALL)), [first, second].__getitem__, {}, ())
    assert reader.feed(0) == []
    assert reader.feed(1) == [Delta("text", "é")]
    assert reader.feed(0) == []
    assert reader.end() == [Delta("text", "\N{REPLACEMENT CHARACTER}")]


@pytest.mark.parametrize("data", [b"\n", b"<", b"<think>", b"<tool", b"</think>", b"a"])
def test_long_turns_are_read_in_linear_time(data: bytes) -> None:
    """A model that repeats itself for 20,000 tokens does not stop the event loop."""
    import time

    reader = TurnReader(MarkCutter(Marks(CALL, THINK)), lambda _: data, {}, ())
    started = time.perf_counter()
    for _ in range(20_000):
        reader.feed(0)
    reader.end()
    assert sum(reader.counts().values()) == 20_000
    assert time.perf_counter() - started < 5


def test_pieces_say_what_they_are() -> None:
    cutter = MarkCutter(Marks(CALL, THINK, frozenset([*THINK, CALL])))
    pieces = cutter.feed(b"<think>", "<think>") + cutter.feed(b"x", None)
    pieces += cutter.feed(b"</think>", "</think>") + cutter.feed(b"\ny\n", None)
    pieces += cutter.feed(b"<call>", CALL) + cutter.end()
    assert pieces == [
        Piece("thinking", b"<think>", False, "<think>"),
        Piece("thinking", b"x"),
        Piece("thinking", b"</think>", False, "</think>"),
        Piece("thinking", b"\n", False),
        Piece("text", b"y"),
        Piece("text", b"\n", False),
        Piece("call", b"<call>", True, CALL),
    ]
