"""The remote policy against a real server over sockets, and beside the local policy."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_server import (
    COUNTED,
    ChatServer,
    answer_chunks,
    delta,
    event,
    hangs,
    hangs_up,
    refuses,
    sends,
    speaks,
    until,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.chat_policy import ChatPolicy
from etude.agent.log import SessionLog
from etude.agent.policy import Answer, Policy, TurnLimits
from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import default_tools
from etude.errors import EtudeError
from etude.inference.openai_client_settings import ChatServiceSettings
from etude.inference.prices import PriceTable, read_prices
from etude.inference.protocol import Finish
from etude.models.renderer import ToolSpec
from etude.models.stream import Delta
from etude.records import Event, EventKind, StopReason, Trajectory
from etude.sandbox.protocol import Image, Sandbox

MakeImage = Callable[[Mapping[str, bytes]], Image]
LIMITS = TurnLimits(max_tokens=50, temperature=0.5, seed=2**40 + 7, seconds=20)
TOOL = ToolSpec("look", "look at a thing", {"type": "object", "properties": {}})


def chat(server: ChatServer, **options: Any) -> ChatPolicy:
    options = {"model": "m", "context_length": 8000, "longest_wait": 0.05, **options}
    return ChatPolicy(ChatServiceSettings(base_url=server.url, **options))


def one_turn(
    *answers: Any,
    tools: tuple[ToolSpec, ...] = (TOOL,),
    limits: TurnLimits = LIMITS,
    **options: Any,
) -> tuple[Answer, list[Delta], ChatServer]:
    """Say hello and let the server answer."""
    deltas: list[Delta] = []

    async def go() -> tuple[Answer, list[Delta], ChatServer]:
        async with ChatServer(*answers) as server:
            policy = chat(server, **options)
            policy.begin("Head.", tools)
            policy.say("Hello.")
            try:
                return await policy.turn(limits, deltas.append), deltas, server
            finally:
                await policy.close()

    return asyncio.run(go())


def failing(*answers: Any, **options: Any) -> str:
    with pytest.raises(EtudeError) as caught:
        one_turn(*answers, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and message.isprintable()
    return message


# One answer


def test_a_turn_says_what_the_service_said() -> None:
    calls = [("look", '{"at": "ü<tool_call>"}'), ("look", "{}")]
    usage = {**COUNTED, "completion_tokens_details": {"reasoning_tokens": 5}}
    answer, deltas, server = one_turn(speaks("Wait.", calls, thinking="Hm…", usage=usage))
    parsed = answer.parsed
    assert (parsed.thinking, parsed.text) == ("Hm…", "Wait.")
    assert [(c.name, dict(c.arguments), c.error) for c in parsed.calls] == [
        ("look", {"at": "ü<tool_call>"}, None),
        ("look", {}, None),
    ]
    assert answer.finish is Finish.STOP and answer.exchange is None
    assert (answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens) == (100, 60, 20)
    assert parsed.thinking_tokens == 5
    assert parsed.thinking_tokens + parsed.text_tokens + parsed.call_tokens == 20
    joined = {k: "".join(d.text for d in deltas if d.kind == k) for k in ("thinking", "text")}
    assert joined == {"thinking": "Hm…", "text": "Wait."}
    shown = "".join(d.text for d in deltas if d.kind == "call")
    assert shown == 'look {"at": "ü<tool_call>"}\nlook {}'
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert "authorization" not in request.headers
    assert request.body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Head."},
            {"role": "user", "content": "Hello."},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "description": "look at a thing",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "temperature": 0.5,
        "seed": 7,
    }


def test_settings_shape_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", " sk-123 ")
    _, _, server = one_turn(
        speaks("ok"),
        tools=(),
        api_key_variable="A_KEY",
        headers={"X-Team": "blue"},
        max_tokens_field="max_completion_tokens",
        omit={"temperature", "seed", "stream_options"},
        body={"reasoning_effort": "low"},
    )
    (request,) = server.requests
    assert request.headers["authorization"] == "Bearer sk-123"
    assert request.headers["x-team"] == "blue"
    assert request.body.keys() == {
        "model",
        "messages",
        "stream",
        "max_completion_tokens",
        "reasoning_effort",
    }


@pytest.mark.parametrize(
    ("word", "finish"),
    [
        ("stop", Finish.STOP),
        ("tool_calls", Finish.STOP),
        ("length", Finish.LENGTH),
        ("max_tokens", Finish.LENGTH),
        ("end_turn", Finish.STOP),
    ],
)
def test_finish_words(word: str, finish: Finish) -> None:
    assert one_turn(speaks("a", finish=word))[0].finish is finish


@pytest.mark.parametrize("word", ["content_filter", "error", "abort"])
def test_an_answer_that_was_withheld_is_an_error(word: str) -> None:
    failing(speaks("a", finish=word))


@pytest.mark.parametrize(
    "arguments",
    ['{"at": ', "[1]", "null", '"x"', '{"a": NaN}', "}{", '{"a": "\\ud800"}', "[" * 100_000],
)
def test_malformed_arguments_are_a_call_with_an_error(arguments: str) -> None:
    answer = one_turn(speaks("", [("look", arguments)], piece=40_000))[0]
    (call,) = answer.parsed.calls
    assert call.error and call.arguments == {} and call.name == "look"
    assert call.raw == arguments


def test_other_services_ways_of_telling_calls() -> None:
    """All calls numbered 0; no numbers; arguments as an object; no arguments; one whole chunk."""

    def call(function: dict[str, Any], **more: Any) -> bytes:
        return event(delta(tool_calls=[{"type": "function", "function": function, **more}]))

    stream = (
        call({"name": "a", "arguments": '{"n":'}, index=0, id="x"),
        call({"arguments": "1}"}, index=0),
        call({"name": "b", "arguments": '{"n": 2}'}, index=0, id="y"),
        call({"name": "c", "arguments": {"n": 3}}, id="z"),
        call({"name": "d"}, id="w"),
        event(delta("tool_calls")),
        b"data: [DONE]\n\n",
    )
    answer = one_turn(sends(*stream))[0]
    assert [(c.name, dict(c.arguments)) for c in answer.parsed.calls] == [
        ("a", {"n": 1}),
        ("b", {"n": 2}),
        ("c", {"n": 3}),
        ("d", {}),
    ]


def test_a_service_that_does_not_stream() -> None:
    whole = {
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": "Hi", "tool_calls": None},
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1},
    }
    answer, deltas, _ = one_turn(refuses(200, whole))
    assert answer.parsed.text == "Hi" and answer.finish is Finish.LENGTH
    assert [d.text for d in deltas] == ["Hi"]
    assert answer.prompt_tokens == 4


def test_without_counts_they_are_estimated() -> None:
    answer = one_turn(speaks("x" * 35, usage=None), tools=())[0]
    assert answer.sampled_tokens == 10
    assert answer.prompt_tokens == pytest.approx((5 + 6) / 3.5 + 8, abs=2)


def test_thinking_that_completion_tokens_leave_out_is_counted() -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 33,
        "completion_tokens_details": {"reasoning_tokens": 20},
    }
    answer = one_turn(speaks("abc", usage=usage))[0]
    assert answer.sampled_tokens == 23
    assert answer.parsed.thinking_tokens == 20 and answer.parsed.text_tokens == 3


def test_lone_surrogates_never_get_in() -> None:
    stream = (b'data: {"choices":[{"index":0,"delta":{"content":"a\\ud800b"}}]}\n\n',)
    answer = one_turn(sends(*stream, event(delta("stop"))))[0]
    assert answer.parsed.text == "a?b"


# Failures


def test_busy_then_well() -> None:
    answer, _, server = one_turn(
        refuses(429, {"error": {"message": "slow down"}}, retry_after="0"),
        refuses(503, "<html><title>Busy</title>", kind="text/html"),
        hangs_up,
        sends(b": nothing\n\n"),
        speaks("at last"),
    )
    assert answer.parsed.text == "at last"
    assert len(server.requests) == 5
    assert len({json.dumps(request.body) for request in server.requests}) == 1


def test_tries_are_bounded() -> None:
    message = failing(*[refuses(500, {"error": "boom"})] * 3, retries=2)
    assert "boom" in message and "HTTP 500" in message and "(3 tries)" in message


def test_a_service_that_asks_for_a_long_rest_is_an_error_at_once() -> None:
    started = time.monotonic()
    message = failing(refuses(429, {"error": {"message": "quota"}}, retry_after="3600"))
    assert "quota" in message and "3600 s" in message
    assert time.monotonic() - started < 5


def test_retry_after_is_kept() -> None:
    started = time.monotonic()
    one_turn(refuses(429, {}, retry_after="0.4"), speaks("ok"), longest_wait=1)
    assert time.monotonic() - started >= 0.4


def test_an_empty_account_is_not_tried_again() -> None:
    body = {"error": {"message": "You are out of money.", "code": "insufficient_quota"}}
    assert "out of money" in failing(refuses(429, body))


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (refuses(401, {"error": {"message": "bad key sk-secret-1"}}), ["401", "A_KEY", "[key]"]),
        (refuses(404, {"detail": "no such model"}), ["404", "no such model", "base URL"]),
        (refuses(400, {"error": {"message": "too\n\x1b[31mlong"}}), ["400", "too", "long"]),
        (refuses(400, ["odd"]), ["400", "odd"]),
        (refuses(413, "plain words", kind="text/plain"), ["plain words"]),
        (refuses(403, "<!DOCTYPE html><TITLE>No &amp; no</TITLE>", kind="text/html"), ["No & no"]),
        (refuses(200, "<html><title>Log in</title>", kind="text/html"), ["Log in", "base URL"]),
        (refuses(302, {}, location="https://elsewhere/v1"), ["https://elsewhere/v1"]),
    ],
)
def test_refusals_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, answer: Any, parts: list[str]
) -> None:
    monkeypatch.setenv("A_KEY", "sk-secret-1")
    message = failing(answer, api_key_variable="A_KEY")
    assert all(part in message for part in parts), message
    assert "sk-secret" not in message and "127.0.0.1" in message


STARTED = event(delta(content="Hel"))


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (sends(STARTED, end="hang up"), "middle of the answer"),
        (sends(STARTED), "middle of the answer"),
        (sends(STARTED, b"data: {garbage\n\n"), "no JSON"),
        (sends(STARTED, b"data: [1, 2]\n\n"), "JSON object"),
        (sends(STARTED, b'data: {"choices": "x"}\n\n'), "no choices"),
        (sends(STARTED, event({"error": {"message": "GPU fell out", "code": 500}})), "GPU fell"),
    ],
)
def test_after_the_first_word_nothing_is_tried_again(answer: Any, part: str) -> None:
    shown: list[Delta] = []

    async def go() -> int:
        async with ChatServer(answer, speaks("never asked")) as server:
            policy = chat(server)
            policy.begin("", [])
            policy.say("Hello.")
            with pytest.raises(EtudeError, match=part):
                await policy.turn(LIMITS, shown.append)
            # The conversation is as before: the same can be asked again.
            assert policy.messages.request() == server.messages[0]
            return len(server.requests)

    assert asyncio.run(go()) == 1
    assert [d.text for d in shown] == ["Hel"]


def test_an_error_before_the_first_word_is_tried_again() -> None:
    broken = sends(event({"error": {"message": "overloaded", "code": 529}}))
    assert one_turn(broken, speaks("ok"))[0].parsed.text == "ok"


def test_nobody_listens() -> None:
    async def go() -> None:
        async with ChatServer() as server:
            pass
        policy = chat(server, retries=1)
        policy.begin("", [])
        policy.say("Hello.")
        with pytest.raises(EtudeError, match=r"cannot be reached.*2 tries"):
            await policy.turn(LIMITS)

    asyncio.run(go())


def test_silence_ends() -> None:
    assert "sent nothing for 0.3 s" in failing(sends(STARTED, end="stay"), silence_timeout=0.3)
    assert "sent nothing for 0.3 s" in failing(hangs, silence_timeout=0.3)


def test_the_turns_deadline_is_a_timeout() -> None:
    limits = TurnLimits(max_tokens=5, temperature=1, seed=0, seconds=0.3)
    for answer in (hangs, sends(STARTED, end="stay"), refuses(500)):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            one_turn(*[answer] * 30, limits=limits, retries=20, longest_wait=60)
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("answer", [hangs, sends(STARTED, end="stay")])
def test_cancelling_closes_the_connection_at_once(answer: Any) -> None:
    async def go() -> None:
        async with ChatServer(answer, speaks("again")) as server:
            policy = chat(server)
            policy.begin("", [])
            policy.say("Hello.")
            task = asyncio.ensure_future(policy.turn(LIMITS))
            await until(lambda: bool(server.requests))
            await asyncio.sleep(0.1)
            started = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: bool(server.gone))
            assert server.gone[0] - started < 1
            policy.say("Never mind.")
            await policy.turn(LIMITS)
            assert server.messages[1] == [{"role": "user", "content": "Hello.\n\nNever mind."}]
            await policy.close()

    asyncio.run(go())


def test_a_connection_is_used_again() -> None:
    async def go() -> int:
        async with ChatServer(*[speaks("ok")] * 5) as server:
            policy = chat(server)
            policy.begin("", [])
            for _ in range(5):
                policy.say("More.")
                await policy.turn(LIMITS)
            await policy.close()
            return server.connections

    assert asyncio.run(go()) == 1


def test_each_event_loop_has_its_own_connections() -> None:
    async def begin() -> tuple[ChatPolicy, int]:
        async with ChatServer(speaks("one")) as server:
            policy = chat(server)
            policy.begin("", [])
            policy.say("1")
            await policy.turn(LIMITS)
            return policy, server.port

    policy, _ = asyncio.run(begin())
    assert policy.messages.request()[-1]["content"] == "one"
    asyncio.run(policy.close())


# Settings


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    base = {"base_url": "http://h/v1", "model": "m"}
    with pytest.raises(EtudeError, match=r"--context.*prices\.toml"):
        ChatPolicy(ChatServiceSettings(**base), prices=PriceTable(()))
    with pytest.raises(EtudeError, match="A_KEY"):
        ChatPolicy(ChatServiceSettings(**base, context_length=5, api_key_variable="A_KEY"))
    own = tmp_path / "prices.toml"
    own.write_text('[[model]]\npattern = "m"\ncontext_length = 7000\n')
    known = ChatPolicy(ChatServiceSettings(**base), prices=read_prices(own))
    assert known.context_length == 7000


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "ftp://h"},
        {"base_url": "h/v1"},
        {"base_url": "https://me:secret@h/v1"},
        {"base_url": "https://h/v1?key=1"},
        {"headers": {"X-A": "b\r\nX-C: d"}},
        {"headers": {"X A": "b"}},
        {"body": {"messages": []}},
        {"omit": {"model"}},
        {"retries": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ChatServiceSettings(**{"base_url": "http://h/v1", "model": "m", **wrong})


def test_the_whole_address_may_be_given() -> None:
    given_url = "https://h/v1/chat/completions/"
    assert ChatServiceSettings(base_url=given_url, model="m").base_url == "https://h/v1"


# Sessions


def strip(events: tuple[Event, ...]) -> list[tuple[str, int, dict[str, Any]]]:
    """Events without what only a tokenizer or a service knows: the counts."""
    return [
        (e.kind.value, e.turn, {k: v for k, v in e.data.items() if not k.endswith("_tokens")})
        for e in events
    ]


def assert_prefix_rule(server: ChatServer) -> None:
    """Each request begins with all of the one before it, or with the head of a new window."""
    assert len({json.dumps(request.body.get("tools")) for request in server.requests}) == 1
    for before, after in zip(server.messages, server.messages[1:], strict=False):
        same_window = after[: len(before)] == before
        assert same_window or (len(after) == 2 and after[0] == before[0])


TURNS: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "Let me look.",
        [("read", {"path": "f"}), ("read", {"path": "g"}), ("grep", {"pattern": "o"})],
    ),
    ("", [("edit", {"path": "f", "old": "one", "new": 'ein "ü" <tool_call>'})]),
    ("Then.", [("execute_python", {"code": "1"}), ("read", {"path": 5}), ("read", {"path": "no"})]),
    ("", [("shell", {"command": "cat f; exit 3"}), ("write", {"path": "n", "content": "x\n"})]),
    ("", [("finish", {"message": "Done."}), ("read", {"path": "f"})]),
    ("All is said.", []),
]


def two_prompts(policy: Policy, sandbox: Sandbox, image: Image) -> Any:
    async def go() -> Trajectory:
        async with Session(
            policy,
            lambda: sandbox.create(image),
            default_tools(),
            SessionSettings(),
            session_id="s",
        ) as session:
            await session.prompt("Mend it.")
            session.note("The date is now another.")
            await session.prompt("And?")
            return await session.trajectory()

    return go()


def test_both_policies_give_the_same_session(
    sandbox: Sandbox, image: MakeImage, script: Any
) -> None:
    files = image({"f": b"one\n", "g": b"two\n"})
    for text, calls in TURNS:
        script.calls(*calls, text=text)
    local = asyncio.run(two_prompts(TokenPolicy(script.engine(), script.renderer), sandbox, files))

    async def remote() -> Trajectory:
        turns = [speaks(text, [(n, json.dumps(a)) for n, a in calls]) for text, calls in TURNS]
        async with ChatServer(*turns) as server:
            trajectory = await two_prompts(chat(server), sandbox, files)
            assert_prefix_rule(server)
            # Every call has exactly one result, by its id and in order.
            messages = server.messages[-1]
            asked = [c["id"] for m in messages for c in m.get("tool_calls", ())]
            assert asked == [m["tool_call_id"] for m in messages if m["role"] == "tool"]
            assert len(set(asked)) == len(asked) == 11
            return trajectory

    other = asyncio.run(remote())
    assert strip(other.events) == strip(local.events)
    assert other.outcome == local.outcome
    assert other.outcome.changes == {"f": 'ein "ü" <tool_call>\n', "n": "x\n"}
    assert other.segments == () and local.segments
    assert other.usage.turns == local.usage.turns == 6
    assert other.usage.prompt_tokens == 600 and other.usage.cached_tokens == 360


WORDS = st.text(alphabet="ab é\n.{}\"'\\", max_size=20).map(str.strip)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["nothing", "finish", "also_nothing"]),
        st.dictionaries(st.text(max_size=5), JSON, max_size=2),
    ),
    max_size=3,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(WORDS, CALLS), min_size=1, max_size=4), st.integers(1, 30))
def test_any_script_is_the_same_session_by_both_policies(
    renderer: Any, turns: list[tuple[str, Any]], piece: int
) -> None:
    from etude.inference.scripted import ScriptedEngine

    answers = iter([renderer.expert(text, calls) for text, calls in turns])
    engine = ScriptedEngine(lambda *_: next(answers), context_length=100_000)

    async def session(policy: Policy) -> list[tuple[str, int, dict[str, Any]]]:
        async def nowhere() -> Any:
            raise AssertionError("no tool needs a workspace")

        parts = SessionSettings(max_turns=len(turns), max_turn_tokens=5000)
        async with Session(policy, nowhere, default_tools(), parts, session_id="s") as made:
            await made.prompt("Go.")
            return strip(made.events)

    async def remote() -> list[tuple[str, int, dict[str, Any]]]:
        spoken = [
            speaks(text, [(n, json.dumps(a)) for n, a in calls], piece=piece)
            for text, calls in turns
        ]
        async with ChatServer(*spoken) as server:
            events = await session(chat(server))
            assert_prefix_rule(server)
            return events

    assert asyncio.run(remote()) == asyncio.run(session(TokenPolicy(engine, renderer)))


def test_a_resumed_session_sends_the_same_messages(
    sandbox: Sandbox, image: MakeImage, tmp_path: Path
) -> None:
    files = image({"f": b"one\n"})
    path = tmp_path / "s.jsonl"
    turns = [
        speaks("I read.", [("read", '{"path": "f"}'), ("read", "{broken")], thinking="So."),
        speaks("Read."),
        speaks("A summary."),
        speaks("", [("nothing", '{"a": 1.0, "b": "\\u00fc"}')]),
        speaks("Now this."),
    ]

    async def go() -> None:
        async with ChatServer(*turns) as server:

            def session(log: SessionLog, length: int = 8000) -> Session:
                policy = chat(server, send_thinking=True, context_length=length)
                source = lambda: sandbox.create(files)  # noqa: E731
                parts = SessionSettings()
                return Session(policy, source, default_tools(), parts, session_id="s", log=log)

            with SessionLog(path, {}) as log:
                async with session(log) as first:
                    await first.prompt("Read f.")
                    used = first.context_used
            with SessionLog(path) as log:
                async with session(log) as second:
                    second.recall(log.earlier.entries)
                    assert second.context_used == used
                    second.note("Mind the gap.")
                    assert await second.summarize() is StopReason.FINISHED
            with SessionLog(path) as log:
                async with session(log) as third:
                    third.recall(log.earlier.entries)
                    await third.prompt("Go on.")
                    trajectory = await third.trajectory()
            assert trajectory.outcome.stop is StopReason.FINISHED
            assert_prefix_rule(server)
            second_request = server.messages[1]
            assert second_request[2]["reasoning_content"] == "So."
            assert json.loads(second_request[2]["tool_calls"][1]["function"]["arguments"]) == {
                "malformed": "{broken"
            }
            # The summary was asked for in the old window; the new one begins with it.
            assert "Mind the gap." in server.messages[2][-1]["content"]
            assert server.messages[3][1]["content"].count("A summary.") == 1
            assert server.messages[3][1]["content"].endswith("Go on.")
            assert len(server.messages[4]) == 4

    asyncio.run(go())


def test_a_session_of_a_local_engine_can_go_on_remotely(
    sandbox: Sandbox, image: MakeImage, script: Any, tmp_path: Path
) -> None:
    files = image({"f": b"one\n"})
    script.calls(("read", {"path": "f"})).says("It holds one.")
    path = tmp_path / "s.jsonl"

    async def go() -> None:
        local = TokenPolicy(script.engine(), script.renderer)
        with SessionLog(path, {}) as log:
            async with Session(
                local, lambda: sandbox.create(files), default_tools(), SessionSettings(),
                session_id="s", log=log,
            ) as session:  # fmt: skip
                await session.prompt("Read f.")
        async with ChatServer(speaks("One, as I said.")) as server:
            with SessionLog(path) as log:
                async with Session(
                    chat(server), lambda: sandbox.create(files), default_tools(),
                    SessionSettings(), session_id="s", log=log,
                ) as session:  # fmt: skip
                    session.recall(log.earlier.entries)
                    assert await session.prompt("What was it?") is StopReason.FINISHED
            roles = [message["role"] for message in server.messages[0]]
            assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]

    asyncio.run(go())


def test_a_cancelled_session_leaves_the_conversation_whole(
    sandbox: Sandbox, image: MakeImage
) -> None:
    files = image({"f": b"one\n"})

    async def go() -> None:
        call = [("shell", '{"command": "sleep 30"}'), ("read", '{"path": "f"}')]
        async with ChatServer(speaks("", call), speaks("Fine.")) as server:
            async with Session(
                chat(server), lambda: sandbox.create(files), default_tools(), SessionSettings(),
                session_id="s",
            ) as session:  # fmt: skip
                task = asyncio.ensure_future(session.prompt("Sleep."))
                await until(lambda: EventKind.TOOL_CALL in [e.kind for e in session.events])
                await session.cancel()
                assert await task is StopReason.CANCELLED
                assert await session.prompt("Wake up.") is StopReason.FINISHED
            roles = [message["role"] for message in server.messages[1]]
            assert roles == ["system", "user", "assistant", "tool", "tool", "user"]

    asyncio.run(go())


def test_the_next_prompt_is_estimated_from_the_last_count() -> None:
    async def go() -> None:
        async with ChatServer(speaks("ok", thinking="t" * 40, usage=COUNTED)) as server:
            policy = chat(server)
            policy.begin("Head.", [TOOL])
            policy.say("Hello.")
            assert 20 < policy.prompt_tokens() < 60
            answer = await policy.turn(LIMITS)
            known = 120 - answer.parsed.thinking_tokens
            assert policy.prompt_tokens() == known
            policy.say("x" * 350)
            assert policy.prompt_tokens() == known + 100 + 4
            policy.note("字" * 100)
            assert policy.prompt_tokens() >= known + 100 + 80

    asyncio.run(go())


def test_the_scripted_server_speaks_what_it_is_given() -> None:
    chunks = answer_chunks("abcd", [("f", "{}")], thinking="t", usage=COUNTED)
    content = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert content == "abcd" and chunks[-1]["usage"] == COUNTED
