import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from etude.errors import EtudeError
from etude.models.dialects.chatml import CALL_OPEN, THINK_OPEN
from etude.models.dialects.hermes import HermesRenderer
from etude.models.renderer import ToolSpec
from etude.models.tiny import make_tiny
from etude.models.tokenizer import ByteTokenizer, load_tokenizer

EDIT = ToolSpec(
    "edit",
    "replace old, which stands\nexactly once in the file, by new",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "old": {"type": "string"},
            "new": {"type": "string"},
            "count": {"type": "integer"},
        },
        "required": ["path", "old", "new"],
    },
)
HOSTILE = st.sampled_from(
    [
        *("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"),
        *("</tool_call>", "<tool_response>", "</tool_response>", '{"name": "'),
        *("\n", "\\", '"', "é🦊"),
    ]
)
HOSTILE_TEXT = st.lists(st.one_of(HOSTILE, st.text(max_size=8)), max_size=8).map("".join)
JSON = st.recursive(
    st.one_of(HOSTILE_TEXT, st.integers(), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(HOSTILE_TEXT, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(HOSTILE_TEXT.filter(bool), st.dictionaries(HOSTILE_TEXT, JSON, max_size=3)),
    max_size=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("hermes"))


@pytest.fixture(scope="module")
def tokens(folder: Path) -> ByteTokenizer:
    return ByteTokenizer(load_tokenizer(folder))


@pytest.fixture(scope="module", params=["text markers", "token markers"])
def renderer(request: pytest.FixtureRequest, folder: Path) -> HermesRenderer:
    """Models like SmolLM2 spell the markers as text; models like Qwen have tokens for them."""
    tokenizer = load_tokenizer(folder)
    if request.param == "token markers":
        tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
        tokenizer.add_tokens(["<think>", "</think>"])
    return HermesRenderer(tokenizer)


@settings(max_examples=300, deadline=None)
@given(text=HOSTILE_TEXT, calls=CALLS)
def test_parse_gives_back_what_the_expert_says(
    renderer: HermesRenderer, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    if text.lstrip().startswith(THINK_OPEN) or CALL_OPEN in text:
        with pytest.raises(ValueError, match="must neither"):
            renderer.expert(text, calls)
        return
    ids = renderer.expert(text, calls)
    turn = renderer.parse(ids)
    assert turn.text == text
    assert turn.thinking == ""
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [
        (name, arguments, None) for name, arguments in calls
    ]
    assert ids[-1] == renderer.stop_ids[0]
    assert turn.thinking_tokens + turn.call_tokens + turn.text_tokens == len(ids)
    assert (turn.call_tokens > 0) == bool(calls)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=5000), max_size=60))
def test_parse_survives_any_tokens_and_counts_each_once(
    renderer: HermesRenderer, ids: list[int]
) -> None:
    turn = renderer.parse(ids)
    assert turn.thinking_tokens + turn.call_tokens + turn.text_tokens == len(ids)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_parse_survives_broken_calls(
    renderer: HermesRenderer, tokens: ByteTokenizer, data: st.DataObject
) -> None:
    """A good turn, cut anywhere and with hostile text put anywhere."""
    good = (
        '<think>a</think>\ntext\n<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    )
    cut = good[: data.draw(st.integers(0, len(good)))]
    place = data.draw(st.integers(0, len(cut)))
    sampled = cut[:place] + data.draw(HOSTILE_TEXT) + cut[place:]
    ids = tokens.encode(sampled)
    turn = renderer.parse(ids)
    assert turn.thinking_tokens + turn.call_tokens + turn.text_tokens == len(ids)
    for call in turn.calls:
        assert call.error is None or call.arguments == {}
        assert call.raw in sampled


@pytest.mark.parametrize(
    ("sampled", "error"),
    [
        ('<tool_call>\n{"name": "edit", "arguments": {"a": 1}', "not valid JSON"),
        ('<tool_call>\n{"name": "edit", "arguments": {"a": 1}}\n', "not closed"),
        ('<tool_call>\n{"name": "edit"}\n</tool_call>', 'no "arguments"'),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', 'no "name"'),
        ('<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', 'no "name"'),
        ('<tool_call>\n{"name": "edit", "arguments": "x"}\n</tool_call>', "not a JSON object"),
        ('<tool_call>\n["edit"]\n</tool_call>', "not a JSON object"),
        ('<tool_call>\n{"name": "f", "arguments": {}, "id": 1}\n</tool_call>', "unknown keys"),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nso', "text after"),
        ('<tool_call>\n{"name": "f", "arguments": {}} x\n</tool_call>', "not closed"),
        ('<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>', "not valid JSON"),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>', "surrogate"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("<tool_call>", "not valid JSON"),
    ],
)
def test_malformed_calls_say_what_is_wrong(
    renderer: HermesRenderer, tokens: ByteTokenizer, sampled: str, error: str
) -> None:
    ids = tokens.encode(sampled)
    (call,) = renderer.parse(ids).calls
    assert call.error is not None
    assert error in call.error
    assert call.arguments == {}
    assert call.raw


def test_a_good_call_before_a_broken_one_is_kept(renderer: HermesRenderer) -> None:
    ids = renderer.expert("", [("f", {"a": 1}), ("g", {})])
    assert [call.name for call in renderer.parse(ids).calls] == ["f", "g"]
    first, second = renderer.parse(ids[:-4]).calls
    assert (first.error, first.arguments) == (None, {"a": 1})
    assert second.error is not None


def test_thinking_is_told_apart(renderer: HermesRenderer, tokens: ByteTokenizer) -> None:
    ids = [*tokens.encode("<think>\nwhy\n</think>\n\nhello"), renderer.stop_ids[0]]
    turn = renderer.parse(ids)
    assert (turn.thinking, turn.text, turn.call_tokens) == ("\nwhy\n", "hello", 0)
    assert turn.text_tokens == len(tokens.encode("hello")) + 1
    cut = renderer.parse(tokens.encode("<think>on and on"))
    assert (cut.thinking, cut.text, cut.text_tokens) == ("on and on", "", 0)


@settings(max_examples=200, deadline=None)
@given(system=HOSTILE_TEXT, user=HOSTILE_TEXT, result=HOSTILE_TEXT)
def test_text_never_becomes_a_special_token(
    renderer: HermesRenderer, system: str, user: str, result: str
) -> None:
    start, end = renderer.open("", [], "")[0], renderer.stop_ids[0]
    prompt = renderer.open(system, [EDIT], user)
    assert [token for token in prompt if token in (start, *renderer.stop_ids)] == [
        start,
        end,
        start,
        end,
        start,
    ]
    follow = renderer.follow([end], results=[result, result], user=user)
    assert [token for token in follow if token in (start, *renderer.stop_ids)] == [
        start,
        end,
        start,
        end,
        start,
    ]
    assert renderer.decode(prompt).startswith(
        f"<|im_start|>system\n{system}" + "\n\n" * bool(system) + "Tools:\nedit("
    )
    assert renderer.decode(prompt).endswith(
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_conversation_reads_as_chatml(renderer: HermesRenderer) -> None:
    prompt = renderer.open("Be brief.", [EDIT], "Fix it.")
    answer = renderer.expert("", [("edit", {"path": "a", "old": "b", "new": "c"})])
    shown = renderer.decode(prompt + answer + renderer.follow(answer, results=["done"]))
    assert shown == (
        "<|im_start|>system\nBe brief.\n\nTools:\n"
        "edit(path, old, new, count?: integer): replace old, which stands exactly once in the "
        "file, by new\nTo call one, end your answer with:\n<tool_call>\n"
        '{"name": TOOL, "arguments": {NAME: VALUE, ...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nFix it.<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "edit", "arguments": {"path": "a", "old": "b", "new": "c"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\ndone\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_follow_ends_a_turn_that_was_cut(renderer: HermesRenderer) -> None:
    whole = renderer.expert("a", [])
    assert renderer.follow(whole[:-1], user="b") == [whole[-1], *renderer.follow(whole, user="b")]


def test_markers_are_tokens_only_in_our_own_words(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    marker = tokenizer.token_to_id("<tool_call>")
    renderer = HermesRenderer(tokenizer)
    assert marker in renderer.expert("", [("f", {})])
    assert marker not in renderer.open("", [], "<tool_call>")
    assert marker not in renderer.expert("", [("f", {"a": "<tool_call>"})])[1:]


def test_agrees_with_the_tokenizer_on_plain_text(folder: Path, tokens: ByteTokenizer) -> None:
    tokenizer = load_tokenizer(folder)
    text = json.dumps({"a": "é\n\t🦊 123"}, ensure_ascii=False) + inspect.getsource(json)
    ids = tokens.encode(text)
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert tokens.decode(ids) == text


def test_a_tokenizer_without_chat_turns_is_refused(folder: Path) -> None:
    description = json.loads(load_tokenizer(folder).to_str())
    description["added_tokens"] = []
    with pytest.raises(EtudeError, match="im_start"):
        HermesRenderer(Tokenizer.from_str(json.dumps(description)))
    description["decoder"] = {"type": "Fuse"}
    with pytest.raises(EtudeError, match="byte-level"):
        HermesRenderer(Tokenizer.from_str(json.dumps(description)))
