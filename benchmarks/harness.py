"""What the harness itself costs: everything of a turn but the model and the tool.

python benchmarks/harness.py [--turns 100] [--repeats 5] [--quick]

Both sides make the same calls, one shell command per turn, answered by a script. Ours is a
person's live session with gate, checkpoints, log and token ledger on a real project in a sandbox;
theirs is mini-swe-agent's default agent, its trajectory file on, with its local environment, which
has no sandbox. The time between the end of one answer and the next question is taken, less the time
that the command itself took on each side. Needs `pip install --no-deps mini-swe-agent
python-dotenv platformdirs`; without it there is no peer, and the row says so.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import shape
from etude.agent.backend import EngineBackend
from etude.agent.live import Drivers, LiveOptions, open_live
from etude.agent.permissions import Mode
from etude.agent.sessions import SessionStore
from etude.agent.settings import SessionSettings
from etude.inference.protocol import Sampling
from etude.inference.scripted import ScriptedEngine
from etude.models.dialects.hermes import HermesRenderer
from etude.models.tiny import train_tokenizer
from etude.sandbox.protocol import Sandbox
from etude.sandbox.registry import open_sandbox

LIMIT_MS, HELP_LIMIT_S, PROMPT_LIMIT_S = 20.0, 0.3, 1.0
PEER = "minisweagent"
PROMPT = "›".encode()


def command(number: int) -> str:
    """The shell command of one turn."""
    return f"echo turn {number}"


class Gaps:
    """Seconds between an answer and the next question, less what the tool took."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._answered: float | None = None
        self._tool = 0.0

    def asked(self) -> None:
        """The model is asked."""
        if self._answered is not None:
            self.gaps.append(time.perf_counter() - self._answered - self._tool)

    def answered(self) -> None:
        """The model has answered."""
        self._answered, self._tool = time.perf_counter(), 0.0

    @contextmanager
    def tool(self) -> Iterator[None]:
        """The tool's own work."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._tool += time.perf_counter() - began


def ours(turns: int, renderer: HermesRenderer, folder: Path) -> float:
    """Milliseconds per turn of a live session, the median over its last tenth."""
    gaps = Gaps()
    answers = [renderer.expert("", [("shell", {"command": command(n)})]) for n in range(turns)]
    answers.append(renderer.expert("Done.", []))
    said = iter(answers)

    def answer(prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        return next(said)

    class Engine(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            gaps.asked()
            try:
                return await super().generate(*args, **kwargs)
            finally:
                gaps.answered()

    engine = Engine(answer, context_length=10**6)

    async def go() -> None:
        sandbox = await open_sandbox()

        async def opened() -> Sandbox:
            return sandbox

        project = folder / "project"
        project.mkdir()
        (project / "a.py").write_text("a = 1\n")
        options = LiveOptions(
            project, mode=Mode.AUTO, settings=SessionSettings(max_turns=turns + 1)
        )
        drivers = Drivers(EngineBackend("script", lambda: (engine, renderer)), opened)
        with closing(sandbox):
            store = SessionStore(folder / "sessions")
            async with await open_live(drivers, options, store=store) as live:
                workspace = await live.session.open_workspace()
                plain = type(workspace).exec

                async def timed_exec(self: Any, *args: Any, **kwargs: Any) -> Any:
                    with gaps.tool():
                        return await plain(self, *args, **kwargs)

                type(workspace).exec = timed_exec  # type: ignore[method-assign]
                try:
                    await live.prompt("Work.")
                finally:
                    type(workspace).exec = plain  # type: ignore[method-assign]

    os.environ["ETUDE_STATE"] = str(folder / "state")
    asyncio.run(go())
    assert len(gaps.gaps) == turns, f"{len(gaps.gaps)} turns were measured, not {turns}"
    return 1000 * statistics.median(gaps.gaps[-max(1, turns // 10) :])


def theirs(turns: int, folder: Path) -> float:
    """The same of mini-swe-agent."""
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.test_models import DeterministicModel, make_output

    gaps = Gaps()

    class Model(DeterministicModel):
        def query(self, messages: list[dict[str, str]], **kwargs: Any) -> dict[str, Any]:
            gaps.asked()
            try:
                return super().query(messages, **kwargs)
            finally:
                gaps.answered()

    class Environment(LocalEnvironment):
        def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            with gaps.tool():
                return super().execute(*args, **kwargs)

    outputs = [make_output("", [{"command": command(n)}], cost=0.0) for n in range(turns)]
    last = [{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}]
    agent = DefaultAgent(
        Model(outputs=[*outputs, make_output("", last, cost=0.0)]),
        Environment(cwd=str(folder)),
        system_template="You are a coding agent.",
        instance_template="{{task}}",
        output_path=folder / "trajectory.json",
    )
    agent.run("Work.")
    assert len(gaps.gaps) == turns, f"{len(gaps.gaps)} turns were measured, not {turns}"
    return 1000 * statistics.median(gaps.gaps[-max(1, turns // 10) :])


def in_folder(measure: Callable[[Path], float]) -> Callable[[], float]:
    """Measure in a folder of its own."""

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return measure(Path(folder))

    return once


def start_seconds(*words: str) -> float:
    """Until `etude …` has ended."""
    program = "from etude.cli.app import main; main()"
    return shape.timed(
        lambda: subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, check=True, timeout=60
        )
    )


def prompt_seconds() -> float:
    """Until the terminal's prompt can be seen, on a pseudo-terminal, with a model named."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text('{"turns": []}')
        (project := Path(folder) / "project").mkdir()
        ours_end, its_end = pty.openpty()
        began = time.perf_counter()
        program = "from etude.cli.app import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", program, "--model", f"script:{script}"],
            cwd=project,
            env={**os.environ, "TERM": "xterm-256color", "ETUDE_STATE": folder},
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
            start_new_session=True,
        )
        try:
            shown = b""
            while PROMPT not in shown:
                if not select.select([ours_end], [], [], 30)[0]:
                    raise TimeoutError("no prompt within 30 s")
                shown += os.read(ours_end, 1 << 16)
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()
            os.close(ours_end)
            os.close(its_end)


def limited(metric: str, unit: str, values: Sequence[float], limit: float) -> shape.Row:
    """A row against a limit: the ratio is limit / value, so that 1 and more is met."""
    return shape.compared(
        metric,
        unit,
        (values, [limit] * len(values)),
        peer="limit",
        goal=1.0,
        larger_is_better=False,
    )


def main() -> None:
    """Measure and write `results/harness.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    renderer = HermesRenderer(train_tokenizer(2048))
    our_turns = in_folder(lambda folder: ours(options.turns, renderer, folder))
    our_turns()  # warm
    if importlib.util.find_spec(PEER) is None:
        values = [our_turns() for _ in range(options.repeats)]
        row = shape.not_measured(
            "overhead vs mini-swe-agent", "ms", "mini-swe-agent is not installed"
        )
        peer = None
    else:
        from minisweagent import __version__ as peer

        pairs = shape.alternate(
            our_turns, in_folder(lambda folder: theirs(options.turns, folder)), options.repeats
        )
        values = pairs[0]
        row = shape.compared(
            "overhead vs mini-swe-agent",
            "ms",
            pairs,
            peer=f"mini-swe-agent {peer}",
            larger_is_better=False,
        )
    rows = [
        limited("overhead per turn ms", "ms", values, LIMIT_MS),
        row,
        limited(
            "help start s",
            "s",
            [start_seconds("--help") for _ in range(options.repeats)],
            HELP_LIMIT_S,
        ),
        limited(
            "prompt start s",
            "s",
            [prompt_seconds() for _ in range(options.repeats)],
            PROMPT_LIMIT_S,
        ),
    ]
    if options.quick:
        for each in rows:
            print(json.dumps(vars(each)))
        return
    facts = {
        "turns": options.turns,
        "repeats": options.repeats,
        "ours": "live session: gate, checkpoints, log, token ledger; median of the last tenth",
        "theirs": f"DefaultAgent {peer} with its trajectory file; the same median",
    }
    print(shape.write("harness", rows, facts, [0]))


if __name__ == "__main__":
    main()
