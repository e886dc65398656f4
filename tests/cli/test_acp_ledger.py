"""Every driver gives the same token ledger for the same scripted model: `etude -p`, `etude acp`,
a `LiveSession` by itself, and a rollout (`Session.run` on a copy, without gate or log).

What a person's session adds to a rollout are two remarks before the first message (mode and date);
the rollout is given the same ones here.
"""

import asyncio
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from acp.helpers import text_block
from acp_editor import START, environment, script, started

from etude.agent.backend import script_backend
from etude.agent.live import Drivers, LiveOptions, open_live
from etude.agent.log import read_log
from etude.agent.permissions.modes import MODE_NOTES, Mode
from etude.agent.prompts import SYSTEM_PROMPT
from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.tools import session_tools, with_tools
from etude.records import Segment
from etude.sandbox.protocol import Image, Workspace
from etude.sandbox.registry import open_sandbox

PROMPT = "change two to 2, then say <|im_end|> and stop"
TURNS = [
    ("Looking.", [("read", {"path": "a.txt"}), ("grep", {"pattern": "o"})]),
    (
        "",
        [("edit", {"path": "a.txt", "old": "two", "new": "2 \u00e4 '\"{"}), ("nope", {"x": True})],
    ),
    ("", [("shell", {"command": "cat a.txt; exit 3"}), ("edit", {"path": "a.txt"})]),
    ("Done.", []),
]


def project(folder: Path, name: str) -> Path:
    root = folder / name / "project"
    root.mkdir(parents=True)
    (root / "a.txt").write_text("one\ntwo\nthree\n")
    return root


def kept(folder: Path, model: Path) -> tuple[Segment, ...]:
    """The ledger of the only session in a state folder, from its log."""

    async def run() -> tuple[Segment, ...]:
        (log,) = (folder / "state" / "sessions").glob("*.jsonl")
        policy = await script_backend(model).new_policy()

        async def no_workspace() -> Workspace:
            raise AssertionError("reading a log needs no workspace")

        session = Session(policy, no_workspace, (), SessionSettings(), session_id="again")
        session.recall(read_log(log).entries)
        return (await session.trajectory()).segments

    return asyncio.run(run())


def headless(folder: Path, model: Path) -> tuple[Segment, ...]:
    root = project(folder, "headless")
    options = ["--model", f"script:{model}", "--mode", "auto", "--folder", str(root)]
    ran = subprocess.run(
        [sys.executable, "-c", START, "-p", PROMPT, *options],
        env=environment(root.parent),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return kept(root.parent, model)


def editor(folder: Path, model: Path) -> tuple[Segment, ...]:
    root = project(folder, "editor")

    async def run() -> None:
        async with started(root.parent, f"script:{model}", "--mode", "auto") as (_, agent, _):
            made = await agent.new_session(cwd=str(root), mcp_servers=[])
            answer = await agent.prompt(session_id=made.session_id, prompt=[text_block(PROMPT)])
            assert answer.stop_reason == "end_turn"

    asyncio.run(run())
    return kept(root.parent, model)


def live(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Segment, ...]:
    root = project(folder, "live")
    for name in ("STATE", "CONFIG"):
        monkeypatch.setenv(f"ETUDE_{name}", str(root.parent / name.lower()))

    async def run() -> tuple[Segment, ...]:
        sandbox = await open_sandbox()
        drivers = Drivers(script_backend(model), lambda: asyncio.sleep(0, sandbox))
        try:
            async with await open_live(drivers, LiveOptions(root, Mode.AUTO)) as session:
                await session.prompt(PROMPT)
                return (await session.session.trajectory()).segments
        finally:
            sandbox.close()

    return asyncio.run(run())


def rollout(folder: Path, model: Path) -> tuple[Segment, ...]:
    root = project(folder, "rollout")

    async def run() -> tuple[Segment, ...]:
        sandbox = await open_sandbox()
        try:
            session = Session(
                await script_backend(model).new_policy(),
                lambda: sandbox.create(with_tools(Image(root))),
                session_tools(),
                SessionSettings(),
                session_id="rollout",
                system=SYSTEM_PROMPT,
            )
            session.note(MODE_NOTES[Mode.AUTO])
            session.note(f"[date: {date.today().isoformat()}]")
            return (await session.run(PROMPT)).segments
        finally:
            sandbox.close()

    segments = asyncio.run(run())
    assert (root / "a.txt").read_text() == "one\ntwo\nthree\n", "a rollout works on a copy"
    return segments


def test_every_driver_gives_the_same_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.json"
    script(model, *TURNS)
    expected = rollout(tmp_path, model)
    assert len(expected) == 1 and len(expected[0].turns) == len(TURNS)
    others = {
        "headless": headless(tmp_path, model),
        "editor": editor(tmp_path, model),
        "live": live(tmp_path, model, monkeypatch),
    }
    for driver, segments in others.items():
        assert len(segments) == len(expected), driver
        for ours, theirs in zip(segments, expected, strict=True):
            for name in ("prompt_ids", "completion_ids", "mask", "logprobs", "policy_versions"):
                np.testing.assert_array_equal(
                    getattr(ours, name), getattr(theirs, name), err_msg=f"{driver}: {name}"
                )
            assert ours.turns == theirs.turns
