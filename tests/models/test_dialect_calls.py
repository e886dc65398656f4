"""Calls that models get wrong, and what they are told; arguments without JSON."""

import json

import pytest
from dialect_cases import HOSTILE_TEXT, JSON, case
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etude.models.dialects.arguments import ArgumentText
from etude.models.dialects.typescript import namespace
from etude.models.renderer import ToolSpec

WRITE = ToolSpec(
    "write",
    "writes a file",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "any": {}},
    },
)
_SECTION = "<|tool_calls_section_begin|>"
_KIMI = f"{_SECTION}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"


@pytest.mark.parametrize(
    ("name", "sampled", "error"),
    [
        ("kimi", _SECTION, "no call was made"),
        ("kimi", f"{_KIMI}{{}}", "not closed"),
        ("kimi", f"{_KIMI}{{<|tool_call_end|>", "not valid JSON"),
        ("kimi", f"{_KIMI}[]<|tool_call_end|>", "not a JSON object"),
        ("kimi", f"{_KIMI}{{}}<|tool_call_end|>so", "text after"),
        ("kimi", f"{_SECTION}<|tool_call_begin|>f<|tool_call_end|>", "functions.NAME"),
        ("deepseek", f"{_DEEPSEEK}{{}}", "not closed"),
        ("deepseek", f'{_DEEPSEEK}{{"a": "\\ud800"}}<｜tool▁call▁end｜>', "surrogate"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "NAME"),
        ("glm", "<tool_call>f\n", "not closed"),
        ("glm", "<tool_call></tool_call>", "no name"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>x</tool_call>", "not a pair"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>", "not a pair"),
        ("glm", "<tool_call>f\n</tool_call>so", "text after"),
        ("qwen-coder", "<tool_call>\n</tool_call>", "does not begin"),
        ("qwen-coder", "<tool_call>\n<function=f>\n</tool_call>", "does not end"),
        (
            "qwen-coder",
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>",
            "parameter a is not closed",
        ),
        ("qwen-coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>so", "text after"),
        ("llama", '{"name": "f", "parameters": {', "not valid JSON"),
        ("llama", '{"name": "f", "parameters": 3}', "parameters"),
        ("llama", '<|python_tag|>{"parameters": {}}', '"name"'),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}} so', "text after"),
        ("llama", "<|python_tag|>print(1)", "not valid JSON"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{<|call|>", "not valid JSON"),
    ],
)
def test_malformed_calls_say_what_is_wrong(name: str, sampled: str, error: str) -> None:
    (call,) = case(name).renderer.parse(case(name).sampled(sampled)).calls
    assert call.error is not None
    assert error in call.error
    assert call.arguments == {}
    assert call.raw


def test_a_good_call_beside_a_broken_one_is_kept() -> None:
    calls = [("f", {"a": "x"}), ("g", {})]
    for name in ("glm", "kimi", "deepseek", "deepseek-v3", "qwen-coder", "qwen3.5", "llama"):
        given_case = case(name)
        ids = given_case.renderer.expert("", calls)
        first, second = given_case.renderer.parse(ids[:-4]).calls
        assert (first.name, first.arguments, first.error) == ("f", {"a": "x"}, None), name
        assert second.error is not None, name


def test_an_argument_may_hold_the_tags_of_a_call() -> None:
    """As text always, and as tokens where a model quotes itself."""
    glm = case("glm").sampled(
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a <tool_call>b</tool_call> "
        "<think></arg_value>\n</tool_call>"
    )
    (call,) = case("glm").renderer.parse(glm, [WRITE]).calls
    assert call.arguments == {"text": "a <tool_call>b</tool_call> <think>"}
    qwen = case("qwen-coder").sampled(
        "<tool_call>\n<function=write>\n<parameter=text>\n<tool_call>\n</tool_call>\n"
        "</parameter> </function>\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = case("qwen-coder").renderer.parse(qwen, [WRITE]).calls
    assert call.arguments == {"text": "<tool_call>\n</tool_call>\n</parameter> </function>"}


@pytest.mark.parametrize("name", ["glm", "qwen-coder", "qwen3.5"])
def test_the_schema_tells_a_number_from_a_string(name: str) -> None:
    arguments = {"text": "1", "count": 1, "any": "true"}
    ids = case(name).renderer.expert("", [("write", arguments)], [WRITE])
    assert case(name).renderer.parse(ids, [WRITE]).calls[0].arguments == arguments
    bare = case(name).renderer.decode(ids).replace('"true"', "True")
    read = case(name).renderer.parse(case(name).sampled(bare), [WRITE]).calls[0].arguments
    assert read == {"text": "1", "count": 1, "any": True}
    wrong = case(name).renderer.decode(ids).replace("1", "one")
    read = case(name).renderer.parse(case(name).sampled(wrong), [WRITE]).calls[0].arguments
    assert read["count"] == "one"


def test_a_file_that_is_json_stays_text() -> None:
    text = '{"scripts": {"test": "jest"}}'
    for name in ("glm", "qwen-coder"):
        ids = case(name).renderer.expert("", [("write", {"text": text})], [WRITE])
        assert text in case(name).renderer.decode(ids)
        assert case(name).renderer.parse(ids, [WRITE]).calls[0].arguments == {"text": text}


@settings(max_examples=200, deadline=None)
@given(value=JSON | HOSTILE_TEXT, python=st.booleans(), forbidden=st.booleans())
@example(value='"1"', python=False, forbidden=False)
@example(value='"\\"1\\""', python=False, forbidden=False)
@example(value="a</parameter>", python=True, forbidden=True)
@example(value='"a\\u003c/parameter>"', python=True, forbidden=True)
@example(value={"</parameter>": "</parameter>"}, python=True, forbidden=True)
def test_arguments_are_read_as_they_were_written(
    value: object, python: bool, forbidden: bool
) -> None:
    spelling = ArgumentText(WRITE, python=python, forbidden=["</parameter>"] if forbidden else [])
    text = spelling.write("any", value)
    assert json.dumps(spelling.read("any", text)) == json.dumps(value)
    assert not forbidden or "</parameter>" not in text
    if isinstance(value, str):
        assert spelling.read("text", spelling.write("text", value)) == value


def test_an_argument_against_its_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="text"):
        ArgumentText(WRITE).write("text", 1)
    with pytest.raises(ValueError, match="float"):
        ArgumentText(WRITE).write("any", float("nan"))


@pytest.mark.parametrize("name", ["glm", "qwen-coder", "kimi", "deepseek", "harmony"])
def test_names_that_a_dialect_cannot_spell_are_refused(name: str) -> None:
    for bad in ("", "a b", "a\nb", "f>", "é"):
        with pytest.raises(ValueError, match="name"):
            case(name).renderer.expert("", [(bad, {})])


def test_a_schema_that_unfolds_without_end_is_cut_short() -> None:
    """Tool servers are strangers: their schemas may refer to themselves."""
    loop = {"anyOf": [{"$ref": "#/$defs/A"}] * 9}
    schema = {"type": "object", "properties": {"a": loop}, "$defs": {"A": loop}}
    tool = ToolSpec("f", "d", schema)
    assert "any" in namespace("functions", [tool])
    assert ArgumentText(tool).read("a", "1") == 1
    ids = case("glm").renderer.expert("", [("f", {"a": "1"})], [tool])
    assert case("glm").renderer.parse(ids, [tool]).calls[0].arguments == {"a": "1"}


def test_several_calls_of_llama_stand_behind_its_tag() -> None:
    llama = case("llama")
    text = llama.renderer.decode(llama.renderer.expert("", [("f", {}), ("g", {})]))
    assert text == (
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}<|eot_id|>'
    )
    person = '{"name": "Ann", "age": 3} is the object.'
    assert llama.renderer.parse(llama.sampled(person)).text == person
