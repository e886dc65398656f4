"""A session's shell and its background jobs in the real sandbox."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.agent.tools.job import JobTool
from etude.agent.tools.shell import SessionShell, Shell
from etude.agent.tools.tool import ErrorClass, ToolContext, ToolResult, invoke, prepare
from etude.models.renderer import ToolCall
from etude.sandbox.protocol import Image, Sandbox, Workspace

MakeImage = Callable[[Mapping[str, bytes]], Image]
TOOLS = [SessionShell(), JobTool()]


class Caller:
    """One session's calls, all on one loop."""

    def __init__(self, runner: asyncio.Runner, workspace: Workspace) -> None:
        self.runner, self.workspace = runner, workspace
        self.context = ToolContext(self.given, 30)

    async def given(self) -> Workspace:
        return self.workspace

    async def call(self, name: str, **arguments: Any) -> ToolResult:
        prepared = prepare(TOOLS, ToolCall(name, arguments, ""))
        if isinstance(prepared, ToolResult):
            return prepared
        return await invoke(prepared, self.context)

    def __call__(self, name: str, **arguments: Any) -> ToolResult:
        return self.runner.run(self.call(name, **arguments))


@pytest.fixture
def caller(sandbox: Sandbox, image: MakeImage) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        workspace = runner.run(sandbox.create(image({"sub/f.txt": b"hello\n"})))
        yield Caller(runner, workspace)
        runner.run(workspace.close())


def alive(mark: str) -> int:
    """Host processes whose command line holds `mark`."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                count += mark.encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return count


def only_job(caller: Caller) -> str:
    (job,) = caller.runner.run(caller.workspace.jobs())
    return job.id


def test_case_08_the_job_is_listed_and_dies_with_the_workspace(caller: Caller) -> None:
    started = time.monotonic()
    result = caller("shell", command="sleep 60.0808 & echo done")
    assert time.monotonic() - started < 2
    assert result.error_class is None
    job = only_job(caller)
    assert result.text == f"done\n[job {job} still runs]"
    (line,) = caller("job").text.splitlines()
    assert line.startswith(f"job {job} runs, ")
    assert line.endswith(": sleep 60.0808 & echo done")
    assert alive("60.0808")
    # What the command itself said is not told again.
    assert caller("job", id=job).text.splitlines()[1:] == ["(no new output)"]
    caller.runner.run(caller.workspace.close())
    assert alive("60.0808") == 0


def test_case_09_in_a_session_nothing_survives_the_limit(caller: Caller) -> None:
    command = "echo begun; sleep 99.0919 & setsid sleep 99.0919 & sleep 99.0919"
    result = caller("shell", command=command, timeout=1)
    assert result.error_class is ErrorClass.TIMEOUT
    assert result.text.startswith("cut at 1 s")
    assert result.text.endswith("begun")
    assert alive("99.0919") == 0
    assert caller("job").text == "(no jobs)"


def test_case_10_in_a_session_nothing_waits_for_an_editor(caller: Caller) -> None:
    started = time.monotonic()
    setup = "git init -q . && git -c user.name=a -c user.email=b commit --allow-empty"
    result = caller("shell", command=setup)
    assert result.error_class is ErrorClass.NONZERO_EXIT
    assert "editor" in result.text
    assert time.monotonic() - started < 5


def test_case_11_in_a_session_cancel_kills_what_ignores_it(caller: Caller) -> None:
    command = "trap '' TERM INT; echo x > ready; sleep 77.1111 & sleep 77.1111; sleep 77.1111"

    async def go() -> float:
        task = asyncio.ensure_future(caller.call("shell", command=command))
        for _ in range(500):
            if alive("77.1111"):
                break
            await asyncio.sleep(0.02)
        cancelled = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - cancelled

    assert caller.runner.run(go()) < 2
    assert alive("77.1111") == 0


def test_a_background_command_is_read_waited_for_and_stopped(caller: Caller) -> None:
    command = "echo one; sleep 0.8; echo two; sleep 55.2222"
    result = caller("shell", command=command, background=True)
    job = only_job(caller)
    assert result.text == f"job {job} runs.\none"
    text = ""
    deadline = time.monotonic() + 10
    while "two" not in text and time.monotonic() < deadline:
        text = caller("job", id=job, wait=0.3).text
    # Only what is new is shown.
    assert text.splitlines()[1:] == ["two"]
    assert caller("job", id=job).text.splitlines()[1:] == ["(no new output)"]
    stopped = caller("job", id=job, stop=True)
    assert stopped.text.startswith(f"job {job} ended with exit code ")
    assert alive("55.2222") == 0


def test_waiting_ends_with_the_job(caller: Caller) -> None:
    caller("shell", command="sleep 1; echo late; exit 3", background=True)
    started = time.monotonic()
    first, *output = caller("job", id=only_job(caller), wait=20).text.splitlines()
    assert "ended with exit code 3" in first
    assert output == ["late"]
    assert time.monotonic() - started < 10


def test_a_background_command_that_fails_at_once_is_a_failure(caller: Caller) -> None:
    result = caller("shell", command="echo no >&2; exit 4", background=True)
    assert result.error_class is ErrorClass.NONZERO_EXIT
    assert result.text == "exit code 4\nno"


def test_a_server_can_be_talked_to_by_later_commands(caller: Caller) -> None:
    caller("shell", command="python3 -m http.server 8123 --bind 127.0.0.1", background=True)
    fetch = (
        'for i in $(seq 50); do python3 -c "import urllib.request as u;'
        "print(u.urlopen('http://127.0.0.1:8123/sub/f.txt').read().decode())\" 2>/dev/null"
        " && exit; sleep 0.1; done; exit 1"
    )
    assert caller("shell", command=fetch).text.strip() == "hello"


def test_where_and_how_long(caller: Caller) -> None:
    assert caller("shell", command="pwd; cat f.txt", cwd="sub").text == "/workspace/sub\nhello"
    assert caller("shell", command="pwd", cwd="/tmp").text == "/tmp"
    assert caller("shell", command="pwd", cwd="nowhere").error_class is not None
    assert caller("shell", command="pwd", cwd="nowhere", background=True).error_class is not None
    assert caller("job", id="nope").error_class is ErrorClass.NOT_FOUND
    assert caller("shell", command="x", timeout=0).error_class is ErrorClass.INVALID_ARGUMENTS


def test_the_rollouts_shell_is_as_it_was() -> None:
    assert Shell().spec().parameters == {
        "additionalProperties": False,
        "properties": {
            "command": {"minLength": 1, "type": "string"},
            "timeout": {"exclusiveMinimum": 0, "type": "number", "default": None},
        },
        "required": ["command"],
        "type": "object",
    }
    assert Shell().description == "run a bash command"
