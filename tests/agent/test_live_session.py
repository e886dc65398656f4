"""A person's session on real files: kept states, undo, hooks, sub-agents, resume."""

import asyncio
import functools
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from etude.agent.backend import local_backend
from etude.agent.live import Drivers, LiveOptions, LiveSession, open_live
from etude.agent.permissions import Mode
from etude.agent.sessions import SessionStore
from etude.errors import EtudeError
from etude.inference.settings import EngineSettings
from etude.records import Event, EventKind, StopReason
from etude.sandbox.protocol import Sandbox

T = TypeVar("T")


class Desk:
    """A project, a script and a place for state, all of them temporary."""

    def __init__(self, folder: Path, sandbox: Sandbox) -> None:
        self.folder, self.sandbox = folder, sandbox
        self.project = folder / "project"
        self.project.mkdir()
        self.said: list[str] = []
        self.hosts: tuple[str, ...] = ()
        self.children: list[tuple[str, Event]] = []

    def script(self, *turns: Any) -> None:
        (self.folder / "script.json").write_text(
            json.dumps({"turns": [{"calls": t} if isinstance(t, list) else t for t in turns]})
        )

    def run(
        self, work: Callable[[LiveSession], Awaitable[T]], mode: Mode = Mode.AUTO, **options: Any
    ) -> T:
        async def opened() -> Sandbox:
            return self.sandbox

        async def go() -> T:
            backend = local_backend(f"script:{self.folder / 'script.json'}", EngineSettings())
            drivers = Drivers(
                backend,
                opened,
                say=self.said.append,
                on_child_event=lambda name, event: self.children.append((name, event)),
            )
            store = SessionStore(self.folder / "sessions")
            async with await open_live(
                drivers,
                LiveOptions(self.project, mode=mode, allow_hosts=self.hosts),
                store=store,
                **options,
            ) as live:
                return await work(live)

        return asyncio.run(go())


@pytest.fixture
def desk(tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("ETUDE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ETUDE_CONFIG", str(tmp_path / "config"))
    return Desk(tmp_path, sandbox)


def results(live: LiveSession) -> list[Any]:
    return [e.data for e in live.session.events if e.kind is EventKind.TOOL_RESULT]


def test_edits_are_in_the_real_folder_and_can_be_taken_back(desk: Desk) -> None:
    (desk.project / "a.py").write_bytes(b"one\r\n")
    (desk.project / "keep").write_bytes(b"\xff\x00")
    desk.script(
        [["edit", {"path": "a.py", "old": "one", "new": "two"}]],
        [["shell", {"command": "rm keep; echo new > b"}]],
        {"text": "Changed."},
        {"text": "I see."},
    )

    async def work(live: LiveSession) -> str:
        assert await live.prompt("Change.") is StopReason.FINISHED
        assert (desk.project / "a.py").read_bytes() == b"two\r\n"
        assert not (desk.project / "keep").exists()
        changed = await live.changes()
        await live.undo()
        await live.prompt("Now?")
        return changed

    changed = desk.run(work)
    assert "+two" in changed
    assert (desk.project / "a.py").read_bytes() == b"one\r\n"
    assert (desk.project / "keep").read_bytes() == b"\xff\x00"
    assert not (desk.project / "b").exists()


def test_a_named_host_is_fetched_without_a_question(desk: Desk) -> None:
    """Nobody can be asked here, and no rule is there."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=desk.project)
    (desk.project / "a.txt").write_text("from the page")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        desk.hosts = (f"127.0.0.1:{server.server_address[1]}",)
        urls = (f"http://{desk.hosts[0]}/a.txt", "http://x.example/")
        desk.script(*([["web_fetch", {"url": url}]] for url in urls), {"text": "Read."})

        async def work(live: LiveSession) -> tuple[list[Any], list[Any]]:
            await live.prompt("Read it.")
            asked = [e.data for e in live.session.events if e.kind is EventKind.PERMISSION]
            return asked, results(live)

        for mode in (Mode.AUTO, Mode.ASK):
            permissions, (page, other) = desk.run(work, mode)
            assert "from the page" in page["text"] and page["error_class"] is None
            assert other["error_class"] == "refused" and "allowed hosts" in other["text"]
            assert [p["by"] for p in permissions] == ["--allow-host"]
        server.shutdown()


def test_undo_steps_back_one_message_at_a_time(desk: Desk) -> None:
    file = desk.project / "a"
    file.write_text("0")
    turns: list[Any] = []
    for number in (1, 2, 3):
        turns += [[["shell", {"command": f"printf {number} > a"}]], {"text": "Set."}]
    desk.script(*turns, {"text": "Seen."})

    def notes(live: LiveSession) -> int:
        told = [e.data["text"] for e in live.session.events if e.kind is EventKind.NOTE]
        return sum("put the files back" in text for text in told)

    async def first(live: LiveSession) -> str:
        for text in ("one", "two", "three"):
            await live.prompt(text)
        await live.prompt("look")  # Changes nothing.
        assert not (await live.undo()).changed and notes(live) == 0 and file.read_text() == "3"
        left = (await live.undo()).left
        assert file.read_text() == "2" and notes(live) == 1
        await live.undo(left)  # Redo: the third message counts again.
        assert file.read_text() == "3"
        await live.undo()
        assert file.read_text() == "2"
        return live.session.session_id

    async def second(live: LiveSession) -> None:
        """A resumed session goes on where it was."""
        await live.undo()
        assert file.read_text() == "1"
        await live.undo()
        assert file.read_text() == "0"
        before = len(live.session.events)
        with pytest.raises(EtudeError, match="nothing more to undo"):
            await live.undo()
        assert len(live.session.events) == before

    session_id = desk.run(first)
    desk.run(second, resume=session_id)


def test_case_17_a_state_is_kept_before_a_command_of_a_sub_agent_too(desk: Desk) -> None:
    (desk.project / "a").write_text("before")
    desk.script(
        [["task", {"prompt": "Wipe a.", "readonly": False}]],
        [["shell", {"command": "echo after > a"}]],
        {"text": "Wiped."},
        {"text": "All done."},
    )

    async def work(live: LiveSession) -> list[str]:
        await live.prompt("Delegate.")
        assert results(live)[-1]["text"] == "Wiped."
        assert live.session.budget.sampled == sum(
            event.data["sampled_tokens"]
            for events in (live.session.events, [event for _, event in desk.children])
            for event in events
            if event.kind is EventKind.ASSISTANT
        )
        return [kept.label for kept in live.checkpoints.list()]

    labels = desk.run(work)
    assert (desk.project / "a").read_text() == "after\n"
    assert "before: echo after > a" in labels
    assert {name.rpartition(".")[2] for name, _ in desk.children} == {"1"}


def test_case_19_a_sub_agent_may_not_more_than_its_parent(desk: Desk) -> None:
    (desk.project / "a").write_text("before")
    desk.script(
        [["task", {"prompt": "Write.", "readonly": False}]],
        [["write", {"path": "a", "content": "x"}], ["shell", {"command": "echo x > a"}]],
        {"text": "Tried."},
        {"text": "Done."},
    )
    desk.run(lambda live: live.prompt("Delegate."), mode=Mode.READ_ONLY)
    told = [e.data["error_class"] for _, e in desk.children if e.kind is EventKind.TOOL_RESULT]
    assert told == ["refused", "nonzero_exit"]
    assert (desk.project / "a").read_text() == "before"


def test_case_18_plan_mode_is_a_read_only_mount(desk: Desk) -> None:
    desk.script(
        [["shell", {"command": "echo x > f"}]],
        {"text": "A plan."},
        [["shell", {"command": "echo x > f"}]],
    )

    async def work(live: LiveSession) -> list[Any]:
        await live.prompt("Plan.")
        live.set_mode(Mode.AUTO)
        await live.prompt("Do it.")
        return results(live)

    first, second = desk.run(work, mode=Mode.PLAN)
    assert "Read-only file system" in first["text"]
    assert second["error_class"] is None
    assert (desk.project / "f").read_text() == "x\n"


def test_hooks_of_the_person_run_at_their_events(desk: Desk) -> None:
    config = desk.folder / "config"
    config.mkdir()
    told = desk.folder / "told"
    program = desk.folder / "hook.py"
    program.write_text(
        f"import json, sys\nevent = json.load(sys.stdin)\nopen({str(told)!r}, 'a').write("
        "event['event'] + ' ' + event.get('tool', '-') + '\\n')\n"
        "if event['event'] == 'stop': sys.exit('not well')\n"
    )
    command = json.dumps([sys.executable, str(program)])
    (config / "settings.toml").write_text(
        "".join(
            f'[[hooks]]\nevent = "{name}"\ncommand = {command}\n'
            for name in ("before_tool", "after_tool", "session_start", "stop")
        )
    )
    desk.script([["glob", {"pattern": "*"}]], {"text": "Done."})
    desk.run(lambda live: live.prompt("Look."))
    lines = ["session_start -", "before_tool glob", "after_tool glob", "stop -"]
    assert told.read_text().splitlines() == lines
    assert any("not well" in sentence for sentence in desk.said)


def test_a_session_goes_on_where_it_was(desk: Desk) -> None:
    desk.script([["todo", {"entries": [{"text": "later", "state": "open"}]}]], {"text": "First."})

    async def first(live: LiveSession) -> str:
        await live.prompt("Begin.")
        return live.session.session_id

    name = desk.run(first)
    desk.script({"text": "Second."})

    async def second(live: LiveSession) -> None:
        assert [todo.text for todo in live.session.context.todos] == ["later"]
        await live.prompt("Go on.")
        texts = [e.data["text"] for e in live.session.events if e.kind is EventKind.USER]
        assert texts == ["Begin.", "Go on."]

    desk.run(second, resume=name)


def test_what_an_edit_broke_comes_back_with_it(desk: Desk) -> None:
    (desk.project / "a.py").write_text("a = 1\n")
    desk.script([["edit", {"path": "a.py", "old": "1", "new": "(1"}]], {"text": "Oh."})

    async def work(live: LiveSession) -> str:
        await live.prompt("Break it.")
        return results(live)[0]["text"]

    assert "syntax" in desk.run(work).lower()


def test_calls_side_by_side_share_one_workspace(desk: Desk) -> None:
    subprocess.run(["git", "init", "--quiet", str(desk.project)], check=True)
    before = sorted(path.name for path in (desk.project / ".git").iterdir())
    (desk.project / "a").write_text("x\n")
    desk.script([["grep", {"pattern": "x"}], ["glob", {"pattern": "*"}], ["read", {"path": "a"}]])

    async def work(live: LiveSession) -> list[Any]:
        await live.prompt("Look.")
        return results(live)

    assert [result["error_class"] for result in desk.run(work)] == [None, None, None]
    assert sorted(path.name for path in (desk.project / ".git").iterdir()) == before


def test_a_denied_edit_binds_commands_too(desk: Desk) -> None:
    (desk.project / "locked").mkdir()
    for name in ("locked/a", "b.txt", "free"):
        (desk.project / name).write_text("kept\n")
    config = desk.folder / "config"
    config.mkdir()
    (config / "settings.toml").write_text(
        '[permissions]\ndeny = ["edit(locked/**)", "edit(b.txt)"]\n'
    )
    attack = (
        "cat b.txt; for f in locked/a locked/new b.txt free; do echo x >> $f; done; rm -f b.txt"
    )
    desk.script([["shell", {"command": f"{attack}; mv locked away; rm -rf locked"}]])

    async def work(live: LiveSession) -> str:
        await live.prompt("Change all.")
        return results(live)[0]["text"]

    assert "kept" in desk.run(work)
    assert (desk.project / "free").read_text() == "kept\nx\n"
    assert (desk.project / "b.txt").read_text() == "kept\n"
    assert [path.name for path in (desk.project / "locked").iterdir()] == ["a"]
    assert (desk.project / "locked" / "a").read_text() == "kept\n"


def test_a_sub_agent_reads_the_same_instructions(desk: Desk) -> None:
    (desk.project / "AGENTS.md").write_text("Speak like a pirate.")
    desk.script([["task", {"prompt": "Say hello.", "readonly": True}]], {"text": "Ahoy."}, {})
    desk.run(lambda live: live.prompt("Delegate."))
    (head,) = [event for _, event in desk.children if event.kind is EventKind.SYSTEM]
    assert "pirate" in head.data["text"]


def test_what_ran_when_it_was_cut_off_is_not_called_not_run(desk: Desk) -> None:
    desk.script([["shell", {"command": "touch done; sleep 60"}], ["glob", {"pattern": "*"}]])

    async def first(live: LiveSession) -> str:
        work = asyncio.create_task(live.prompt("Wait."))
        async with asyncio.timeout(20):
            while not (desk.project / "done").exists():  # noqa: ASYNC110 (a guest makes it)
                await asyncio.sleep(0.02)
        await live.session.cancel()
        await work
        assert [result["error_class"] for result in results(live)] == ["interrupted", "not_run"]
        assert "what it did until then is done" in results(live)[0]["text"]
        return live.session.session_id

    name = desk.run(first)
    # The same after a crash, of which only the log is left.
    log = SessionStore(desk.folder / "sessions").path(name)
    lines = log.read_text().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if '"tool_call"' in line)
    log.write_text("".join(lines[: cut + 1]))
    desk.script({"text": "I see."})

    async def second(live: LiveSession) -> None:
        assert [result["error_class"] for result in results(live)] == ["interrupted"] * 2
        assert "it may have run" in results(live)[0]["text"]

    desk.run(second, resume=name)


def test_each_claim_of_the_final_message_is_set_beside_its_event(desk: Desk) -> None:
    desk.script(
        [["write", {"path": "new.py", "content": "a = 1\n"}]],
        {"text": "I created new.py. All tests pass."},
    )
    desk.run(lambda live: live.prompt("Make it."))
    created, tests = desk.said
    assert "created new.py" in created and "shown by call-0-0 (turn 0)" in created
    assert "nothing in the record shows this" in tests


def test_what_a_project_forbids_cannot_be_lifted_by_a_command(desk: Desk) -> None:
    own = desk.project / ".etude"
    own.mkdir()
    (own / "settings.toml").write_text('[permissions]\ndeny = ["shell(curl *)"]\n')
    desk.script([["shell", {"command": "rm -rf .etude; mv .etude x; echo > .etude/settings.toml"}]])
    desk.run(lambda live: live.prompt("Free yourself."))
    assert "curl" in (own / "settings.toml").read_text()


def test_a_new_repository_in_the_project_is_told(desk: Desk) -> None:
    desk.script([["shell", {"command": "git init -q sub; echo x > plain"}]], {"text": "Done."}, {})

    async def work(live: LiveSession) -> None:
        await live.prompt("Make one.")
        await live.prompt("And now?")

    desk.run(work)
    assert [sentence for sentence in desk.said if "sub/.git" in sentence] == desk.said
    assert len(desk.said) == 1


@pytest.mark.parametrize("folder", ["/", "~", "missing"])
def test_far_too_much_is_no_project(desk: Desk, folder: str) -> None:
    desk.script({"text": "never said"})
    desk.project = Path(folder).expanduser()
    with pytest.raises(EtudeError, match="folder"):
        desk.run(lambda live: live.prompt("x"))
