"""Server-sent events and chunks: cut anywhere, joined to the same answer."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.inference import openai_stream
from etude.inference.openai_stream import EventLines, Malformed, Refused, ReplyBuilder

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def reference(text: str) -> list[str]:
    """The events of a whole stream, by the letter of the standard."""
    events: list[str] = []
    data: list[str] = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if data:
                events.append("\n".join(data))
            data = []
        elif line == "data" or line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
    return events


@given(
    st.lists(
        st.tuples(st.sampled_from(["data: é1", "data:2", ":x", "event: y", "data", ""]), LINE_ENDS)
    ),
    st.lists(st.integers(0, 60)),
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(
    lines: list[tuple[str, str]], cuts: list[int]
) -> None:
    # A lone \r before a \n would be read as one line end.
    text = "".join(line + end for line, end in lines) + "\n\n"
    data = text.encode()
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parser = EventLines()
    events = [event for start, end in pairwise(marks) for event in parser.feed(data[start:end])]
    assert events + parser.end() == reference(text)


def test_a_last_event_without_its_empty_line_counts() -> None:
    parser = EventLines()
    assert parser.feed(b"data: 1\n\ndata: 2") == ["1"]
    assert parser.end() == ["2"]


def test_a_line_or_an_answer_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_stream, "_LONGEST_LINE", 1000)
    monkeypatch.setattr(openai_stream, "_LONGEST_REPLY", 5000)
    with pytest.raises(Malformed, match="line"):
        EventLines().feed(b"x" * 1001)
    parser = EventLines()
    with pytest.raises(Malformed, match="answer"):
        for _ in range(100):
            parser.feed(b"data: " + b"x" * 100 + b"\n\n")


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)


@given(TEXT, TEXT, st.lists(st.tuples(st.text("ab", min_size=1), TEXT), max_size=3), st.data())
def test_an_answer_does_not_depend_on_its_pieces(
    thinking: str, text: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    def pieces(whole: str) -> list[str]:
        size = data.draw(st.integers(1, 8))
        return [whole[at : at + size] for at in range(0, len(whole), size)]

    shown: list[tuple[str, str]] = []
    builder = ReplyBuilder(lambda kind, piece: shown.append((kind, piece)))
    for piece in pieces(thinking):
        builder.chunk(chunk(reasoning_content=piece))
    for piece in pieces(text):
        builder.chunk(chunk(content=piece))
    for index, (name, arguments) in enumerate(calls):
        call = {"index": index, "id": f"c{index}", "function": {"name": name, "arguments": ""}}
        builder.chunk(chunk(tool_calls=[call]))
        for piece in pieces(arguments):
            part = {"index": index, "function": {"arguments": piece}}
            builder.chunk(chunk(tool_calls=[part]))
    builder.event("[DONE]")
    builder.event("after the end nothing counts")
    reply = builder.reply()
    assert (reply.thinking, reply.text) == (thinking, text)
    assert [(call.name, call.arguments) for call in reply.calls] == calls
    assert "".join(piece for kind, piece in shown if kind == "text") == text
    assert builder.began == bool(thinking or text or calls)


def test_interleaved_calls_are_told_apart_by_index() -> None:
    builder = ReplyBuilder()
    for index in (0, 1):
        start = {"index": index, "id": f"c{index}", "function": {"name": "f"}}
        builder.chunk(chunk(tool_calls=[start]))
    for index, piece in [(0, "a"), (1, "x"), (0, "b"), (1, "y")]:
        builder.chunk(chunk(tool_calls=[{"index": index, "function": {"arguments": piece}}]))
    builder.event("[DONE]")
    assert [call.arguments for call in builder.reply().calls] == ["ab", "xy"]


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 7, "completion_tokens": 2, "prompt_cache_hit_tokens": 9},
        {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 7},
            "completion_tokens_details": None,
        },
    ],
)
def test_counts(usage: dict[str, Any]) -> None:
    builder = ReplyBuilder()
    builder.chunk({"choices": [], "usage": usage})
    builder.done = True
    found = builder.reply().usage
    assert found is not None
    assert (found.prompt, found.cached, found.sampled, found.thinking) == (7, 7, 2, None)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -1, "completion_tokens": 2},
        {"prompt_tokens": True, "completion_tokens": 2},
        {"prompt_tokens": "7", "completion_tokens": 2},
        {"completion_tokens": 2},
        {},
    ],
)
def test_counts_that_are_none_are_not_believed(usage: dict[str, Any]) -> None:
    builder = ReplyBuilder()
    builder.chunk({"choices": [], "usage": usage})
    builder.done = True
    assert builder.reply().usage is None


KEYS = ["choices", "delta", "message", "content", "tool_calls", "function", "index", "id", "name"]
KEYS += ["arguments", "usage", "finish_reason", "error", "reasoning", "type"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "message",
                    "content",
                    "tool_calls",
                    "function",
                    "index",
                    "id",
                    "name",
                    "arguments",
                    "usage",
                    "finish_reason",
                    "error",
                    "reasoning",
                    "type",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)


@given(st.lists(st.one_of(JSON.map(json.dumps), st.text(max_size=20)), max_size=4))
def test_whatever_comes_there_is_an_answer_or_one_of_two_errors(events: list[str]) -> None:
    builder = ReplyBuilder(lambda kind, piece: piece.encode())
    try:
        for event in events:
            builder.event(event)
        reply = builder.reply()
    except (Malformed, Refused):
        return
    reply.text.encode()
    assert all(isinstance(call.arguments, str) for call in reply.calls)
