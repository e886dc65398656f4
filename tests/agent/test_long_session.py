"""Two hundred turns: every prompt only appends, and memory stays flat."""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.agent.log import SessionLog, read_log
from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy, replay
from etude.agent.tools import default_tools
from etude.records import Event, EventKind, StopReason, Trajectory
from etude.sandbox.protocol import Image, Sandbox

MakeImage = Callable[[Mapping[str, bytes]], Image]
TURNS = 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(120)
def test_two_hundred_turns(sandbox: Sandbox, image: MakeImage, script: Any, tmp_path: Path) -> None:
    for number in range(TURNS):
        script.calls(
            ("shell", {"command": f"seq {number} {number + 200}"})
            if number % 2
            else ("read", {"path": "f"})
        )
        script.says(f"Turn {number} is over.")
    sizes: list[int] = []
    engine = script.engine(context_length=10**7)
    # The prompts that the script keeps for the check are not the session's memory.
    prefix_broken: list[int] = []
    last: list[int] = []

    def check(prompt: list[int], answer: list[int]) -> None:
        nonlocal last
        if prompt[: len(last)] != last:
            prefix_broken.append(len(sizes))
        last = prompt + answer

    async def go() -> Trajectory:
        log = SessionLog(tmp_path / "log.jsonl", {"project": "p"})

        def on_event(event: Event) -> None:
            if event.kind is EventKind.ASSISTANT:
                number = len(script.prompts) - 1
                check(script.prompts[number], script.answers[number])
                script.prompts[number] = []
            if event.kind is EventKind.STOP:
                sizes.append(resident_bytes())

        session = Session(
            TokenPolicy(engine, script.renderer),
            lambda: sandbox.create(image({"f": b"x" * 2000 + b"\n"})),
            default_tools(),
            SessionSettings(),
            session_id="s",
            log=log,
            on_event=on_event,
        )
        async with session:
            for number in range(TURNS):
                assert await session.prompt(f"Message {number}.") is StopReason.FINISHED
            trajectory = await session.trajectory()
        log.close()
        return trajectory

    trajectory = asyncio.run(go())
    assert prefix_broken == []
    assert trajectory.usage.turns == 2 * TURNS
    (segment,) = trajectory.segments
    assert len(segment.turns) == 2 * TURNS
    (again,) = replay(trajectory, script.renderer)
    assert again.completion_ids.tolist() == segment.completion_ids.tolist()
    assert read_log(tmp_path / "log.jsonl").events == trajectory.events
    # The record itself grows, by 17 bytes per token (id, mask, log-prob, version) and the texts.
    record = 17 * len(segment.completion_ids)
    texts = sum(len(str(event.data)) for event in trajectory.events)
    growth = sizes[-1] - sizes[TURNS // 4]
    assert growth < 2 * (record + texts) + (8 << 20), (growth, record, texts)
