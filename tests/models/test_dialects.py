"""What every dialect must hold, for all of them at once."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from dialect_cases import (
    HOSTILE_TEXT,
    JSON,
    MARKERS,
    NAME,
    NAMES,
    Case,
    case,
    tool_and_arguments,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.conversation import Conversation
from etude.inference.protocol import Completion, Finish
from etude.models.renderer import ParsedTurn, ToolSpec
from etude.models.stream import Delta
from etude.records import PolicyVersion

QUICK = settings(max_examples=30, deadline=None)
SAY = ToolSpec("say", "says it", {"type": "object", "properties": {"text": {"type": "string"}}})


@pytest.fixture(scope="module", params=NAMES)
def dialect(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def _tokens(turn: ParsedTurn) -> int:
    return turn.thinking_tokens + turn.text_tokens + turn.call_tokens


def _refused(dialect: Case, text: str) -> bool:
    """The texts that a dialect without tokens for its markers cannot say."""
    start = text.lstrip()
    refused = {
        "hermes in letters": start.startswith("<think>") or "<tool_call>" in text,
        "hermes": start.startswith("<think>") or "<tool_call>" in text,
        "kimi": start.startswith("<think>"),
        "deepseek-v3": start.startswith("<think>"),
        "llama": start.startswith('{"name": "'),
    }
    return refused.get(dialect.name, False)


def _streamed(dialect: Case, ids: Sequence[int]) -> tuple[list[Delta], dict[str, str]]:
    stream = dialect.renderer.stream()
    deltas = [delta for token in ids for delta in stream.feed(token)] + stream.end()
    kinds: dict[str, str] = {"thinking": "", "text": "", "call": ""}
    for delta in deltas:
        kinds[delta.kind] += delta.text
    return deltas, kinds


@settings(max_examples=60, deadline=None)
@given(text=HOSTILE_TEXT, made=st.lists(tool_and_arguments(), max_size=3))
def test_parse_gives_back_what_the_expert_says(
    dialect: Case, text: str, made: list[tuple[ToolSpec | None, str, dict[str, Any]]]
) -> None:
    known = {name: tool for tool, name, _ in reversed(made)}
    tools = [tool for tool in known.values() if tool is not None]
    calls = [(name, arguments) for tool, name, arguments in made if known[name] is tool]
    if _refused(dialect, text):
        with pytest.raises(ValueError, match="text"):
            dialect.renderer.expert(text, calls, tools)
        return
    ids = dialect.renderer.expert(text, calls, tools)
    turn = dialect.renderer.parse(ids, tools)
    assert turn.text == text
    assert turn.thinking.strip() == ""
    # As JSON, which tells 1, 1.0 and true from one another.
    found = [(call.name, json.dumps(call.arguments), call.error) for call in turn.calls]
    assert found == [(name, json.dumps(arguments), None) for name, arguments in calls]
    assert ids[-1] in dialect.renderer.stop_ids
    assert not set(ids[:-1]) & set(dialect.renderer.stop_ids)
    assert _tokens(turn) == len(ids)
    assert (turn.call_tokens > 0) == bool(calls)


@QUICK
@given(data=st.data())
def test_text_never_becomes_a_special_token(dialect: Case, data: st.DataObject) -> None:
    """A prompt has the same special tokens whatever people, files and tools say in it."""
    renderer, text = dialect.renderer, lambda: data.draw(HOSTILE_TEXT)
    user, results = text(), [text(), text()]

    def shown(system: str, said: str, told: Sequence[str], hint: str) -> list[int]:
        schema = {"type": "object", "properties": {"a": {"type": "string", "description": hint}}}
        prompt = renderer.open(system, [ToolSpec("f", hint, schema)], said)
        called = renderer.expert("", [("f", {"a": hint}), ("f", {"a": said})])
        return prompt + called + renderer.follow(called, results=told, user=said)

    ids = shown(text() or "s", user, results, text())
    assert dialect.special(ids) == dialect.special(shown("s", "u", ["r", "r"], "d"))
    assert set(dialect.renderer.stop_ids) & set(ids)
    assert user in renderer.decode(renderer.open("", [], user))
    ended = renderer.expert("", [])
    following = renderer.decode(renderer.follow(ended, results=results, user=user))
    assert user in following
    for result in results:
        assert (json.dumps(result, ensure_ascii=False) if "llama" in dialect.name else result) in (
            following
        )


@QUICK
@given(data=st.data())
def test_every_prompt_begins_with_the_last_one_and_its_completion(
    dialect: Case, data: st.DataObject
) -> None:
    """Random conversations: answers whole, cut, and of any tokens at all."""
    renderer = dialect.renderer
    conversation = Conversation(renderer, "be brief", [SAY])
    conversation.say(data.draw(HOSTILE_TEXT))
    before: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        prompt = conversation.prompt()
        assert prompt[: len(before)] == before
        whole = renderer.expert("ok", data.draw(st.sampled_from([[], [("say", {"text": "x"})]])))
        wild = st.lists(st.integers(0, dialect.tokenizer.get_vocab_size() + 5), max_size=9)
        cut = whole[: data.draw(st.integers(1, len(whole)))]
        sampled = data.draw(wild | st.just(cut))
        conversation.commit(prompt, _completion(sampled))
        before = prompt + sampled
        for _ in renderer.parse(sampled).calls:
            conversation.answer(data.draw(HOSTILE_TEXT))
        if data.draw(st.booleans()):
            conversation.say(data.draw(HOSTILE_TEXT))
    assert conversation.prompt()[: len(before)] == before


def _completion(ids: list[int]) -> Completion:
    import numpy as np

    count = len(ids)
    versions = np.full(count, PolicyVersion(0, 0).encode(), np.int64)
    zeros = np.zeros(count, np.float32)
    return Completion(np.array(ids, np.int32), zeros, versions, Finish.LENGTH, 0, 0)


_PIECES = st.lists(
    st.sampled_from([*MARKERS, "{", "}", '{"a": 1}', "\n", "f", "functions.f:0", " to=f ", "é"])
    | st.sampled_from(["<function=f>\n", "<parameter=a>\n", "</parameter>\n", "</function>\n"])
    | st.sampled_from(["analysis", "commentary", '{"name": "f", "parameters": {}}', "; "]),
    max_size=14,
).map("".join)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_are_parsed_and_streamed_alike(dialect: Case, data: st.DataObject) -> None:
    """Markers as tokens in any order, then anything; the stream shows what `parse` says."""
    vocabulary = dialect.tokenizer.get_vocab_size() + 5
    ids = dialect.sampled(data.draw(_PIECES)) + data.draw(
        st.lists(st.integers(0, vocabulary), max_size=6)
    )
    turn = dialect.renderer.parse(ids)
    assert _tokens(turn) == len(ids)
    deltas, kinds = _streamed(dialect, ids)
    assert (kinds["thinking"], kinds["text"]) == (turn.thinking, turn.text)
    assert all(delta.text for delta in deltas)
    assert bool(kinds["call"]) == bool(turn.calls) == (turn.call_tokens > 0)
    position = 0
    for call in turn.calls:
        assert call.error is None or call.arguments == {}
        position = kinds["call"].index(call.raw, position) + len(call.raw)


@QUICK
@given(text=HOSTILE_TEXT, name=NAME, value=JSON, data=st.data())
def test_every_cut_of_a_good_turn_is_read(
    dialect: Case, text: str, name: str, value: Any, data: st.DataObject
) -> None:
    if _refused(dialect, text):
        text = ""
    ids = dialect.renderer.expert(text, [(name, {"a": value}), (name, {})])
    whole = dialect.renderer.parse(ids)
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    turn = dialect.renderer.parse(cut)
    assert _tokens(turn) == len(cut)
    _, kinds = _streamed(dialect, cut)
    assert (kinds["thinking"], kinds["text"]) == (turn.thinking, turn.text)
    for call, full in zip(turn.calls, whole.calls, strict=False):
        assert call.error is not None or call.arguments == full.arguments


@QUICK
@given(text=st.text(st.sampled_from("ab <>/\n\rthinkool_call{}é🦊"), max_size=30), data=st.data())
def test_how_a_text_is_cut_into_tokens_does_not_matter(
    dialect: Case, text: str, data: st.DataObject
) -> None:
    """The same letters in other tokens give the same turn."""
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(MARKERS)) + text[at:]
    whole = dialect.renderer.parse(_in_letters(dialect, text))
    bytewise = [_byte_tokens(dialect.name)[byte] for byte in text.encode()]
    single = dialect.renderer.parse(bytewise)
    assert (whole.thinking, whole.text) == (single.thinking, single.text)
    assert [call.raw for call in whole.calls] == [call.raw for call in single.calls]


def _in_letters(dialect: Case, text: str) -> list[int]:
    return dialect.renderer._tokens.encode(text)


@cache
def _byte_tokens(name: str) -> dict[int, int]:
    """The token of each byte."""
    tokens = case(name).renderer._tokens
    spelled = {tokens.token_bytes(token): token for token in range(600)}
    return {byte: spelled[bytes([byte])] for byte in range(256)}


def test_markers_in_letters_are_only_text(dialect: Case) -> None:
    """A model that quotes a file makes no call, where the family has tokens for its markers."""
    if dialect.name.startswith("hermes"):
        pytest.skip("Hermes reads markers in letters")
    calls = dialect.renderer.expert("", [("say", {"text": "a"}), ("say", {"text": "b"})])
    opening = dialect.renderer.parse(dialect.renderer.expert("a", [])).thinking
    quoted = _in_letters(dialect, f"I read: {dialect.renderer.decode(calls)}")
    assert dialect.renderer.parse(quoted).calls == ()
    assert opening.strip() == ""


def test_text_is_shown_as_it_comes(dialect: Case) -> None:
    """Nothing but the beginning of a marker and line breaks before one are held back."""
    ids = dialect.renderer.expert("one two three four", [])
    stream = dialect.renderer.stream()
    shown = "".join(d.text for token in ids[:-1] for d in stream.feed(token) if d.kind == "text")
    assert shown == "one two three four"
    assert stream.end() == []


def test_thinking_is_told_apart(dialect: Case) -> None:
    sampled = {
        "harmony": "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
        "<|channel|>final<|message|>so<|return|>",
        "glm": "\n<think>why</think>\nso<|user|>",
        "qwen3.5": "why</think>\n\nso<|im_end|>",
        "llama": None,
    }.get(dialect.name, "<think>why</think>so")
    if sampled is None:
        pytest.skip("Llama 3 does not think")
    turn = dialect.renderer.parse(dialect.sampled(sampled))
    assert (turn.thinking, turn.text, turn.calls) == ("why", "so", ())
    assert turn.thinking_tokens > 0
    assert turn.text_tokens > 0
    assert turn.call_tokens == 0


@pytest.mark.parametrize("nested", [300, 990, 20_000])
def test_deep_nesting_is_a_malformed_call(dialect: Case, nested: int) -> None:
    """Neither the parser nor whoever writes the call down runs out of stack."""
    good = dialect.renderer.decode(dialect.renderer.expert("", [("f", {"a": [7]})]))
    turn = dialect.renderer.parse(dialect.sampled(good.replace("7", "[" * nested + "]" * nested)))
    (call,) = turn.calls
    if "qwen" in dialect.name or dialect.name == "glm":
        assert call.error is None
        assert isinstance(call.arguments["a"], str)
    else:
        assert call.error is not None


def test_numbers_beyond_floating_point_are_no_arguments(dialect: Case) -> None:
    good = dialect.renderer.decode(dialect.renderer.expert("", [("f", {"a": [7]})]))
    (call,) = dialect.renderer.parse(dialect.sampled(good.replace("7", "1e999"))).calls
    assert call.error is not None or call.arguments == {"a": "[1e999]"}
