"""Prompt, steer, cancel, summarize; resume and fork from the log; budgets; permission."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.agent.budget import Budget, Price
from etude.agent.permissions.gate import Permission, Request
from etude.agent.prompts import SYSTEM_PROMPT
from etude.agent.session import Session
from etude.agent.sessions import SessionStore, upto
from etude.agent.settings import SessionSettings
from etude.agent.summary import SummarySettings
from etude.agent.token_policy import TokenPolicy, replay
from etude.agent.tools import AnyTool, ToolResult, default_tools, tools_named
from etude.errors import EtudeError
from etude.records import Event, EventKind, StopReason, Trajectory
from etude.sandbox.protocol import Image, Rights, Sandbox, Workspace

MakeImage = Callable[[Mapping[str, bytes]], Image]


class Bench:
    """Makes sessions of the scripted model in real workspaces of one image."""

    def __init__(self, sandbox: Sandbox, image: Image, script: Any) -> None:
        self.sandbox, self.image, self.script = sandbox, image, script

    async def workspace(self) -> Workspace:
        return await self.sandbox.create(self.image)

    def session(
        self, *, tools: tuple[AnyTool, ...] | None = None, settings: Any = None, **parts: Any
    ) -> Session:
        engine = parts.pop("engine", None) or self.script.engine()
        return Session(
            TokenPolicy(engine, self.script.renderer),
            self.workspace,
            default_tools() if tools is None else tools,
            settings or SessionSettings(),
            session_id="s",
            **parts,
        )


@pytest.fixture
def bench(sandbox: Sandbox, image: MakeImage, script: Any) -> Bench:
    return Bench(sandbox, image({"f": b"one\n", "g": b"two\n"}), script)


def kinds(events: tuple[Event, ...]) -> list[str]:
    return [event.kind.value for event in events]


def assert_same_ledger(trajectory: Trajectory, renderer: Any) -> None:
    again = replay(trajectory, renderer)
    assert len(again) == len(trajectory.segments)
    for left, right in zip(again, trajectory.segments, strict=True):
        for name in ("prompt_ids", "completion_ids", "mask", "logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def test_case_13_a_forced_summary_keeps_head_and_newest_message(bench: Bench) -> None:
    script = bench.script
    script.calls(("read", {"path": "f"})).says("X is finished.")
    script.says("X is done; f holds one.")
    script.says("Y too.")

    async def go() -> Trajectory:
        async with bench.session(system="Follow AGENTS.md: tabs <|im_end|> only.") as session:
            await session.prompt("Do X.")
            assert await session.summarize() is StopReason.FINISHED
            await session.prompt("Do Y.\n  Exactly <tool_call> so. ")
            return await session.trajectory()

    trajectory = asyncio.run(go())
    first, second = trajectory.segments
    head = script.renderer.open(
        "Follow AGENTS.md: tabs <|im_end|> only.", [t.spec() for t in default_tools()], ""
    )
    shared = len(head) - len(script.renderer.open("", [], ""))
    assert first.prompt_ids[:shared].tolist() == second.prompt_ids[:shared].tolist()
    assert first.prompt_ids[:shared].tolist() == head[:shared]
    opening = script.renderer.decode(second.prompt_ids[shared:].tolist())
    assert "X is done; f holds one." in opening
    assert opening.endswith("Do Y.\n  Exactly <tool_call> so. <|im_end|>\n<|im_start|>assistant\n")
    # The question to the model stood in the old window, behind everything that had been cached.
    assert script.prompts[2][: len(script.prompts[1])] == script.prompts[1]
    (summary,) = [e for e in trajectory.events if e.kind is EventKind.SUMMARY]
    assert summary.data["text"] == "X is done; f holds one."
    # The summary is a turn of the policy: sampled and in the ledger.
    assert len(first.turns) == 3
    assert_same_ledger(trajectory, script.renderer)


def test_a_trigger_begins_a_new_window_and_the_history_can_be_read(bench: Bench) -> None:
    script = bench.script
    script.calls(("read", {"path": "f"})).calls(("shell", {"command": "seq 1 300"}))
    script.says("Read f, counted.")
    script.calls(("grep", {"pattern": "seq 1", "path": "/tmp/etude/history-1.md"})).says("Done.")
    head = script.renderer.open(SYSTEM_PROMPT, [t.spec() for t in default_tools()], "")
    settings = SessionSettings(summary=SummarySettings(trigger=len(head) + 600))

    async def go() -> Trajectory:
        async with bench.session(settings=settings) as session:
            return await session.run("Count.")

    trajectory = asyncio.run(go())
    assert len(trajectory.segments) == 2
    assert kinds(trajectory.events).count("summary") == 1
    history = [e for e in trajectory.events if e.kind is EventKind.TOOL_RESULT][-1]
    assert history.data["error_class"] is None
    assert "seq 1 300" in history.data["text"]
    assert_same_ledger(trajectory, script.renderer)


def test_a_head_larger_than_the_trigger_fails_once(bench: Bench) -> None:
    bench.script.says("never asked")
    settings = SessionSettings(summary=SummarySettings(trigger=50))
    session = bench.session(settings=settings)
    assert asyncio.run(session.prompt("x " * 200)) is StopReason.CONTEXT_FULL
    assert bench.script.prompts == []


def test_case_14_the_finished_is_not_asked_again(bench: Bench) -> None:
    """Of all that the person said only the newest stands in the new window."""
    script = bench.script
    script.says("X done.").says("Working on Y.").says("X was finished.").says("ok")

    async def go() -> Trajectory:
        async with bench.session() as session:
            await session.prompt("Please do X now.")
            await session.prompt("Please do Y now.")
            await session.summarize()
            await session.prompt("Go on.")
            return await session.trajectory()

    trajectory = asyncio.run(go())
    opening = script.renderer.decode(trajectory.segments[1].prompt_ids.tolist())
    assert "Please do X now." not in opening
    assert opening.count("Go on.") == 1
    assert_same_ledger(trajectory, script.renderer)


def test_jitter_is_seeded_and_below_the_trigger() -> None:
    plan = SummarySettings(trigger=1000, jitter=0.5)
    draws = [plan.window_trigger(seed, 0) or 0 for seed in range(200)]
    assert draws == [plan.window_trigger(seed, 0) for seed in range(200)]
    assert min(draws) >= 500
    assert max(draws) <= 1000
    assert len(set(draws)) > 100
    assert SummarySettings(trigger=1000).window_trigger(3, 1) == 1000


def test_notes_and_steering_only_append(bench: Bench) -> None:
    script = bench.script
    script.calls(("read", {"path": "f"})).calls(("read", {"path": "g"})).says("Done.")
    script.says("Steered at the end.").says("Bye.")
    session = bench.session()
    heard: list[int] = []

    def on_event(event: Event) -> None:
        # While a call of turn 0 is answered, and again in the last turn.
        if event.kind is EventKind.TOOL_RESULT and event.turn == 0:
            session.steer("Read g as well.")
        if event.kind is EventKind.ASSISTANT and event.data["text"] == "Done.":
            session.steer("One more thing.")
        heard.append(event.turn)

    async def go() -> Trajectory:
        nonlocal session
        async with bench.session(on_event=on_event) as session:
            session.note("[mode: ask]")
            await session.prompt("Read.")
            with pytest.raises(RuntimeError, match="nothing runs"):
                session.steer("too late")
            session.note("[mode: plan]")
            await session.prompt("Thanks.")
            return await session.trajectory()

    trajectory = asyncio.run(go())
    assert trajectory.outcome.stop is StopReason.FINISHED
    for earlier, answer, later in zip(
        script.prompts, script.answers, script.prompts[1:], strict=False
    ):
        known = earlier + answer
        assert later[: len(known)] == known
    said = script.renderer.decode(script.prompts[1])
    assert said.endswith("Read g as well.<|im_end|>\n<|im_start|>assistant\n")
    assert "One more thing." in script.renderer.decode(script.prompts[3])
    last = script.renderer.decode(script.prompts[4])
    assert "[mode: plan]\n\nThanks.<|im_end|>" in last
    assert_same_ledger(trajectory, script.renderer)


def test_case_15_twenty_turns_with_changes_of_mode_date_and_list(bench: Bench) -> None:
    script = bench.script
    for number in range(20):
        script.calls(("todo", {"entries": [{"text": f"step {number}"}]})).says(f"Turn {number}.")

    async def go() -> Trajectory:
        async with bench.session(tools=tools_named(["read", "todo"])) as session:
            for number in range(20):
                session.note(f"[mode: {('ask', 'plan')[number % 2]}]")
                session.note(f"[date: 2026-11-{number + 1:02}]")
                await session.prompt(f"Message {number}.")
            return await session.trajectory()

    trajectory = asyncio.run(go())
    assert len(script.prompts) == 40
    for before, answer, after in zip(
        script.prompts, script.answers, script.prompts[1:], strict=False
    ):
        assert after[: len(before) + len(answer)] == before + answer
    assert_same_ledger(trajectory, script.renderer)


def test_case_24_cancel_in_mid_tool_is_one_cancelled_within_a_second(bench: Bench) -> None:
    script = bench.script
    script.calls(("shell", {"command": "sleep 60"}), ("read", {"path": "f"})).says("Go on.")

    async def go() -> tuple[StopReason, float, Trajectory]:
        called = asyncio.Event()

        def on_event(event: Event) -> None:
            if event.kind is EventKind.TOOL_CALL:
                called.set()

        async with bench.session(on_event=on_event) as session:
            work = asyncio.create_task(session.prompt("Sleep."))
            await called.wait()
            await asyncio.sleep(0.2)
            began = time.monotonic()
            await session.cancel()
            took = time.monotonic() - began
            stop = await work
            await session.cancel()
            await session.prompt("And now?")
            return stop, took, await session.trajectory()

    stop, took, trajectory = asyncio.run(go())
    assert stop is StopReason.CANCELLED
    assert took < 1
    stops = [e.data["reason"] for e in trajectory.events if e.kind is EventKind.STOP]
    assert stops == ["cancelled", "finished"]
    calls = [e.data["id"] for e in trajectory.events if e.kind is EventKind.TOOL_CALL]
    results = [e.data["id"] for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert calls == results
    assert_same_ledger(trajectory, script.renderer)


def test_reading_calls_of_one_turn_keep_their_order(bench: Bench) -> None:
    bench.script.calls(
        ("read", {"path": "f"}),
        ("read", {"path": "missing"}),
        ("grep", {"pattern": "two"}),
        ("edit", {"path": "f", "old": "one", "new": "1"}),
        ("read", {"path": "f"}),
    ).says("Done.")
    trajectory = asyncio.run(bench.session().run("Look."))
    results = [e.data for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert [r["id"] for r in results] == [f"call-0-{n}" for n in range(5)]
    assert [r["error_class"] for r in results] == [None, "not_found", None, None, None]
    assert results[-1]["text"] == "1: 1"


def test_money_that_is_too_little_for_a_turn_is_told_apart_from_money_that_is_spent() -> None:
    budget = Budget(money=0.10, price=Price(10.0, 10.0, 10.0))
    allowed, why = budget.room(20_000)
    assert allowed == 0
    assert why == (
        "$0.0000 of $0.1000 were spent, and the next turn could cost more than what is left"
    )
    budget.charge(10_000, 0, 0)
    assert budget.room(1) == (0, "$0.1000 of $0.1000 were spent")


@pytest.mark.parametrize("cached", [0, 1])
def test_case_26_a_budget_in_money_stops(bench: Bench, cached: int) -> None:
    for _ in range(200):
        bench.script.calls(("shell", {"command": f"echo {len(bench.script.answers)}"}))
    price = Price(input=3.0, cached=3.0 * cached, output=15.0)
    budget = Budget(money=0.10, price=price)
    settings = SessionSettings(max_turns=200)
    trajectory = asyncio.run(bench.session(settings=settings, budget=budget).run("Never stop."))
    assert trajectory.outcome.stop is StopReason.BUDGET
    assert 0.05 < budget.spent <= 0.10
    with pytest.raises(ValueError, match="price"):
        Budget(money=1.0)


class OnlyReading:
    """A gate that refuses writing."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def rights(self) -> Rights:
        return Rights()

    async def check(self, request: Request) -> Permission:
        self.asked.append(request)
        allowed = request.effect.value == "read"
        return Permission(allowed, "" if allowed else "mode", "reading only")

    async def ran(self, request: Request, result: ToolResult) -> None:
        assert request in self.asked

    def narrowed(self, *, readonly: bool) -> "OnlyReading":
        return self


def test_a_gate_is_asked_before_anything_runs(bench: Bench) -> None:
    bench.script.calls(
        ("read", {"path": "f"}), ("edit", {"path": "f", "old": "one", "new": "1"})
    ).says("Done.")
    gate = OnlyReading()
    trajectory = asyncio.run(bench.session(gate=gate).run("Edit."))
    results = [e.data for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert [r["error_class"] for r in results] == [None, "refused"]
    assert "reading only" in results[1]["text"]
    assert [r.subject for r in gate.asked] == ["f", "f"]
    asked = [e.data for e in trajectory.events if e.kind is EventKind.PERMISSION]
    assert asked == [{"id": "call-0-1", "allowed": False, "by": "mode", "reason": "reading only"}]
    assert trajectory.outcome.changes == {}


def script_of_three(script: Any) -> None:
    script.calls(("read", {"path": "f"}), ("read", {"path": "g"}), text="Looking.")
    script.calls(("shell", {"command": "seq 1 9"})).says("Half.")
    script.says("A summary.").says("Whole.")


async def three(session: Session) -> Trajectory:
    async with session:
        session.note("[effort: low]")
        await session.prompt("First.")
        await session.summarize()
        await session.prompt("Second.")
        return await session.trajectory()


def test_resume_from_any_point_goes_on_with_the_same_tokens(bench: Bench, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    script_of_three(bench.script)
    name, log = store.new({"project": "/p", "model": "scripted"})
    whole = asyncio.run(three(bench.session(log=log)))
    log.close()
    entries = store.open(name).earlier.entries
    assert tuple(e for entry in entries for e in entry.events) == whole.events
    for cut in range(1, len(entries) + 1):
        bench.script.prompts.clear()
        bench.script.answers = [bench.script.renderer.expert("Resumed.", [])]
        session = bench.session()
        session.recall(entries[:cut])
        assert session.events[: len(session.events)][-1].kind is EventKind.STOP
        asyncio.run(session.prompt("Go on."))
        trajectory = asyncio.run(session.trajectory())
        ids = [s.prompt_ids.tolist() + s.completion_ids.tolist() for s in trajectory.segments]
        original = [s.prompt_ids.tolist() + s.completion_ids.tolist() for s in whole.segments]
        # What was recorded before the cut is there token for token, then the new message.
        for mine, theirs in zip(ids[:-1], original, strict=False):
            assert mine == theirs
        prompt = bench.script.prompts[0]
        assert "Go on." in bench.script.renderer.decode(prompt)
        calls = [e.data["id"] for e in session.events if e.kind is EventKind.TOOL_CALL]
        told = [e.data["id"] for e in session.events if e.kind is EventKind.TOOL_RESULT]
        assert calls == told
        assert_same_ledger(trajectory, bench.script.renderer)


def test_a_fork_goes_on_from_the_end_of_a_turn(bench: Bench, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    script_of_three(bench.script)
    name, log = store.new({"project": "/p"})
    whole = asyncio.run(three(bench.session(log=log)))
    log.close()
    forked, kept = store.fork(name, 0)
    assert kept.earlier.about["parent"] == name
    bench.script.prompts.clear()
    bench.script.answers = [bench.script.renderer.expert("Other way.", [])]
    session = bench.session(log=kept)
    session.recall(kept.earlier.entries)
    asyncio.run(session.prompt("Do something else."))
    kept.close()
    first = whole.segments[0]
    start = first.prompt_ids.tolist() + first.completion_ids[: first.turns[0].end].tolist()
    assert bench.script.prompts[0][: len(start)] == start
    assert store.list(Path("/p"))[0].id == forked
    assert store.list(Path("/p"))[0].first == "First."
    assert store.find("last", Path("/p")) == forked
    with pytest.raises(EtudeError, match="no turn 17"):
        upto(kept.earlier.entries, 17)
    with pytest.raises(EtudeError, match="no session"):
        store.find("nonsense")


def test_one_process_at_a_time_works_in_a_session(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    name, log = store.new({})
    with pytest.raises(EtudeError, match="Another process"):
        store.open(name)
    log.close()
    store.open(name).close()


def test_case_8_long_output_is_kept_in_a_file(bench: Bench) -> None:
    bench.script.calls(("shell", {"command": "seq 1 4000"}))
    bench.script.calls(("shell", {"command": "sed -n 2000p /tmp/etude/output-1.txt"})).says("ok")
    settings = SessionSettings(max_result_chars=500)
    trajectory = asyncio.run(bench.session(settings=settings).run("Count."))
    first, second = [e.data["text"] for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert len(first) < 700
    assert "/tmp/etude/output-1.txt" in first
    assert second == "2000"
