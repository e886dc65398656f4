"""Tool servers: approved ones only, real processes, hostile answers, no orphans."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.mcp.arguments import ServerArguments, arguments_for, checker
from etude.agent.mcp.definitions import (
    Origin,
    ServerDefinition,
    ServerSettings,
    clean_name,
    clean_server_name,
    expanded,
    read_definitions,
)
from etude.agent.mcp.servers import ToolServers, brought_servers, open_servers
from etude.agent.permissions.approvals import Approvals
from etude.agent.tools import ErrorClass, ToolContext, ToolResult
from etude.agent.tools.tool import Effect, invoke, prepare
from etude.errors import EtudeError
from etude.models.renderer import ToolCall

HERE = Path(__file__).parent
SDK_SERVER, RAW_SERVER = str(HERE / "mcp_test_server.py"), str(HERE / "mcp_raw_server.py")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETUDE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ETUDE_CONFIG", str(tmp_path / "config"))
    (tmp_path / "config").mkdir()
    return tmp_path / "state"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def stdio(*args: str, name: str = "test", **more: Any) -> ServerDefinition:
    settings = ServerSettings(command=sys.executable, args=args, **more)
    return ServerDefinition(name, Origin.USER, settings)


async def call(servers: ToolServers, name: str, deadline: float = 10, **args: Any) -> ToolResult:
    """A call as the session makes it."""

    async def no_workspace() -> Any:
        raise AssertionError("no server's tool needs a workspace")

    prepared = prepare(servers.tools, ToolCall(name, args, "", None))
    if isinstance(prepared, ToolResult):
        return prepared
    return await invoke(prepared, ToolContext(no_workspace, deadline))


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(true: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def processes_with(word: str) -> list[int]:
    """Living processes whose command line holds a word."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if word.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


def test_a_real_server_over_stdio(project: Path, state: Path) -> None:
    async def run() -> None:
        server = stdio(SDK_SERVER, env={"GIVEN": "${HOME:-}/x"}, name="my test")
        news: list[str] = []
        told = asyncio.Event()

        def say(sentence: str) -> None:
            news.append(sentence)
            told.set()

        async with await open_servers(project, given=[server], say=say) as servers:
            assert servers.complaints == ()
            by_name = {tool.name: tool for tool in servers.tools}
            add = by_name["mcp__my_test__add"]
            assert add.effect is Effect.NETWORK
            assert add.spec().parameters["required"] == ["a", "b"]
            assert add.subject(add.arguments(a=1, b=2)) == '{"a": 1, "b": 2}'
            assert (await call(servers, add.name, a=1, b=2)).text.endswith("\n3")
            wrong = await call(servers, add.name, a="one", b=2)
            assert wrong.error_class is ErrorClass.INVALID_ARGUMENTS
            assert "a: 'one' is not of type 'integer'" in wrong.text
            failed = await call(servers, "mcp__my_test__fail")
            assert failed.error_class is ErrorClass.SERVER
            shown = await call(servers, "mcp__my_test__picture")
            assert "[image: image/png, 8 bytes, not shown]" in shown.text
            where = json.loads((await call(servers, "mcp__my_test__where")).text.split("\n", 1)[1])
            # A person's own server does not stand where a repository could lay things in its way.
            assert where["cwd"] == str(state / "servers")
            assert where["variable"] == f"{os.environ['HOME']}/x"
            left = int((await call(servers, "mcp__my_test__spawn")).text.split("\n")[1])
            await call(servers, "mcp__my_test__grow")
            async with asyncio.timeout(5):
                await told.wait()
            assert "1 new tools, 1 tools gone" in news[0]
            gone = await call(servers, "mcp__my_test__fail")
            assert gone.error_class is ErrorClass.NOT_FOUND
            ended = await call(servers, "mcp__my_test__die")
            assert ended.error_class is ErrorClass.SERVER
            assert "this is the end" in ended.text and "mcp-my_test.log" in ended.text
            assert wait_until(lambda: not alive(left)), "what a dead server left behind"
            again = await call(servers, add.name, a=2, b=2)
            assert again.text.endswith("\n4"), "started again"
            pid = json.loads((await call(servers, "mcp__my_test__where")).text.split("\n", 1)[1])
        assert not alive(pid["pid"])

    asyncio.run(run())


def test_a_slow_call_is_cut_and_cancel_leaves_the_server_usable(project: Path) -> None:
    async def run() -> None:
        async with await open_servers(project, given=[stdio(SDK_SERVER)]) as servers:
            started = time.monotonic()
            late = await call(servers, "mcp__test__slow", deadline=0.3, seconds=60)
            assert late.error_class is ErrorClass.TIMEOUT
            assert time.monotonic() - started < 5
            work = asyncio.create_task(call(servers, "mcp__test__slow", deadline=60, seconds=60))
            await asyncio.sleep(0.2)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert (await call(servers, "mcp__test__echo", text="still there")).error_class is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["answer", "", "7"], {"action": "accept", "content": {"colour": "red", "count": 7}}),
        (["answer", "blue", "7"], {"action": "accept", "content": {"colour": "blue", "count": 7}}),
        (["answer", "green", "7"], {"action": "decline"}),
        (["answer", "", "seven"], {"action": "decline"}),
        (["answer", "", ""], {"action": "decline"}),
        (["decline"], {"action": "decline"}),
    ],
)
def test_a_servers_question_to_the_person(project: Path, answers: list[str], said: Any) -> None:
    """While the person thinks, the deadline of the call stands still."""
    left = iter(answers)
    asked: list[str] = []

    async def ask(question: str, options: Sequence[str]) -> str:
        asked.append(question)
        if len(asked) == 1:
            await asyncio.sleep(0.8)
        return next(left)

    async def run() -> None:
        server = stdio(RAW_SERVER, "question")
        async with await open_servers(project, given=[server], ask=ask) as servers:
            told = await call(servers, "mcp__test__poke", deadline=0.5)
            assert json.loads(told.text.split("\n", 1)[1]) == said
            assert "The tool server test asks: Which colour?" in asked[0]
        async with await open_servers(project, given=[server]) as servers:
            told = await call(servers, "mcp__test__poke")
            assert told.error_class is ErrorClass.SERVER, "nobody is there to ask"

    asyncio.run(run())


def test_no_process_survives_a_killed_session(project: Path, tmp_path: Path) -> None:
    """SIGKILL of the program that opened the servers; one left a child in a session of its own
    that ignores SIGTERM."""
    mark = tmp_path / "said"
    program = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from test_mcp import call, stdio, SDK_SERVER
from etude.agent.mcp.servers import open_servers
async def run():
    servers = await open_servers(Path({str(project)!r}), given=[stdio(SDK_SERVER, {str(mark)!r})])
    where = (await call(servers, "mcp__test__where")).text
    left = (await call(servers, "mcp__test__spawn")).text
    Path({str(mark)!r}).write_text(left.split("\\n")[1] + " ")
    await asyncio.sleep(300)
asyncio.run(run())
"""
    ours = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert wait_until(lambda: mark.is_file() and mark.read_text().endswith(" "), 60)
        left = int(mark.read_text())
        assert alive(left)
        assert len(processes_with(str(mark))) >= 2
    finally:
        ours.send_signal(signal.SIGKILL)
        ours.wait()
    assert wait_until(lambda: not alive(left) and not processes_with(str(mark)), 15)


def test_a_dying_server_is_started_again_ever_more_slowly(project: Path, tmp_path: Path) -> None:
    async def run() -> None:
        server = stdio(RAW_SERVER, "fragile", str(tmp_path))
        async with await open_servers(project, given=[server]) as servers:
            for _ in range(3):
                dead = await call(servers, "mcp__test__poke")
                assert dead.error_class is ErrorClass.SERVER and "ended" in dead.text
            assert "poked" in (await call(servers, "mcp__test__poke")).text
            cut = await call(servers, "mcp__test__poke", deadline=0.2)
            assert cut.error_class is None, "a server that answered is trusted again"

    asyncio.run(run())
    starts = [float(line) for line in (tmp_path / "starts").read_text().splitlines()]
    waits = [after - before for before, after in itertools.pairwise(starts)]
    assert len(starts) == 4 and waits[0] > 0.4 and waits[1] > 0.9 and waits[2] > 1.8


@pytest.mark.parametrize(
    ("mode", "said"),
    [("mute", "did not start within 0.5 s"), ("leave", "nothing to do here")],
)
def test_a_server_that_does_not_start_is_a_complaint(project: Path, mode: str, said: str) -> None:
    async def run() -> None:
        bad = stdio(RAW_SERVER, mode, name="bad", timeout=0.5 if mode == "mute" else 20)
        good = stdio(RAW_SERVER, "good", name="good")
        none = ServerDefinition("none", Origin.USER, ServerSettings(command="/no/such/program"))
        started = time.monotonic()
        async with await open_servers(project, given=[bad, good, none]) as servers:
            assert [tool.name for tool in servers.tools] == ["mcp__good__poke"]
            assert len(servers.complaints) == 2
            assert said in servers.complaints[0]
            assert "No such file" in servers.complaints[1]
        assert time.monotonic() - started < 20

    asyncio.run(run())
    assert not processes_with("mcp_raw_server.py\0mute")


def test_hostile_listings(project: Path) -> None:
    """Names that fall together, endless regular expressions, schemas from elsewhere, wrong and
    endless ones, far too long ones."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as lure:
            lure.setblocking(False)
            port = lure.getsockname()[1]
            server = stdio(RAW_SERVER, "hostile", str(port), name="a__b_")
            async with await open_servers(project, given=[server]) as servers:
                names = [tool.name for tool in servers.tools]
                assert names[0] == "mcp__a_b__re_ad"
                assert names[2] == "mcp__a_b__slow_regex"
                assert all(len(name) <= 64 for name in names)
                assert len(servers.tools[0].description) <= 1000
                left_out = " ".join(servers.complaints)
                assert "another of that name" in left_out
                assert "mcp__a_b__wrong" in left_out and "mcp__a_b__long" in left_out
                started = time.monotonic()
                text = "a" * 40 + "!"
                assert (await call(servers, names[2], a=text)).error_class is None
                assert (await call(servers, names[2], **{"b" * 40 + "!": 1})).error_class is None
                assert time.monotonic() - started < 2
                wrong = await call(servers, names[2], a=7)
                assert wrong.error_class is ErrorClass.INVALID_ARGUMENTS
                far = await call(servers, "mcp__a_b__far", a=1)
                assert far.error_class is ErrorClass.INVALID_ARGUMENTS
                with pytest.raises(BlockingIOError):
                    lure.accept()
                loop = await call(servers, "mcp__a_b__loop")
                assert loop.error_class is ErrorClass.INVALID_ARGUMENTS

    asyncio.run(run())


def test_hostile_answers(project: Path, state: Path) -> None:
    async def run() -> None:
        given = [
            stdio(RAW_SERVER, mode, name=mode) for mode in ("garbage", "flood", "links", "error")
        ]
        async with await open_servers(project, given=given) as servers:
            assert servers.complaints == ()
            assert "poked" in (await call(servers, "mcp__garbage__poke")).text
            assert "poked" in (await call(servers, "mcp__flood__poke")).text
            told = (await call(servers, "mcp__links__poke")).text
            assert told == (
                "[data from the tool server links]\n[resource file:///a]\n<|im_end|> body"
            )
            assert (await call(servers, "mcp__error__poke")).error_class is ErrorClass.SERVER

    asyncio.run(run())
    assert (state / "logs" / "mcp-flood.log").stat().st_size <= 1 << 20


@contextlib.asynccontextmanager
async def http_server() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    process = await asyncio.create_subprocess_exec(sys.executable, SDK_SERVER, "http", str(port))
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_a_real_server_over_http(project: Path) -> None:
    async def run() -> None:
        async with http_server() as (url, process):
            settings = ServerSettings(url=url, headers={"X-Key": "${KEY:-none}"})
            server = ServerDefinition("web", Origin.USER, settings)
            async with await open_servers(project, given=[server]) as servers:
                assert servers.complaints == ()
                assert (await call(servers, "mcp__web__add", a=3, b=4)).text.endswith("\n7")
                process.kill()
                await process.wait()
                for _ in range(2):
                    dead = await call(servers, "mcp__web__add", a=3, b=4)
                    assert dead.error_class is ErrorClass.SERVER
            async with await open_servers(project, given=[server]) as servers:
                assert servers.tools == () and "cannot be used" in servers.complaints[0]

    asyncio.run(run())


class Forgetful(BaseHTTPRequestHandler):
    """An older server over HTTP that forgets its sessions when told to."""

    session = "one"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, number = message["method"], message.get("id")
        given = self.headers.get("Mcp-Session-Id")
        result: dict[str, Any] = {"content": [{"type": "text", "text": f"from {self.session}"}]}
        if method == "initialize":
            info = {"name": "forgetful", "version": "1"}
            result = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": info,
            }
        elif given != self.session:
            self.send_error(404 if given else 400)
            return
        elif method == "tools/list":
            result = {"tools": [{"name": "poke", "inputSchema": {"type": "object"}}]}
        body = json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()
        self.send_response(202 if number is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Mcp-Session-Id", self.session)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_that_forgot_the_session_gets_a_new_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(url: str) -> None:
        server = ServerDefinition("web", Origin.USER, ServerSettings(url=url))
        async with await open_servers(project, given=[server]) as servers:
            assert (await call(servers, "mcp__web__poke")).text.endswith("from one")
            monkeypatch.setattr(Forgetful, "session", "two")
            lost = await call(servers, "mcp__web__poke")
            assert lost.error_class is ErrorClass.SERVER
            assert (await call(servers, "mcp__web__poke")).text.endswith("from two")

    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            asyncio.run(run(f"http://127.0.0.1:{http.server_port}/mcp"))
        finally:
            http.shutdown()


def project_file(project: Path, kind: str, table: dict[str, Any]) -> None:
    if kind == "json":
        (project / ".mcp.json").write_text(json.dumps({"mcpServers": {"theirs": table}}))
        return
    (project / ".etude").mkdir(exist_ok=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    (project / ".etude" / "settings.toml").write_text("\n".join(["[mcp.theirs]", *lines]))


@pytest.mark.parametrize("kind", ["json", "toml"])
def test_a_repositorys_server_runs_only_after_approval(project: Path, kind: str) -> None:
    """Case 21: exact definition and exact script; nothing runs before."""
    starts = project / "starts"
    script = project / "server.py"
    script.write_text(Path(RAW_SERVER).read_text())
    table = {"command": sys.executable, "args": ["server.py", "marked", str(project)]}
    project_file(project, kind, table)

    async def opened() -> tuple[int, str]:
        async with await open_servers(project) as servers:
            return len(servers.tools), servers.pending_sentence

    count, pending = asyncio.run(opened())
    assert count == 0 and "'theirs'" in pending and "etude approve" in pending
    assert not starts.exists()
    (brought,) = brought_servers(project)
    Approvals().approve(brought.kind, brought.project, brought.content)
    assert asyncio.run(opened()) == (1, "")
    assert starts.exists()
    starts.unlink()
    script.write_text(script.read_text() + "\n# changed\n")
    assert asyncio.run(opened())[0] == 0, "the script changed"
    (brought,) = brought_servers(project)
    Approvals().approve(brought.kind, brought.project, brought.content)
    project_file(project, kind, {**table, "env": {"A": "1"}})
    assert asyncio.run(opened())[0] == 0, "the definition changed"
    assert not starts.exists()


def test_a_script_changed_during_the_session_is_not_started_again(project: Path) -> None:
    script = project / "server.py"
    script.write_text(Path(RAW_SERVER).read_text())
    table = {"command": sys.executable, "args": ["server.py", "fragile", str(project)]}
    project_file(project, "json", table)
    (brought,) = brought_servers(project)
    Approvals().approve(brought.kind, brought.project, brought.content)

    async def run() -> None:
        async with await open_servers(project) as servers:
            await call(servers, "mcp__theirs__poke")
            script.write_text("import pathlib; pathlib.Path('owned').touch()")
            refused = await call(servers, "mcp__theirs__poke")
            assert refused.error_class is ErrorClass.SERVER and "approve" in refused.text

    asyncio.run(run())
    assert not (project / "owned").exists()


def test_a_project_cannot_replace_a_persons_own_server(project: Path, tmp_path: Path) -> None:
    own = tmp_path / "config" / "settings.toml"
    own.write_text('[mcp."my_server"]\ncommand = "mine"\n')
    (project / ".mcp.json").write_text(
        json.dumps({"mcpServers": {"my  server": {"type": "stdio", "command": "theirs"}}})
    )
    found = read_definitions(project)
    assert [(item.name, item.settings.command) for item in found.servers] == [("my_server", "mine")]
    assert "left out" in found.complaints[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "7",
        '{"mcpServers": 7}',
        '{"mcpServers": {"a": 7}}',
        "[" * 100000,
        '{"mcpServers": {"a": {"command": "x", "url": "http://y"}}}',
        '{"mcpServers": {"a": {}}}',
    ],
)
def test_a_repositorys_broken_file_is_a_complaint(project: Path, text: str) -> None:
    (project / ".mcp.json").write_text(text)
    found = read_definitions(project)
    assert found.servers == () and len(found.complaints) == 1


def test_a_link_for_a_settings_file_is_not_followed(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text('{"mcpServers": {"a": {"command": "x"}}}')
    (project / ".mcp.json").symlink_to(outside)
    found = read_definitions(project)
    assert found.servers == () and len(found.complaints) == 1


def test_folders_where_files_are_looked_for(project: Path) -> None:
    """A folder for the definitions' file; a folder among a command's arguments."""
    (project / ".mcp.json").mkdir()
    assert len(read_definitions(project).complaints) == 1
    (project / ".mcp.json").rmdir()
    (project / "src").mkdir()
    table = {"command": "serve", "args": [".", "src", "--root=.mcp.json"]}
    project_file(project, "json", table)
    (brought,) = brought_servers(project)
    assert list(brought.content["files"]) == [".mcp.json"]
    (project / ".etude" / "settings.toml").mkdir(parents=True)
    assert "no file" in read_definitions(project).complaints[0]


def test_a_wrong_file_of_the_persons_own_is_an_error(project: Path, tmp_path: Path) -> None:
    (tmp_path / "config" / "settings.toml").write_text('[mcp.a]\ncommand = "x"\nport = 7\n')
    with pytest.raises(EtudeError, match="port"):
        read_definitions(project)


def test_without_the_package_it_is_a_sentence(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    servers = asyncio.run(open_servers(project, given=[stdio("x")]))
    assert "etude[editor]" in servers.complaints[0] and servers.tools == ()


names = st.text(max_size=80)


@given(names, st.integers(16, 64))
def test_clean_names_fit_what_models_take(name: str, limit: int) -> None:
    cleaned = clean_name(name, limit)
    assert 1 <= len(cleaned) <= limit
    assert cleaned.isascii() and all(char.isalnum() or char in "_-" for char in cleaned)
    assert clean_name(cleaned, limit) == cleaned


@given(names, names, names, names)
def test_no_two_servers_share_a_tools_name(a: str, b: str, tool: str, other: str) -> None:
    """The server can be read off the name of a tool, so a rule for one never covers another."""
    first, second = clean_server_name(a), clean_server_name(b)
    if first != second:
        mine = f"mcp__{first}__{clean_name(tool, 30)}"
        theirs = f"mcp__{second}__{clean_name(other, 30)}"
        assert mine != theirs
    assert f"{first}__{clean_name(tool, 30)}".split("__", 1)[0] == first


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KINDS = ["string", "integer", "boolean", "array", "object", "null", "number"]
keys = st.sampled_from(["a", "b", "path", "copy", "model_dump", "schema", "_x", "self"])


@given(st.dictionaries(keys | st.text(max_size=6), json_values))
def test_arguments_pass_through_unchanged(values: dict[str, Any]) -> None:
    args = arguments_for(lambda arguments: "").model_validate(values)
    assert isinstance(args, ServerArguments)
    assert (args.model_extra or {}) == values
    assert args.model_dump(mode="json") == values


@given(
    st.dictionaries(keys, st.fixed_dictionaries({"type": st.sampled_from(KINDS)}), max_size=3),
    st.lists(keys, max_size=2, unique=True),
    st.booleans(),
    st.dictionaries(keys, json_values, max_size=3),
)
def test_the_check_agrees_with_the_library(
    properties: dict[str, Any], required: list[str], more: bool, values: dict[str, Any]
) -> None:
    import jsonschema

    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": more,
    }
    expected = jsonschema.Draft202012Validator(schema).is_valid(values)
    assert (checker(schema)(values) == "") == expected


def test_variables() -> None:
    assert expanded("a${X}b${Y:-c}", {"X": "1"}) == "a1bc"
    assert expanded("$X {Y} $${", {}) == "$X {Y} $${"
    with pytest.raises(EtudeError, match="X is not set"):
        expanded("${X}", {})


@pytest.fixture(autouse=True, scope="module")
def no_server_is_left() -> Iterator[None]:
    yield
    assert wait_until(lambda: not processes_with(RAW_SERVER) and not processes_with(SDK_SERVER))
