"""The official client drives `etude acp` with a real sandbox and a scripted model."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from acp import RequestError
from acp.helpers import text_block
from acp.schema import McpServerStdio, SseMcpServer
from acp_editor import START, Editor, environment, script, started

DONE = ("All done.", ())
EDIT = ("I edit.", [("edit", {"path": "a.txt", "old": "two", "new": "2"})])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    return folder


def running(words: str) -> bool:
    """Whether a living process has these words in its command line."""
    wanted = words.replace(" ", "\0").encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "cmdline").read_bytes():
                return True
    return False


async def until_running(word: str) -> None:
    async with asyncio.timeout(30):
        while not running(word):  # noqa: ASYNC110  another program's doing: there is no event
            await asyncio.sleep(0.05)


def test_a_whole_session(tmp_path: Path, project: Path) -> None:
    """Read, edit with a question, to-do list, final words; in this order on the wire."""
    todo = {"entries": [{"text": "look", "state": "done"}, {"text": "edit", "state": "doing"}]}
    model = script(
        tmp_path / "m.json",
        ("Looking. ", [("read", {"path": "a.txt"}), ("todo", todo)]),
        EDIT,
        DONE,
    )

    async def run() -> None:
        async with started(tmp_path, model) as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            assert made.modes is not None and made.modes.current_mode_id == "ask"
            assert len(made.modes.available_modes) == 4
            await editor.until(lambda: editor.of("available_commands_update"))
            answer = await agent.prompt(
                session_id=made.session_id, prompt=[text_block("change two to 2")]
            )
            assert answer.stop_reason == "end_turn"
            assert (project / "a.txt").read_text() == "one\n2\nthree\n"
            assert editor.said() == "Looking. I edit.All done."
            read, edit = editor.of("tool_call")
            assert (read["kind"], read["status"], read["title"]) == (
                "read",
                "pending",
                "read a.txt",
            )
            assert read["rawInput"] == {"path": "a.txt"}
            assert edit["locations"] == [{"path": str(project / "a.txt")}]
            ends = {
                update["toolCallId"]: update
                for update in editor.of("tool_call_update")
                if update.get("status") == "completed"
            }
            shown = ends[read["toolCallId"]]["content"][0]["content"]["text"]
            assert shown.startswith("```\n") and "2: two" in shown
            assert ends[edit["toolCallId"]]["content"][0] == {
                "type": "diff",
                "path": str(project / "a.txt"),
                "oldText": "one\ntwo\nthree\n",
                "newText": "one\n2\nthree\n",
            }
            (plan,) = editor.of("plan")
            assert [(entry["content"], entry["status"]) for entry in plan["entries"]] == [
                ("look", "completed"),
                ("edit", "in_progress"),
            ]
            (question,) = editor.questions
            assert question["call"]["toolCallId"] == edit["toolCallId"]
            assert question["call"]["content"][0]["type"] == "diff"
            assert question["call"]["content"][0]["newText"] == "2"
            kinds = [option["kind"] for option in question["options"]]
            assert kinds[0] == "allow_once" and kinds[-1] == "reject_once"
            (usage,) = editor.of("usage_update")
            assert 0 < usage["used"] < usage["size"]
            methods = [message.get("method") for message in editor.raw]
            asked = methods.index("session/request_permission")
            names = [
                message["params"]["update"].get("toolCallId")
                for message in editor.raw[:asked]
                if message.get("method") == "session/update"
            ]
            assert edit["toolCallId"] in names, "the question comes after the call it is about"

    asyncio.run(run())


def test_reject_and_always(tmp_path: Path, project: Path) -> None:
    again = ("", [("edit", {"path": "a.txt", "old": "three", "new": "3"})])
    last = ("", [("edit", {"path": "a.txt", "old": "one", "new": "1"})])
    model = script(tmp_path / "m.json", EDIT, again, last, DONE)
    answers = iter(["reject", "always"])

    async def run() -> None:
        editor = Editor(lambda call, options: next(answers))
        async with started(tmp_path, model, editor=editor) as (_, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            answer = await agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
            assert answer.stop_reason == "end_turn"
            assert (project / "a.txt").read_text() == "1\ntwo\n3\n"
            assert len(editor.questions) == 2, "the third edit is covered by the rule"
            ends = [
                u["status"] for u in editor.of("tool_call_update") if u["status"] != "in_progress"
            ]
            assert ends == ["failed", "completed", "completed"]

    asyncio.run(run())
    assert "edit" in (tmp_path / "config" / "settings.toml").read_text()


def test_cancel_at_once_and_while_asked(tmp_path: Path, project: Path) -> None:
    """Case 24, and a question that nobody answers."""
    model = script(tmp_path / "m.json", ("word " * 200, ()), EDIT, DONE, slow=0.02)

    async def run() -> None:
        async with started(tmp_path, model) as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            for wait in (0.0, 0.5):
                work = asyncio.create_task(
                    agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
                )
                await asyncio.sleep(wait)
                started_at = time.monotonic()
                await agent.cancel(session_id=made.session_id)
                answer = await work
                assert answer.stop_reason == "cancelled"
                assert time.monotonic() - started_at < 1
            editor.hold.clear()
            work = asyncio.create_task(
                agent.prompt(session_id=made.session_id, prompt=[text_block("go on")])
            )
            await editor.until(lambda: editor.questions)
            started_at = time.monotonic()
            await agent.cancel(session_id=made.session_id)
            assert (await work).stop_reason == "cancelled"
            assert time.monotonic() - started_at < 1
            editor.hold.set()
            assert (project / "a.txt").read_text() == "one\ntwo\nthree\n"
            await agent.cancel(session_id=made.session_id)
            answer = await agent.prompt(session_id=made.session_id, prompt=[text_block("end")])
            assert answer.stop_reason == "end_turn" and editor.said().endswith("All done.")
            reasons = [m["result"] for m in editor.raw if "stopReason" in (m.get("result") or {})]
            assert [r["stopReason"] for r in reasons] == ["cancelled"] * 3 + ["end_turn"]

    asyncio.run(run())


def test_cancel_in_mid_tool(tmp_path: Path, project: Path) -> None:
    """Case 24: exactly one `cancelled` within a second, and the command is dead."""
    command = "sleep 71.25 & wait"
    model = script(tmp_path / "m.json", ("", [("shell", {"command": command})]), DONE)

    async def run() -> None:
        async with started(tmp_path, model, "--mode", "auto") as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            work = asyncio.create_task(
                agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
            )
            await until_running("sleep 71.25")
            started_at = time.monotonic()
            await agent.cancel(session_id=made.session_id)
            answer = await work
            assert answer.stop_reason == "cancelled"
            assert time.monotonic() - started_at < 1
            assert not running("sleep 71.25")
            assert editor.of("tool_call_update")[-1]["status"] == "failed"
            answer = await agent.prompt(session_id=made.session_id, prompt=[text_block("again")])
            assert answer.stop_reason == "end_turn"
            reasons = [m["result"] for m in editor.raw if "stopReason" in (m.get("result") or {})]
            assert [r["stopReason"] for r in reasons] == ["cancelled", "end_turn"]

    asyncio.run(run())


def test_load_in_a_second_process(tmp_path: Path, project: Path) -> None:
    write = ("", [("write", {"path": "b.txt", "content": "new\n"})])
    model = script(tmp_path / "m.json", ("Hi. ", [("read", {"path": "a.txt"})]), write, DONE)

    async def first() -> str:
        async with started(tmp_path, model) as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            await agent.prompt(session_id=made.session_id, prompt=[text_block("begin")])
            calls = [(c["toolCallId"], c["title"], c["kind"]) for c in editor.of("tool_call")]
            seen.extend([editor.said(), calls])
            return made.session_id

    async def second(session_id: str) -> None:
        model = script(tmp_path / "n.json", ("Welcome back.", ()))
        async with started(tmp_path, model) as (editor, agent, _):
            listed = await agent.list_sessions(cwd=str(project))
            assert [(s.session_id, s.title) for s in listed.sessions] == [(session_id, "begin")]
            await agent.load_session(cwd=str(project), session_id=session_id, mcp_servers=[])
            assert editor.said(kind="user_message_chunk") == "begin"
            assert editor.said() == seen[0]
            calls = [(c["toolCallId"], c["title"], c["kind"]) for c in editor.of("tool_call")]
            assert calls == seen[1] and len(calls) == 2
            assert [u["status"] for u in editor.of("tool_call_update")].count("completed") == 2
            diff = editor.of("tool_call_update")[-1]["content"][0]
            assert (diff["type"], diff["newText"]) == ("diff", "new\n")
            answer = await agent.prompt(session_id=session_id, prompt=[text_block("more")])
            assert answer.stop_reason == "end_turn"
            assert editor.said().endswith("Welcome back.")
            with pytest.raises(RequestError, match="no session"):
                await agent.load_session(cwd=str(project), session_id="nope", mcp_servers=[])

    seen: list[Any] = []
    asyncio.run(second(asyncio.run(first())))


def test_two_sessions_at_once(tmp_path: Path, project: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("one\ntwo\nthree\n")
    model = script(tmp_path / "m.json", EDIT, EDIT, DONE, DONE)

    async def run() -> None:
        async with started(tmp_path, model) as (editor, agent, _):
            one = (await agent.new_session(cwd=str(project), mcp_servers=[])).session_id
            two = (await agent.new_session(cwd=str(other), mcp_servers=[])).session_id
            editor.hold.clear()
            works = [
                asyncio.create_task(agent.prompt(session_id=s, prompt=[text_block("go")]))
                for s in (one, two)
            ]
            await editor.until(lambda: len(editor.questions) == 2)
            assert {question["session"] for question in editor.questions} == {one, two}
            editor.hold.set()
            assert [(await work).stop_reason for work in works] == ["end_turn"] * 2
            for folder, session in ((project, one), (other, two)):
                assert (folder / "a.txt").read_text() == "one\n2\nthree\n"
                (call,) = editor.of("tool_call", session)
                assert call["locations"] == [{"path": str(folder / "a.txt")}]

    asyncio.run(run())


def test_modes_and_commands(tmp_path: Path, project: Path) -> None:
    plan = ("", [("shell", {"command": "echo x > f || exit 3"})])
    write = ("", [("write", {"path": "b.txt", "content": "x"})])
    model = script(tmp_path / "m.json", plan, DONE, write, DONE)

    async def run() -> None:
        async with started(tmp_path, model) as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            await agent.set_session_mode(session_id=made.session_id, mode_id="plan")
            assert editor.of("current_mode_update")[-1]["currentModeId"] == "plan"
            await agent.prompt(session_id=made.session_id, prompt=[text_block("plan it")])
            assert not (project / "f").exists()
            assert editor.of("tool_call_update")[-1]["status"] == "failed"
            await agent.set_session_mode(session_id=made.session_id, mode_id="auto")
            await agent.prompt(session_id=made.session_id, prompt=[text_block("do it")])
            assert (project / "b.txt").read_text() == "x"
            await agent.prompt(session_id=made.session_id, prompt=[text_block("/undo")])
            assert not (project / "b.txt").exists()
            await agent.prompt(session_id=made.session_id, prompt=[text_block("/cost")])
            assert "tokens were sampled" in editor.said()
            await agent.prompt(session_id=made.session_id, prompt=[text_block("/effort high")])
            with pytest.raises(RequestError, match="choose low, medium or high"):
                await agent.prompt(session_id=made.session_id, prompt=[text_block("/effort x")])
            with pytest.raises(RequestError, match="no mode"):
                await agent.set_session_mode(session_id=made.session_id, mode_id="yolo")

    asyncio.run(run())


def test_an_answer_that_was_cut_says_so(tmp_path: Path, project: Path) -> None:
    model = script(tmp_path / "m.json", ("word " * 90, ()))

    async def run() -> None:
        async with started(tmp_path, model, "--tokens", "5") as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            answer = await agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
            assert answer.stop_reason == "max_tokens"
            assert "at the budget's end" in editor.said()

    asyncio.run(run())


def test_what_an_editor_gets_wrong(tmp_path: Path, project: Path) -> None:
    async def run() -> None:
        async with started(tmp_path, "script:/no/such/file") as (_, agent, _):
            with pytest.raises(RequestError, match="/no/such/file cannot be read"):
                await agent.new_session(cwd=str(project), mcp_servers=[])
            with pytest.raises(RequestError, match="no folder"):
                await agent.new_session(cwd=str(project / "nope"), mcp_servers=[])
            with pytest.raises(RequestError, match="no open session"):
                await agent.prompt(session_id="x", prompt=[text_block("hi")])
            with pytest.raises(RequestError):
                await agent.ext_method("nothing", {})

    asyncio.run(run())


def raw(folder: Path, model: str) -> subprocess.Popen[bytes]:
    """The agent without the SDK: only bytes. It also prints where it should not."""
    noisy = (
        "import os, etude.cli.acp as module; version = module._version\n"
        "module._version = lambda: (print('noise'), os.system('echo more noise'), version())[-1]\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", noisy + START, "acp", "--model", model, "--mode", "auto"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(folder),
    )


def test_nothing_but_protocol_on_stdout_and_eof_ends_everything(
    tmp_path: Path, project: Path
) -> None:
    model = script(tmp_path / "m.json", ("", [("shell", {"command": "sleep 72.25"})]))
    agent = raw(tmp_path, model)
    assert agent.stdin and agent.stdout and agent.stderr
    lines: list[dict[str, Any]] = []

    def send(number: int, method: str, **params: object) -> None:
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        agent.stdin.write(json.dumps(message).encode() + b"\n")  # type: ignore[union-attr]
        agent.stdin.flush()  # type: ignore[union-attr]

    def answer(number: int) -> dict[str, Any]:
        while True:
            message = json.loads(agent.stdout.readline())  # type: ignore[union-attr]
            lines.append(message)
            if message.get("id") == number:
                return message["result"]

    try:
        agent.stdin.write(b"this is no JSON\n")
        send(1, "initialize", protocolVersion=99)
        said = answer(1)
        assert said["protocolVersion"] == 1
        assert said["agentCapabilities"]["loadSession"] is True
        assert said["agentCapabilities"]["promptCapabilities"]["image"] is False
        send(2, "session/new", cwd=str(project), mcpServers=[])
        session = answer(2)["sessionId"]
        # The editor knows the session before it hears of it.
        assert lines[-1]["id"] == 2
        send(3, "session/prompt", sessionId=session, prompt=[{"type": "text", "text": "go"}])
        end = time.monotonic() + 30
        while not running("sleep 72.25"):
            assert time.monotonic() < end
            time.sleep(0.05)
        agent.stdin.close()
        assert agent.wait(15) == 0
        assert not running("sleep 72.25")
        rest = agent.stdout.read().splitlines()
        assert all(json.loads(line)["jsonrpc"] == "2.0" for line in rest)
        assert all(line["jsonrpc"] == "2.0" for line in lines)
        assert b"noise" in agent.stderr.read()
    finally:
        agent.kill()
        agent.wait()


def test_sigterm_ends_everything(tmp_path: Path, project: Path) -> None:
    command = "trap '' TERM; sleep 73.25"
    model = script(tmp_path / "m.json", ("", [("shell", {"command": command})]))

    async def run() -> None:
        async with started(tmp_path, model, "--mode", "auto") as (_, agent, process):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            work = asyncio.create_task(
                agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
            )
            await until_running("sleep 73.25")
            process.terminate()
            async with asyncio.timeout(15):
                await process.wait()
            assert not running("sleep 73.25")
            work.cancel()
            await asyncio.wait([work])

    asyncio.run(run())


def test_tool_servers_of_the_editor_and_of_the_project(tmp_path: Path, project: Path) -> None:
    """Given by the editor: approved. Brought by the repository: only named (case 21)."""
    server = str(Path(__file__).parents[1] / "agent" / "mcp_raw_server.py")
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    brought = {"command": sys.executable, "args": [server, "marked", str(theirs)]}
    (project / ".mcp.json").write_text(json.dumps({"mcpServers": {"evil": brought}}))
    given = McpServerStdio(
        name="good", command=sys.executable, args=[server, "marked", str(mine)], env=[]
    )
    model = script(tmp_path / "m.json", ("", [("mcp__good__poke", {})]), DONE)

    async def run() -> None:
        async with started(tmp_path, model) as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[given])
            answer = await agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
            assert answer.stop_reason == "end_turn"
            assert "tool server" in editor.said() and "etude approve" in editor.said()
            (question,) = editor.questions
            assert question["call"]["title"] == "mcp__good__poke"
            shown = editor.of("tool_call_update")[-1]["content"][0]["content"]["text"]
            assert "poked" in shown
        bad = SseMcpServer(type="sse", name="old", url="http://127.0.0.1:1/", headers=[])
        async with started(tmp_path, model) as (_, agent, _):
            with pytest.raises(RequestError, match="'old' is of a kind that is not supported"):
                await agent.new_session(cwd=str(project), mcp_servers=[bad])

    asyncio.run(run())
    assert (mine / "starts").exists() and not (theirs / "starts").exists()
    assert not running(server)


def test_questions_of_the_model_and_of_a_sub_agent(tmp_path: Path, project: Path) -> None:
    question = ("", [("ask", {"question": "Which?", "options": ["red", "blue"]})])
    free = ("", [("ask", {"question": "Why?"})])
    task = ("", [("task", {"prompt": "change it"})])
    model = script(tmp_path / "m.json", question, free, task, EDIT, ("Changed.", ()), DONE)

    def choose(call: dict[str, Any], options: list[dict[str, Any]]) -> str:
        by_name = {option["name"]: option["optionId"] for option in options}
        return by_name.get("blue") or by_name.get("Allow once") or "other"

    async def run() -> None:
        async with started(tmp_path, model, editor=Editor(choose)) as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            answer = await agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
            assert answer.stop_reason == "end_turn"
            ends = [
                update["content"][-1]["content"]["text"]
                for update in editor.of("tool_call_update")
                if update["status"] == "completed"
            ]
            assert "blue" in ends[0] and "next message" in ends[1]
            titles = [call["title"] for call in editor.of("tool_call")]
            assert "sub-agent: edit a.txt" in titles
            edit = next(call for call in editor.of("tool_call") if "sub-agent" in call["title"])
            assert "/" in edit["toolCallId"]
            assert editor.questions[-1]["call"]["toolCallId"].startswith("sub-agent/")
            assert "Changed." in ends[-1]
            assert (project / "a.txt").read_text() == "one\n2\nthree\n"

    asyncio.run(run())


@pytest.mark.slow
def test_cancel_at_any_moment(tmp_path: Path, project: Path) -> None:
    """Whenever it comes: one answer within a second, and every call has exactly one end."""
    turns = [
        (
            "Some words before. ",
            [
                ("shell", {"command": f"sleep 0.3; echo {number}"}),
                ("read", {"path": "a.txt", "lines": number + 1}),
            ],
        )
        for number in range(200)
    ]
    model = script(tmp_path / "m.json", *turns, slow=0.002)
    moments = random.Random(7)

    async def run() -> None:
        async with started(tmp_path, model, "--mode", "auto") as (editor, agent, _):
            made = await agent.new_session(cwd=str(project), mcp_servers=[])
            for _ in range(25):
                work = asyncio.create_task(
                    agent.prompt(session_id=made.session_id, prompt=[text_block("go")])
                )
                await asyncio.sleep(moments.uniform(0, 1.5))
                began = time.monotonic()
                await agent.cancel(session_id=made.session_id)
                assert (await work).stop_reason == "cancelled"
                assert time.monotonic() - began < 1
            calls = [call["toolCallId"] for call in editor.of("tool_call")]
            ends = [
                update["toolCallId"]
                for update in editor.of("tool_call_update")
                if update["status"] in ("completed", "failed")
            ]
            assert len(calls) > 20 and sorted(calls) == sorted(ends)

    asyncio.run(run())
