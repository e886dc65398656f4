"""ATIF against independent models of the format; Markdown against a parser of it."""

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atif import Trajectory as AtifTrajectory
from chat_server import ChatServer, speaks
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from etude.agent.chat_policy import ChatPolicy
from etude.agent.export.atif import dumps, to_atif
from etude.agent.export.markdown import to_markdown
from etude.agent.export.recording import of_log, of_trajectory, with_children
from etude.agent.log import Entry, LoggedSession, SessionLog, read_log
from etude.agent.permissions.gate import Permission, Request
from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import ToolResult, default_tools
from etude.agent.transcript import events_to_markdown, inline, to_text, visible
from etude.inference.openai_client_settings import ChatServiceSettings
from etude.inference.prices import Price
from etude.records import Event, EventKind, Trajectory
from etude.sandbox.protocol import Image, Rights, Sandbox

MakeImage = Callable[[Mapping[str, bytes]], Image]
NO_COUNTS = {
    f"{name}_tokens": 0
    for name in ["prompt", "cached", "sampled", "result", "thinking", "call", "text"]
}
PRICE = Price(input=3.0, cached=0.3, output=15.0)


class Wary:
    """Refuses shell commands, allows the rest."""

    def rights(self) -> Rights:
        return Rights()

    async def check(self, request: Request) -> Permission:
        return Permission(request.tool != "shell", "rule 1", "no shell <|im_end|>")

    async def ran(self, request: Request, result: ToolResult) -> None:
        """Nothing to do."""

    def narrowed(self, *, readonly: bool) -> "Wary":
        return self


@pytest.fixture
def recorded(
    sandbox: Sandbox, image: MakeImage, script: Any, tmp_path: Path
) -> tuple[Trajectory, Path]:
    """A session with everything: calls of all kinds, two windows, two prompts, a note."""
    files = image({"f": b"one\n"})
    script.calls(("read", {"path": "f"}), ("shell", {"command": "ls"}), text="Look.")
    script.says("<think>Hm.</think>Bad <tool_call>\n{broken")
    script.calls(("write", {"path": "ü", "content": "```\n"}))
    script.says("Written.").says("All of it was done.").says("").says("Bye.", end=False)
    path = tmp_path / "s.jsonl"

    async def go() -> Trajectory:
        policy = TokenPolicy(script.engine(), script.renderer)
        with SessionLog(path, {"id": "s", "model": "tiny", "project": "/p"}) as log:
            async with Session(
                policy, lambda: sandbox.create(files), default_tools(), SessionSettings(),
                session_id="s", log=log, gate=Wary(),
            ) as session:  # fmt: skip
                await session.prompt("Do it.")
                session.emit(EventKind.CHECKPOINT, id="c1")
                session.note("The mode is another now.")
                await session.summarize()
                await session.prompt("Go on.")
                await session.prompt("And.")
                return await session.trajectory()

    return asyncio.run(go()), path


def validated(document: dict[str, Any]) -> dict[str, Any]:
    """Through the independent models and back: nothing is refused, nothing gets lost."""
    again = json.loads(dumps(document))
    assert again == document
    model = AtifTrajectory.model_validate(again)
    assert model.model_dump(mode="json", exclude_none=True) == json.loads(
        json.dumps(document, default=str)
    )
    check_rules(document)
    return document


def check_rules(document: dict[str, Any]) -> None:
    """What the specification says beyond the shapes, written down here once more."""
    assert document["schema_version"] == "ATIF-v1.8"
    assert [s["step_id"] for s in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    totals = document["final_metrics"]
    agents = [step for step in document["steps"] if step["source"] == "agent"]
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        assert totals[f"total_{name}"] == sum(step["metrics"][name] for step in agents)
    assert totals["total_steps"] == len(document["steps"])
    seen: set[str] = set()
    for step in document["steps"]:
        calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
        assert not seen & set(calls) and len(set(calls)) == len(calls)
        seen |= set(calls)
        results = step.get("observation", {"results": []})["results"]
        assert [result["source_call_id"] for result in results] == calls
        if step["source"] != "agent":
            assert not step.keys() & {"metrics", "tool_calls", "reasoning_content", "model_name"}
        metrics = step.get("metrics", {})
        if "logprobs" in metrics:
            assert len(metrics["logprobs"]) == len(metrics["completion_token_ids"])
            assert len(metrics["completion_token_ids"]) == metrics["completion_tokens"]
            assert len(metrics["prompt_token_ids"]) == metrics["prompt_tokens"]
    ids = [child["trajectory_id"] for child in document.get("subagent_trajectories", ())]
    assert len(set(ids)) == len(ids)


def test_log_and_trajectory_give_the_same_valid_document(
    recorded: tuple[Trajectory, Path],
) -> None:
    trajectory, path = recorded
    left = validated(to_atif(of_trajectory(trajectory), model="tiny", price=PRICE))
    right = validated(to_atif(of_log("s", read_log(path)), price=PRICE))
    assert right["extra"].pop("project") == "/p" and right["extra"].pop("model") == "tiny"
    assert left == right
    assert left["agent"]["model_name"] == "tiny"
    assert len(left["agent"]["tool_definitions"]) == len(default_tools())


def test_the_document_holds_the_whole_ledger(recorded: tuple[Trajectory, Path]) -> None:
    trajectory, _ = recorded
    document = to_atif(of_trajectory(trajectory))
    turns = [s["metrics"] for s in document["steps"] if s["source"] == "agent"]
    turns = [turn for turn in turns if turn["completion_tokens"]]
    assert len(trajectory.segments) == 2
    for segment in trajectory.segments:
        ids = np.concatenate([segment.prompt_ids, segment.completion_ids]).tolist()
        for turn in segment.turns:
            told = turns.pop(0)
            start, end = len(segment.prompt_ids) + turn.start, len(segment.prompt_ids) + turn.end
            assert told["prompt_token_ids"] == ids[:start]
            assert told["completion_token_ids"] == ids[start:end]
            assert told["logprobs"] == segment.logprobs[turn.start : turn.end].tolist()
            versions = [v for v, count in told["extra"]["policy_versions"] for _ in range(count)]
            assert versions == segment.policy_versions[turn.start : turn.end].tolist()
    assert not turns


def test_what_each_kind_of_event_becomes(recorded: tuple[Trajectory, Path]) -> None:
    trajectory, _ = recorded
    document = to_atif(of_trajectory(trajectory), price=PRICE, token_ids=False)
    steps = document["steps"]
    told = [
        (s["source"], s.get("extra", {}).get("kind"), s.get("is_copied_context")) for s in steps
    ]
    assert told == [
        ("system", None, None),
        ("user", None, None),
        ("agent", None, None),
        ("agent", None, None),
        ("agent", None, None),
        ("agent", None, None),
        ("system", "checkpoint", None),
        ("system", "note", None),
        ("system", "summary_question", None),
        ("agent", "summary", None),
        ("user", "opening", True),
        ("user", None, None),
        ("agent", None, None),
        ("user", None, None),
        ("agent", None, None),
    ]
    look, bad = steps[2], steps[3]
    assert look["message"] == "Look."
    shell = look["tool_calls"][1]
    assert shell["extra"]["permission"]["allowed"] is False
    assert look["observation"]["results"][1]["extra"]["error_class"] == "refused"
    assert bad["reasoning_content"] == "Hm."
    assert bad["tool_calls"][0]["extra"]["malformed"] is True
    assert "{broken" in bad["tool_calls"][0]["extra"]["raw"]
    assert "All of it was done." in steps[10]["message"]
    reasons = [stop["reason"] for stop in document["extra"]["stops"]]
    assert reasons == ["finished", "finished", "finished", "length"]
    agents = [step["metrics"] for step in steps if step["source"] == "agent"]
    cost = sum(
        PRICE.cost(m["prompt_tokens"], m["cached_tokens"], m["completion_tokens"]) for m in agents
    )
    assert document["final_metrics"]["total_cost_usd"] == pytest.approx(cost)
    assert "prompt_token_ids" not in agents[0]
    assert "total_cost_usd" not in to_atif(of_trajectory(trajectory))["final_metrics"]


def test_sub_agents_are_inside_and_pointed_at(recorded: tuple[Trajectory, Path]) -> None:
    trajectory, _ = recorded
    call = {"id": "call-0-0", "name": "task", "malformed": False}
    result = {"id": "call-0-0", "name": "task", "text": "All is well.", "error_class": None}
    events = (
        Event(EventKind.USER, -1, {"text": "Let it be done."}),
        Event(EventKind.ASSISTANT, 0, {"text": "", "thinking": "", **NO_COUNTS}),
        Event(EventKind.TOOL_CALL, 0, {**call, "arguments": {"prompt": "Do it."}}),
        Event(EventKind.TOOL_RESULT, 0, result),
    )
    parent = of_log("p", LoggedSession(entries=tuple(Entry((event,)) for event in events)))
    child = of_trajectory(trajectory)
    stray = replace(child, session_id="stray")
    recording = with_children(parent, [child, stray])
    document = validated(to_atif(recording, price=PRICE))
    inner, other = document["subagent_trajectories"]
    told = document["steps"][1]["observation"]["results"][0]
    assert told["subagent_trajectory_ref"] == [{"trajectory_id": inner["trajectory_id"]}]
    assert inner == to_atif(child, price=PRICE) and other["trajectory_id"] == "stray"
    own = inner["final_metrics"]["total_cost_usd"]
    whole = document["final_metrics"]["extra"]["cost_usd_with_subagents"]
    assert document["final_metrics"]["total_cost_usd"] == 0
    assert own > 0 and whole == pytest.approx(2 * own)
    assert to_markdown(recording).count("All of it was done.") == 2


def test_a_log_that_a_crash_cut_short_is_valid_too(recorded: tuple[Trajectory, Path]) -> None:
    _, path = recorded
    data = path.read_bytes()
    lines = data.split(b"\n")
    for cut in range(1, len(lines)):
        path.write_bytes(b"\n".join(lines[:cut]) + b"\n" + lines[cut][: len(lines[cut]) // 2])
        document = to_atif(of_log("s", read_log(path)))
        AtifTrajectory.model_validate(document)
        assert to_markdown(of_log("s", read_log(path)))


def test_a_remote_session_has_counts_and_no_tokens() -> None:
    async def go() -> Trajectory:
        async def nowhere() -> Any:
            raise AssertionError("no tool needs a workspace")

        turns = [speaks("", [("nothing", "{}")], thinking="t"), speaks("Bye.")]
        async with ChatServer(*turns) as server:
            place = ChatServiceSettings(base_url=server.url, model="m", context_length=9000)
            policy = ChatPolicy(place)
            async with Session(
                policy, nowhere, default_tools(), SessionSettings(), session_id="r"
            ) as session:
                trajectory = await session.run("Go.")
            await policy.close()
            return trajectory

    document = validated(to_atif(of_trajectory(asyncio.run(go())), price=PRICE))
    agents = [s for s in document["steps"] if s["source"] == "agent"]
    assert [s["metrics"]["prompt_tokens"] for s in agents] == [100, 100]
    assert not any("completion_token_ids" in s["metrics"] for s in agents)


def test_log_probs_that_json_has_not_are_left_out_and_it_is_said(
    recorded: tuple[Trajectory, Path],
) -> None:
    trajectory, _ = recorded
    recording = of_trajectory(trajectory)
    first = recording.turns[0]
    assert first is not None
    odd = replace(first, logprobs=np.full_like(first.logprobs, -math.inf))
    document = validated(to_atif(replace(recording, turns=(odd, *recording.turns[1:]))))
    metrics = document["steps"][2]["metrics"]
    assert "logprobs" not in metrics and "not finite" in metrics["extra"]["logprobs"]
    assert metrics["completion_token_ids"]


def test_records_that_do_not_fit_together_are_refused(recorded: tuple[Trajectory, Path]) -> None:
    trajectory, path = recorded
    for segments in (trajectory.segments[:1], (*trajectory.segments, trajectory.segments[0])):
        with pytest.raises(ValueError, match=r"ledger|fit together"):
            of_trajectory(replace(trajectory, segments=segments))
    logged = read_log(path)
    late = next(i for i, e in enumerate(logged.entries) if e.exchange and not e.exchange.opens)
    with pytest.raises(ValueError, match="beginning"):
        of_log("s", replace(logged, entries=logged.entries[late:]))


def test_a_remark_or_checkpoint_in_mid_turn_does_not_part_a_call_from_its_result() -> None:
    call = {"id": "call-0-0", "name": "shell", "arguments": {"command": "rm f"}, "malformed": False}
    result = {"id": "call-0-0", "name": "shell", "text": "ok", "error_class": None}
    events = (
        Event(EventKind.ASSISTANT, 0, {"text": "", "thinking": "", **NO_COUNTS}),
        Event(EventKind.TOOL_CALL, 0, call),
        Event(EventKind.CHECKPOINT, 0, {"id": "c"}),
        Event(EventKind.NOTE, 0, {"text": "mode"}),
        Event(EventKind.TOOL_RESULT, 0, result),
    )
    entries = (Entry(events[:2]), *(Entry((event,)) for event in events[2:]))
    document = validated(to_atif(of_log("s", LoggedSession(entries=entries))))
    assert document["steps"][0]["observation"]["results"] == [
        {"content": "ok", "source_call_id": "call-0-0"}
    ]


# Markdown

HOSTILE = st.text(
    alphabet=st.one_of(
        st.sampled_from(list("`~#*_<>[]()!|\\\n\r\t -=&;\x1b\x07\u202e\u2028")),
        st.characters(codec="utf-8"),
    ),
    max_size=40,
)


@st.composite
def events(draw: st.DrawFn) -> Event:
    text, name = draw(HOSTILE), draw(HOSTILE)
    data: dict[EventKind, dict[str, Any]] = {
        EventKind.USER: {"text": text},
        EventKind.NOTE: {"text": text},
        EventKind.ASSISTANT: {"text": text, "thinking": name},
        EventKind.SUMMARY: {"text": text, "thinking": ""},
        EventKind.TOOL_CALL: {"name": name, "arguments": {name: text}},
        EventKind.TOOL_RESULT: {"text": text, "error_class": None},
        EventKind.PERMISSION: {"allowed": False, "by": name, "reason": text},
        EventKind.CHECKPOINT: {"id": text},
        EventKind.STOP: {"reason": "finished", "detail": text},
    }
    kind = draw(st.sampled_from(list(data)))
    return Event(kind, 0, data[kind])


def call_of(name: str) -> list[Event]:
    return [Event(EventKind.TOOL_CALL, 0, {"name": name, "arguments": {}})]


@given(st.lists(events(), max_size=4))
@example(call_of(""))
@example(call_of("_a_ __b__ a_b"))
@example(call_of("*a* `b` [c](d) <e>"))
def test_nothing_in_a_session_is_markup(session: list[Event]) -> None:
    """By a Markdown parser: one heading per event, one fence per text, and nothing else."""
    markdown = events_to_markdown(session)
    fences = 0
    paragraphs = 0
    for token in MarkdownIt("commonmark").parse(markdown):
        assert token.type in {"paragraph_open", "inline", "paragraph_close", "fence"}
        fences += token.type == "fence"
        if token.type == "inline":
            paragraphs += 1
            assert token.children is not None
            kinds = [child.type for child in token.children if child.content or child.nesting]
            assert kinds == ["strong_open", "text", "strong_close"]
    assert paragraphs == len(session)
    bodies = [block for block in to_text(session).split("\n") if block.startswith("    ")]
    assert bool(fences) == bool(bodies)
    assert not set(markdown) & set("\x1b\x07\r\u202e\u2028")


@given(HOSTILE)
def test_a_fence_holds_exactly_the_visible_text(text: str) -> None:
    parsed = MarkdownIt("commonmark").parse(
        events_to_markdown([Event(EventKind.USER, 0, {"text": text})])
    )
    held = [token.content for token in parsed if token.type == "fence"]
    assert held == ([f"{visible(text)}\n"] if text else [])


@given(HOSTILE)
def test_an_inline_text_is_one_span(text: str) -> None:
    parsed = MarkdownIt("commonmark").parse(f"- a: {inline(text)}")
    (line,) = [token for token in parsed if token.type == "inline"]
    assert line.children is not None
    kinds = [child.type for child in line.children]
    assert kinds == (["text", "code_inline"] if visible(text).strip() else ["text"])


def test_markdown_of_a_log_names_what_is_known(recorded: tuple[Trajectory, Path]) -> None:
    _, path = recorded
    markdown = to_markdown(of_log("s", read_log(path)))
    assert markdown.startswith("# Session `s`\n\n- turns: 7\n- tool calls: 4\n- `model`: `tiny`\n")
    assert "**permission: refused**" in markdown
