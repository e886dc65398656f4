"""What ends a session, what it counts, and what it leaves behind."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.expert import expert_engine
from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy, replay
from etude.agent.tools import default_tools, tools_named
from etude.agent.transcript import to_markdown, to_text
from etude.errors import EtudeError
from etude.inference.scripted import ScriptedEngine
from etude.models.dialects.hermes import HermesRenderer
from etude.records import Event, EventKind, StopReason, Trajectory
from etude.sandbox.protocol import Image, Sandbox, Workspace, WorkspaceError

MakeImage = Callable[[Mapping[str, bytes]], Image]
EDIT = ("edit", {"path": "f", "old": "gap", "new": "x + 1"})


class Rollouts:
    """Runs rollouts with lazily made workspaces and counts how many were made."""

    def __init__(self, sandbox: Sandbox, image: MakeImage, script: Any) -> None:
        self.sandbox, self.make, self.script = sandbox, image, script
        self.made: list[Workspace] = []
        self.image: Image | None = None

    def session(self, engine: ScriptedEngine | None = None, **options: Any) -> Session:
        image = self.image or self.make({"f": b"return gap\n"})
        self.image = image

        async def workspace() -> Workspace:
            made = await self.sandbox.create(image)
            self.made.append(made)
            return made

        return Session(
            TokenPolicy(engine or self.script.engine(), self.script.renderer),
            workspace,
            options.pop("tools", default_tools()),
            session_id="s",
            task_id="t",
            on_event=options.pop("on_event", None),
            settings=SessionSettings(**options),
        )

    def run(self, engine: ScriptedEngine | None = None, **options: Any) -> Trajectory:
        return asyncio.run(self.session(engine, **options).run("Fill the gap in f."))


@pytest.fixture
def rollouts(sandbox: Sandbox, image: MakeImage, script: Any) -> Rollouts:
    return Rollouts(sandbox, image, script)


def errors(trajectory: Trajectory) -> list[str | None]:
    return [e.data["error_class"] for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]


def test_one_turn_task_applies_its_edit_and_is_finished(rollouts: Rollouts) -> None:
    rollouts.script.calls(EDIT)
    trajectory = rollouts.run(max_turns=1)
    outcome = trajectory.outcome
    assert outcome.stop is StopReason.FINISHED
    assert outcome.changes == {"f": "return x + 1\n"}
    assert outcome.valid_call
    (segment,) = trajectory.segments
    assert segment.completion_ids.tolist() == rollouts.script.answers[0]
    assert segment.mask.all()


def test_a_failed_edit_is_no_valid_call(rollouts: Rollouts) -> None:
    rollouts.script.calls(("edit", {"path": "f", "old": "nothing", "new": "x"}))
    outcome = rollouts.run(max_turns=1).outcome
    assert (outcome.stop, outcome.changes, outcome.valid_call) == (StopReason.FINISHED, {}, False)


def test_turn_limit_is_told_apart_from_the_ordinary_end(rollouts: Rollouts) -> None:
    for ends, expected in ((None, StopReason.TURN_LIMIT), (True, StopReason.FINISHED)):
        rollouts.script.prompts.clear()
        rollouts.script.calls(("read", {"path": "f"})).calls(EDIT)
        trajectory = rollouts.run(max_turns=2, ends_after_max_turns=ends)
        assert trajectory.outcome.stop is expected
        assert trajectory.outcome.valid_call
        assert trajectory.usage.turns == 2


def test_finish_ends_the_session_and_later_calls_do_not_run(rollouts: Rollouts) -> None:
    rollouts.script.calls(EDIT, ("finish", {"message": "All done."}), ("read", {"path": "f"}))
    trajectory = rollouts.run()
    assert trajectory.outcome.stop is StopReason.FINISHED
    assert trajectory.outcome.detail == "All done."
    assert errors(trajectory) == [None, None, "not_run"]


def test_several_calls_of_a_turn_run_in_order(rollouts: Rollouts) -> None:
    second = ("edit", {"path": "f", "old": "x + 1", "new": "x + 2"})
    rollouts.script.calls(EDIT, second).says("Done.")
    trajectory = rollouts.run()
    assert errors(trajectory) == [None, None]
    assert trajectory.outcome.changes == {"f": "return x + 2\n"}


def test_without_a_call_no_workspace_is_made(rollouts: Rollouts) -> None:
    rollouts.script.says('<tool_call>\n{"name": "edit", "arguments": {"path"').says("I give up.")
    trajectory = rollouts.run()
    assert trajectory.outcome.stop is StopReason.FINISHED
    assert errors(trajectory) == ["malformed_call"]
    (call,) = [e for e in trajectory.events if e.kind is EventKind.TOOL_CALL]
    assert call.data["malformed"]
    assert '"arguments": {"path"' in call.data["raw"]
    assert rollouts.made == []


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("edit", {"path": "f", "old": "gap"}, "new: Field required"),
        ("edit", {"path": "f", "old": "", "new": "x"}, "old:"),
        ("edit", {"path": "f", "old": "gap", "new": "x", "count": 1}, "count:"),
        ("read", {"path": "f", "start": "many"}, "start:"),
        ("read", {"path": "f\0g"}, "NUL"),
        ("shell", {"command": ""}, "command:"),
        ("read", {"path": "f", "start": 9}, "only 1 lines"),
        ("grep", {"pattern": "("}, ""),
    ],
)
def test_wrong_arguments_are_named(
    rollouts: Rollouts, name: str, arguments: Mapping[str, Any], named: str
) -> None:
    rollouts.script.calls((name, arguments)).says("Done.")
    trajectory = rollouts.run()
    assert errors(trajectory) == ["invalid_arguments"]
    (result,) = [e.data["text"] for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert named in result


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (("read", {"path": "ff"}), "not_found", "Similar: f"),
        (("read", {"path": "no/g"}), "not_found", "no folder no"),
        (("read", {"path": "f/g"}), "not_found", "does not exist"),
        (("edit", {"path": ".", "old": "a", "new": "b"}), "wrong_kind", "is a folder"),
        (("write", {"path": "f/g", "content": "a"}), "denied", "cannot be written"),
        (("edit", {"path": "f", "old": "gap", "new": "gap"}), "no_change", "unchanged"),
        (("edit", {"path": "f", "old": "r", "new": "s"}), "several_matches", "2 times"),
        (("edit", {"path": "f", "old": "return  gap", "new": "x"}), "no_match", "1: return gap"),
        (("write", {"path": "f", "content": "return gap\n"}), "no_change", "already"),
        (("shell", {"command": "echo a; echo b >&2; exit 3"}), "nonzero_exit", "exit code 3\na\nb"),
        (("grep", {"pattern": r"\bg\w+$"}), None, "f:1:return gap"),
        (("grep", {"pattern": "absent"}), None, "no match"),
        (("grep", {"pattern": "a", "path": "none"}), "not_found", "none"),
        (("read", {"path": "."}), None, "f"),
        (("shell", {"command": "cat /etc/shadow"}), "nonzero_exit", "shadow"),
    ],
)
def test_each_tool_tells_what_happened(
    rollouts: Rollouts, call: tuple[str, Mapping[str, Any]], error: str | None, text: str
) -> None:
    rollouts.script.calls(call).says("Done.")
    trajectory = rollouts.run()
    (result,) = [e.data for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert result["error_class"] == error
    assert text in result["text"]
    assert trajectory.outcome.changes == {}


def test_token_budget_and_cut_answers(rollouts: Rollouts) -> None:
    rollouts.script.calls(("read", {"path": "f"})).says("word " * 50)
    first = len(rollouts.script.answers[0])
    trajectory = rollouts.run(token_budget=first + 5)
    assert trajectory.outcome.stop is StopReason.BUDGET
    assert trajectory.segments[0].sampled == first + 5
    rollouts.script.prompts.clear()
    assert rollouts.run(token_budget=first).outcome.stop is StopReason.BUDGET
    rollouts.script.prompts.clear()
    trajectory = rollouts.run(max_turn_tokens=first)
    assert "cut at" in trajectory.outcome.detail


def test_context_full_keeps_only_what_the_model_read(rollouts: Rollouts) -> None:
    rollouts.script.calls(EDIT).calls(("shell", {"command": "seq 999"})).says("never")
    whole = rollouts.run()
    length = len(whole.segments[0].prompt_ids) + 120
    rollouts.script.prompts.clear()
    trajectory = rollouts.run(rollouts.script.engine(context_length=length))
    assert trajectory.outcome.stop is StopReason.CONTEXT_FULL
    assert trajectory.outcome.valid_call
    (segment,) = trajectory.segments
    assert segment.mask[-1]
    rollouts.script.prompts.clear()
    none = rollouts.run(rollouts.script.engine(context_length=10))
    assert none.outcome.stop is StopReason.CONTEXT_FULL
    assert none.segments == ()


def test_a_failing_sandbox_is_an_error_not_a_zero(rollouts: Rollouts) -> None:
    rollouts.script.calls(("read", {"path": "f"})).calls(("shell", {"command": "true"}))

    async def go() -> Trajectory:
        def break_it(event: Event) -> None:
            if event.kind is EventKind.TOOL_RESULT:
                closing.append(asyncio.ensure_future(rollouts.made[0].close()))

        closing: list[asyncio.Future[None]] = []
        engine = rollouts.script.engine(seconds_per_token=0.01)
        return await rollouts.session(engine, on_event=break_it).run("Work.")

    trajectory = asyncio.run(go())
    assert trajectory.outcome.stop is StopReason.ERROR
    assert errors(trajectory) == [None, "sandbox"]
    assert trajectory.outcome.detail.startswith("the sandbox failed: ")


def test_a_workspace_that_cannot_be_made_is_an_error(script: Any) -> None:
    async def fails() -> Workspace:
        raise WorkspaceError("no space left")

    async def hangs() -> Workspace:
        await asyncio.sleep(60)
        raise AssertionError

    async def denied() -> Workspace:
        raise PermissionError("host folder")

    def run(factory: Callable[[], Awaitable[Workspace]]) -> Trajectory:
        script.prompts.clear()
        script.calls(("read", {"path": "f"}))
        limits = SessionSettings(workspace_timeout=0.2)
        session = Session(
            TokenPolicy(script.engine(), script.renderer),
            factory,
            default_tools(),
            limits,
            session_id="s",
        )
        return asyncio.run(session.run("Work."))

    for factory, reason in ((fails, "no space left"), (hangs, "time"), (denied, "host folder")):
        trajectory = run(factory)
        assert trajectory.outcome.stop is StopReason.ERROR
        assert reason in trajectory.outcome.detail
        assert errors(trajectory) == ["sandbox"]


def test_an_engine_that_does_not_answer_is_an_error(rollouts: Rollouts) -> None:
    rollouts.script.says("too slow")
    engine = rollouts.script.engine(seconds_per_token=10)
    outcome = rollouts.run(engine, turn_timeout=0.1).outcome
    assert outcome.stop is StopReason.ERROR
    assert "engine" in outcome.detail


def test_the_six_counts_of_a_transcript(rollouts: Rollouts) -> None:
    script = rollouts.script
    script.says("<think>\nhmm\n</think>\nI read.\n" + call_text("read", '{"path": "f"}'))
    script.calls(EDIT, ("read", {"path": "f"})).says("It is done.")
    trajectory = rollouts.run()
    parsed = [script.renderer.parse(answer) for answer in script.answers]
    usage = trajectory.usage
    assert usage.thinking_tokens == parsed[0].thinking_tokens > 0
    assert usage.tool_call_tokens == sum(p.call_tokens for p in parsed)
    assert usage.final_message_tokens == sum(p.text_tokens for p in parsed)
    assert (usage.tool_calls, usage.turns) == (3, 3)
    (segment,) = trajectory.segments
    sampled = usage.thinking_tokens + usage.tool_call_tokens + usage.final_message_tokens
    assert sampled == segment.sampled
    # Between two turns there are only results and the next header of the assistant.
    headers = sum(len(script.renderer.follow(a)) for a in script.answers[:2])
    assert usage.tool_output_tokens == int((~segment.mask).sum()) - headers
    assert usage.prompt_tokens == sum(map(len, script.prompts))
    assert usage.seconds > 0


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_file_brought_back_to_the_image_is_a_change(
    sandbox: Sandbox, image: MakeImage, script: Any
) -> None:
    """The usual right answer: the task took a piece out, the model puts exactly it back."""
    pristine = image({"f": b"return x + 1\n", "g": b"kept\n"})

    async def workspace() -> Workspace:
        made = await sandbox.create(pristine)
        await made.write("f", b"return gap\n")
        await made.write("g", b"cut\n")
        return made

    script.calls(EDIT)
    session = Session(
        TokenPolicy(script.engine(), script.renderer),
        workspace,
        default_tools(),
        SessionSettings(max_turns=1),
        session_id="s",
    )
    trajectory = asyncio.run(session.run("Fill the gap."))
    assert trajectory.outcome.changes == {"f": "return x + 1\n"}


def test_what_is_no_text_is_named_and_left_out(rollouts: Rollouts) -> None:
    command = "printf '\\xff' > b.bin; ln -s f link; rm f; echo new > n"
    rollouts.script.calls(("shell", {"command": command})).says("Done.")
    outcome = rollouts.run().outcome
    assert outcome.changes == {"f": None, "n": "new\n"}
    assert "b.bin" in outcome.detail
    assert "link" in outcome.detail


def test_long_output_keeps_head_and_tail(rollouts: Rollouts) -> None:
    rollouts.script.calls(("shell", {"command": "seq 100000"})).says("Done.")
    trajectory = rollouts.run(rollouts.script.engine(context_length=100_000), max_result_chars=400)
    (text,) = [e.data["text"] for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert text.startswith("1\n2\n")
    assert "\n100000\n[" in text and text.endswith("are in /tmp/etude/output-1.txt]")
    assert len(text) < 500


def test_write_keeps_the_style_of_what_it_replaces(rollouts: Rollouts) -> None:
    rollouts.image = rollouts.make({"dos": b"\xef\xbb\xbfa\r\nb\r\n", "unix": b"a\nb\n"})
    for path in ("dos", "unix", "new/file"):
        rollouts.script.calls(("write", {"path": path, "content": "c\nd\n"}))
    rollouts.script.says("Done.")
    trajectory = rollouts.run()
    assert trajectory.outcome.changes == {
        "dos": "\ufeffc\r\nd\r\n",
        "unix": "c\nd\n",
        "new/file": "c\nd\n",
    }


def test_turns_have_seeds_of_their_own_that_the_session_fixes(rollouts: Rollouts) -> None:
    def seeds(seed: int) -> list[int]:
        seen: list[int] = []
        answers = [rollouts.script.renderer.expert("", [("read", {"path": "f"})])] * 3

        def answer(_: Any, sampling: Any) -> list[int]:
            seen.append(sampling.seed)
            return answers[0]

        rollouts.run(ScriptedEngine(answer), seed=seed, max_turns=3)
        return seen

    first = seeds(1)
    assert first == seeds(1)
    assert len({*first, *seeds(2)}) == 6


def test_chat_keeps_one_chain_over_several_messages(rollouts: Rollouts) -> None:
    rollouts.script.calls(EDIT).says("Edited.").says("You are welcome.")

    async def go() -> Trajectory:
        async with rollouts.session() as session:
            assert await session.prompt("Fill the gap.") is StopReason.FINISHED
            assert await session.prompt("Thanks!") is StopReason.FINISHED
            return await session.trajectory()

    trajectory = asyncio.run(go())
    assert len(trajectory.segments) == 1
    assert [len(t) for t in (trajectory.segments[0].turns,)] == [3]
    assert trajectory.outcome.changes == {"f": "return x + 1\n"}
    kinds = [event.kind.value for event in trajectory.events]
    assert kinds.count("system") == 1
    assert kinds.count("user") == kinds.count("stop") == 2


def test_expert_transcripts_come_from_the_real_harness(
    rollouts: Rollouts, renderer: HermesRenderer
) -> None:
    turns = [("read", {"path": "f"}), EDIT]
    tools = tools_named(["read", "edit"])
    engine = expert_engine(renderer, turns, [tool.spec() for tool in tools])
    trajectory = rollouts.run(engine, tools=tools)
    assert trajectory.outcome.changes == {"f": "return x + 1\n"}
    segment = trajectory.segments[0]
    spans = [segment.completion_ids[turn.start : turn.end].tolist() for turn in segment.turns]
    assert [[(c.name, c.arguments) for c in renderer.parse(span).calls] for span in spans] == [
        [turns[0]],
        [turns[1]],
        [],
    ]
    with pytest.raises(EtudeError, match="no tool named 'python'"):
        tools_named(["python"])


MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "}", "é", "<|im_end|>", "{"]
CALLS = [
    call_text("read", '{"path": "f"}'),
    call_text("grep", '{"pattern": "a|é"}'),
    call_text("edit", '{"path": "f", "old": "gap", "new": "\\u00e9"}'),
    call_text("x", "{}"),
]
PIECES = st.sampled_from([*MARKERS, *CALLS])
ANSWERS = st.lists(
    st.tuples(st.lists(PIECES, max_size=6).map("".join), st.booleans()), min_size=1, max_size=4
)


@given(st.lists(ANSWERS, min_size=1, max_size=3), st.integers(5, 80))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_conversation_only_appends_and_replays(
    rollouts: Rollouts, messages: list[list[tuple[str, bool]]], max_turn_tokens: int
) -> None:
    script = rollouts.script
    script.answers.clear()
    script.prompts.clear()
    answers = [
        [*script.tokens.encode(text), *([script.renderer.stop_ids[0]] if end else [])]
        for answers in messages
        for text, end in answers
    ]
    script.answers = [answer or [script.renderer.stop_ids[0]] for answer in answers] * 20

    async def go() -> Trajectory:
        async with rollouts.session(max_turns=3, max_turn_tokens=max_turn_tokens) as session:
            for number in range(len(messages)):
                await session.prompt(f"message {number} <|im_end|>")
            return await session.trajectory()

    trajectory = asyncio.run(go())
    (segment,) = trajectory.segments
    ids = np.concatenate([segment.prompt_ids, segment.completion_ids])
    for prompt, turn in zip(script.prompts, segment.turns, strict=True):
        assert prompt == ids[: len(segment.prompt_ids) + turn.start].tolist()
    for answer, turn in zip(script.answers, segment.turns, strict=False):
        span = segment.completion_ids[turn.start : turn.end].tolist()
        assert span == answer[:max_turn_tokens]
    usage = trajectory.usage
    assert segment.sampled == (
        usage.thinking_tokens + usage.tool_call_tokens + usage.final_message_tokens
    )
    calls = [e.data["id"] for e in trajectory.events if e.kind is EventKind.TOOL_CALL]
    told = [e.data["id"] for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert calls == told
    again = replay(trajectory, script.renderer)
    np.testing.assert_array_equal(again[0].completion_ids, segment.completion_ids)
    np.testing.assert_array_equal(again[0].mask, segment.mask)
    assert to_markdown(trajectory)
    assert to_text(trajectory.events)


def test_transcript_shows_all_and_no_fence_can_be_closed(rollouts: Rollouts) -> None:
    rollouts.script.calls(("write", {"path": "n", "content": "```\n# not a heading\n````"}))
    rollouts.script.says("<think>so</think>Done with `it`.")
    trajectory = rollouts.run()
    markdown = to_markdown(trajectory)
    fence = "`````"
    assert f"{fence}\npath: n\ncontent:\n```\n# not a heading\n````\n{fence}" in markdown
    text = to_text(trajectory.events)
    for piece in ("call write", "made n", "(thinking) so", "Done with `it`.", "stop: finished"):
        assert piece in markdown
        assert piece in text
