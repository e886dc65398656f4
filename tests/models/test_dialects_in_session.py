"""The whole harness in every dialect: real sandbox, real tools, scripted model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from dialect_cases import MARKERS, NAMES, case

from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import AnyTool, tools_named
from etude.inference.protocol import Sampling
from etude.inference.scripted import ScriptedEngine
from etude.models.stream import Delta
from etude.records import EventKind, StopReason, Trajectory
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image, Workspace

CONTENT = '{"scripts": {"test": "jest \\"a\\""}, "n": true}\n' + "\n".join(MARKERS) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_markers_is_written_and_read(tmp_path: Path, name: str) -> None:
    renderer, prompts = case(name).renderer, list[list[int]]()
    (tmp_path / "f").write_text("x\n")
    tools: Sequence[AnyTool] = tools_named(["read", "write"])
    specs = [tool.spec() for tool in tools]
    calls = [("write", {"path": "package.json", "content": CONTENT})]
    answers = [
        renderer.expert("I write.", calls, specs),
        renderer.expert("", [("read", {"path": "package.json"})], specs),
        renderer.expert("Done.", [], specs),
    ]

    def answer(prompt: Sequence[int], sampling: Sampling) -> Sequence[int]:
        prompts.append(list(prompt))
        return answers[len(prompts) - 1]

    deltas: list[Delta] = []
    trajectory = asyncio.run(_run(ScriptedEngine(answer), name, tmp_path, tools, deltas))
    assert trajectory.outcome.stop is StopReason.FINISHED, trajectory.outcome
    assert trajectory.outcome.changes == {"package.json": CONTENT}
    for earlier, said, later in zip(prompts, answers, prompts[1:], strict=False):
        assert later[: len(earlier) + len(said)] == earlier + said
    (segment,) = trajectory.segments
    assert [*segment.prompt_ids, *segment.completion_ids] == prompts[-1] + answers[-1]
    assert segment.sampled == sum(map(len, answers))
    assert "".join(d.text for d in deltas if d.kind == "text") == "I write.Done."
    results = [e.data for e in trajectory.events if e.kind is EventKind.TOOL_RESULT]
    assert [result["error_class"] for result in results] == [None, None]
    assert MARKERS[0] in str(results[1]["text"])


async def _run(
    engine: ScriptedEngine,
    name: str,
    root: Path,
    tools: Sequence[AnyTool],
    deltas: list[Delta],
) -> Trajectory:
    sandbox = BubblewrapSandbox()

    async def workspace() -> Workspace:
        return await sandbox.create(Image(root))

    async with Session(
        TokenPolicy(engine, case(name).renderer),
        workspace,
        tools,
        SessionSettings(max_turns=5, max_turn_tokens=4096),
        session_id="s",
        on_delta=deltas.append,
    ) as session:
        await session.prompt("Write a file of markers.")
        return await session.trajectory()
