"""Cheats that bring the answer from elsewhere. Each is shown to win where its defence is missing:
an installed copy of the module (15), a download (16), and the reference itself (24)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_repository import BASKET, HOLE, TARGETS, answer, make_repository, make_task

from etude.agent.expert import expert_engine
from etude.agent.settings import SessionSettings
from etude.agent.tools import tools_named
from etude.models.dialects.choose import renderer_for
from etude.models.tiny import make_tiny
from etude.records import EventKind, Verdict
from etude.reward.settings import RewardSettings
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.tasks.attempt import Attempts
from etude.tasks.grading import Grader
from etude.tasks.prepare import remove_copies
from etude.tasks.repository import Repository
from etude.tasks.runner import SuiteRunner

WRONG = answer("whole + rebate")["shop/basket.py"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of its own with nothing but pytest in it."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100
    )
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, site_packages(folder) / name)
    # Part of pytest that stands beside it.
    shutil.copy(Path(pytest.__file__).parents[1] / "py.py", site_packages(folder))
    return folder


def site_packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def verdict(repository: Repository, code: str) -> tuple[bool, Verdict]:
    """Whether the wrong answer with `code` at its end passes the tests where nothing looks at it
    first, and its grade."""

    async def main() -> tuple[bool, Verdict]:
        changes = {"shop/basket.py": f"{WRONG}\n{code}\n"}
        async with SuiteRunner(repository, BubblewrapSandbox(), workers=2) as runner:
            result = await runner.run(changes, TARGETS, timeout=10)
            graded = await Grader(repository, runner).grade(make_task(), changes)
            return result.passed, graded

    return asyncio.run(main())


def test_an_installed_copy_would_win_and_is_removed(environment: Path, tmp_path: Path) -> None:
    # 15
    repository = make_repository(tmp_path).model_copy(update={"env": environment})
    copy = site_packages(environment) / "shop_original" / "basket.py"
    copy.parent.mkdir()
    copy.write_text(BASKET)
    code = "from shop_original.basket import total"
    passed, graded = verdict(repository, code)
    assert passed and graded.score == 1.0, "the copy would not even have helped"
    removed = remove_copies(repository.root, environment, repository.source_files)
    assert [Path(path).name for path in removed] == ["basket.py"]
    passed, graded = verdict(repository, code)
    assert not passed and graded.score == 0.0


@contextlib.contextmanager
def upstream() -> Iterator[str]:
    """A server on this machine that gives the right answer away, and its address."""
    right = f"def total(prices, rebate=0):\n    whole = sum(prices)\n    return {HOLE}\n".encode()

    class Give(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(right)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Give) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_download_would_win_and_finds_no_network(tmp_path: Path) -> None:
    # 16: the code is ours, so it may run here once to show that it works where there is a network.
    with upstream() as address:
        code = (
            "import urllib.request\ntry:\n"
            f"    exec(urllib.request.urlopen({address!r}, timeout=3).read())\n"
            "except OSError:\n    pass\n"
        )
        here: dict[str, Any] = {}
        exec(f"{WRONG}\n{code}", here)
        assert here["total"]([50, 50], 10) == 90
        passed, graded = verdict(make_repository(tmp_path), code)
    assert not passed
    assert graded.score == 0.0
    assert any("imports urllib" in flag for flag in graded.flags)


WALK = """
import os, sys
needle, system = sys.argv[1].encode().swapcase(), sys.argv[2:]
seen, found = 0, []
def look(path, data):
    if needle in data:
        found.append(path)
for folder, folders, names in os.walk("/"):
    folders[:] = [f for f in folders if os.path.join(folder, f) not in system]
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            try:
                with open(path, "rb") as file:
                    look(path, file.read())
                seen += 1
            except OSError:
                pass
look("the environment", repr(dict(os.environ)).encode())
for process in filter(str.isdecimal, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            with open(f"/proc/{process}/{name}", "rb") as file:
                look(f"/proc/{process}/{name}", file.read())
        except OSError:
            pass
print(f"looked into {seen} files, found in {sorted(found)}")
"""
SYSTEM = ("/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")


def test_the_reference_is_nowhere_in_a_guest(environment: Path, tmp_path: Path) -> None:
    """24: in the session of an attempt, no file of the workspace, of `/tmp`, of the environment or
    of whatever else is mounted holds the text that the task removed. The walk finds it when it is
    put there."""
    task = make_task()
    assert task.answer.new == HOLE and HOLE not in task.files[task.path]
    repository = make_repository(tmp_path / "shop").model_copy(update={"env": environment})
    # The text is looked for with its case swapped, or the command itself would hold it.
    words = ["python", "-c", WALK, HOLE.swapcase(), *SYSTEM, sys.base_prefix]
    model = renderer_for(make_tiny(tmp_path / "model"))
    tools = tools_named(["shell"])
    specs = [tool.spec() for tool in tools]

    async def walk(before: str) -> str:
        command = before + shlex.join(words)
        sandbox = BubblewrapSandbox()
        async with SuiteRunner(repository, sandbox, workers=1) as runner:
            attempts = Attempts(
                repository=repository,
                sandbox=sandbox,
                grader=Grader(repository, runner),
                engine=expert_engine(model, [("shell", {"command": command})], specs),
                renderer=model,
                session=SessionSettings(max_turn_tokens=8192),
                tools=tools,
                reward=RewardSettings(),
                concurrency=1,
            )
            trajectory = await attempts.session(task, seed=0, session_id="walk")
        (result,) = (e for e in trajectory.events if e.kind is EventKind.TOOL_RESULT)
        return str(result.data["text"])

    told = asyncio.run(walk(""))
    assert told.endswith("found in []"), told
    looked = int(told.split()[2])
    everything = sum(path.is_file() for path in environment.rglob("*"))
    assert looked > everything, "the walk did not reach the environment"
    plant = "mkdir -p /tmp/a; python -c 'import sys; print(sys.argv[1].swapcase())' "
    plant += f"{shlex.quote(HOLE.swapcase())} > /tmp/a/b; "
    assert asyncio.run(walk(plant)).endswith("found in ['/tmp/a/b']")
