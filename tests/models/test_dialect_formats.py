"""What the prompts of the families look like that `renderers` cannot show here, written down from
their published formats."""

from dialect_cases import case

from etude.models.renderer import ToolSpec

EDIT = ToolSpec(
    "edit",
    "replace old by new",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "the file"},
            "count": {"type": "integer", "default": 1},
            "how": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
            "spans": {"type": "array", "items": {"$ref": "#/$defs/Span"}},
        },
        "required": ["path"],
        "$defs": {"Span": {"type": "object", "properties": {"at": {"type": "number"}}}},
    },
)
CALLS = [("edit", {"path": "a.py", "count": 2})]


def _conversation(name: str) -> str:
    renderer = case(name).renderer
    prompt = renderer.open("Be brief.", [EDIT], "Fix it.")
    answer = renderer.expert("I edit.", CALLS, [EDIT])
    after = renderer.follow(answer, results=["done"], user="Thanks.")
    last = renderer.expert("Bye.", [])
    return renderer.decode(prompt + answer + after + last)


def test_gpt_oss() -> None:
    assert _conversation("harmony") == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every "
        "message.\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// replace old by new\ntype edit = (_: {\n// the file\n"
        "path: string,\ncount?: number, // default: 1\n"
        'how?: "a" | "b" | null,\nspans?: {at?: number}[],\n}) => any;\n\n'
        "} // namespace functions<|end|>"
        "<|start|>user<|message|>Fix it.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I edit.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.edit <|constrain|>json<|message|>"
        '{"path": "a.py", "count": 2}<|call|>'
        "<|start|>functions.edit to=assistant<|channel|>commentary<|message|>done<|end|>"
        "<|start|>user<|message|>Thanks.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Bye.<|return|>"
    )


def test_qwen3_coder() -> None:
    shown = _conversation("qwen-coder")
    assert shown.startswith(
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou have access to the following functions:"
        "\n\n<tools>\n<function>\n<name>edit</name>\n<description>replace old by new</description>"
        "\n<parameters>\n<parameter>\n<name>path</name>\n<type>string</type>\n"
        "<description>the file</description>\n</parameter>\n"
        "<parameter>\n<name>count</name>\n<type>integer</type>\n<default>1</default>\n"
        "</parameter>\n"
        '<parameter>\n<name>how</name>\n<anyOf>[{"enum": ["a", "b"]}, {"type": "null"}]</anyOf>\n'
        "</parameter>\n"
        '<parameter>\n<name>spans</name>\n<type>array</type>\n<items>{"$ref": "#/$defs/Span"}'
        '</items>\n</parameter>\n<required>["path"]</required>\n'
        '<$defs>{"Span": {"type": "object", "properties": {"at": {"type": "number"}}}}</$defs>\n'
        "</parameters>\n</function>\n</tools>\n\nIf you choose to call a function ONLY reply"
    )
    assert shown.endswith(
        "</IMPORTANT><|im_end|>\n<|im_start|>user\nFix it.<|im_end|>\n<|im_start|>assistant\n"
        "I edit.\n\n<tool_call>\n<function=edit>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=count>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\nBye.<|im_end|>"
    )


def test_deepseek_v31() -> None:
    shown = _conversation("deepseek")
    assert shown.startswith(
        "<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\nYou have access to the following tools:\n\n"
        "### edit\nDescription: replace old by new\n\nParameters: {"
    )
    assert (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments"
        "<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>"
    ) in shown
    assert shown.endswith(
        "<｜User｜>Fix it.<｜Assistant｜></think>I edit."
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>"
        '{"path": "a.py", "count": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        "<｜tool▁output▁begin｜>done<｜tool▁output▁end｜>"
        "<｜User｜>Thanks.<｜Assistant｜></think>Bye.<｜end▁of▁sentence｜>"
    )


def test_an_answer_goes_on_from_deepseeks_results() -> None:
    given = case("deepseek")
    answer = given.renderer.expert("", [("f", {}), ("f", {})])
    after = given.renderer.decode(given.renderer.follow(answer, results=["r", "s"]))
    output = "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>"
    assert after == output.format("r") + output.format("s")


def test_results_carry_the_ids_that_kimi_sampled() -> None:
    given = case("kimi")
    answer = given.sampled(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:7"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>oops"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    assert [call.error is None for call in given.renderer.parse(answer).calls] == [True, False]
    assert given.renderer.decode(given.renderer.follow(answer, results=["a", "b"])) == (
        "<|im_system|>read<|im_middle|>## Return of functions.read:7\na<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of oops\nb<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_a_turn_that_was_cut_is_ended() -> None:
    """By hand for each state in which sampling may stop."""
    cut = {
        "qwen-coder": [("half", "<|im_end|>\n<|im_start|>user\nu")],
        "glm": [
            ("half", "<|user|>\nu"),
            ("half<|user|>", "\nu"),
            ("half<|observation|>", "<|user|>\nu"),
            ("half<|endoftext|>", "<|user|>\nu"),
        ],
        "kimi": [("half", "<|im_end|><|im_user|>user<|im_middle|>u")],
        "deepseek": [("half", "<｜end▁of▁sentence｜><｜User｜>u")],
        "llama": [
            ("half", "<|eot_id|><|start_header_id|>user"),
            ("half<|eom_id|>", "<|start_header_id|>user"),
        ],
        "harmony": [
            ("<|channel|>final<|message|>half", "<|end|><|start|>user<|message|>u"),
            ("<|channel|>final", "<|message|><|end|><|start|>user<|message|>u"),
            ("", "<|message|><|end|><|start|>user<|message|>u"),
            ("<|channel|>analysis<|message|>a<|end|>", "<|start|>user<|message|>u"),
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant",
                "<|message|><|end|><|start|>user<|message|>u",
            ),
            ("<|channel|>final<|message|>all<|return|>", "<|start|>user<|message|>u"),
        ],
    }
    for name, pairs in cut.items():
        given = case(name)
        for sampled, expected in pairs:
            after = given.renderer.follow(given.sampled(sampled), user="u")
            assert given.renderer.decode(after).startswith(expected), (name, sampled)


def test_glm_is_told_a_result_it_did_not_wait_for() -> None:
    given = case("glm")
    call = given.sampled("<tool_call>f\n</tool_call>")
    result = "\n<tool_response>\nr\n</tool_response>"
    for end, opening in (("", "<|observation|>"), ("<|observation|>", "")):
        after = given.renderer.follow([*call, *given.sampled(end)], results=["r"], user="u")
        assert given.renderer.decode(after) == f"{opening}{result}<|user|>\nu<|assistant|>"
    after = given.renderer.follow([*call, *given.sampled("<|user|>")], results=["r"])
    assert given.renderer.decode(after) == f"<|observation|>{result}<|assistant|>"


def test_harmonys_channels() -> None:
    given = case("harmony")
    turn = given.renderer.parse(
        given.sampled(
            "<|channel|>analysis<|message|>one <|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|>"
            "<|start|>assistant to=functions.read<|channel|>commentary json<|message|>{}<|call|>"
        )
    )
    assert (turn.thinking, turn.text) == ("one two", "I look.")
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [("read", {}, None)]
    bare = given.renderer.parse(given.sampled("no channel at all"))
    assert (bare.text, bare.calls) == ("no channel at all", ())
