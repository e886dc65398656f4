"""Permissions on real workspaces: what is denied stays unread by every tool, by mounts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.checkpoints import Checkpoints
from etude.agent.mcp.definitions import Origin, ServerDefinition, ServerSettings
from etude.agent.permissions import Decision, Mode, Permissions, Question, Request, reading
from etude.agent.permissions.bash import Simple
from etude.agent.permissions.hidden import HiddenFiles
from etude.agent.permissions.hooks import Hooks
from etude.agent.permissions.rules import Kind, PathRule, Placed, parse_rule
from etude.agent.permissions.settings import Hook, HookEvent
from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import default_tools
from etude.records import Event, EventKind
from etude.sandbox.protocol import Image, Sandbox

SECRET = "hunter2-of-the-tests"


def rules(**kinds: list[str]) -> tuple[Placed, ...]:
    return tuple(
        Placed(Kind(kind), parse_rule(text), "test")
        for kind, texts in kinds.items()
        for text in texts
    )


def hidden(project: Path, *patterns: str) -> HiddenFiles:
    parsed = [parse_rule(f"read({pattern})") for pattern in patterns]
    return HiddenFiles(project, [rule for rule in parsed if isinstance(rule, PathRule)])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in (".env", "sub/.env", "keys/a.pem", "src/x.py", "conf/token"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n" if name.endswith(".py") else f"{SECRET} {name}\n")
    return root


Calls = list[tuple[str, dict[str, Any]]]


def play(
    sandbox: Sandbox, project: Path, script: Any, gate: Permissions, turns: list[Calls], live: bool
) -> tuple[Event, ...]:
    """A session in which the model makes these calls, turn by turn."""
    for calls in turns:
        script.calls(*calls)
    script.says("done")

    async def go() -> tuple[Event, ...]:
        async with Session(
            TokenPolicy(script.engine(), script.renderer),
            lambda: sandbox.create(Image(project, live=live)),
            default_tools(),
            SessionSettings(),
            session_id="s",
            gate=gate,
        ) as session:
            await session.prompt("go")
            return session.events

    return asyncio.run(go())


def results(events: tuple[Event, ...]) -> list[tuple[str, str | None]]:
    return [
        (e.data["text"], e.data["error_class"]) for e in events if e.kind is EventKind.TOOL_RESULT
    ]


@pytest.mark.parametrize("live", [False, True])
def test_denied_files_stay_unread_by_every_tool(
    sandbox: Sandbox, project: Path, script: Any, live: bool
) -> None:
    os.link(project / ".env", project / "second-name")
    (project / "link").symlink_to("keys/a.pem")
    gate = Permissions(
        project, rules(deny=["read(**/.env)", "read(keys/**)", "read(conf/token)"]), Mode.AUTO
    )
    spoken = f"{SECRET[:4]}.*{SECRET[5:]}"
    turns: list[Calls] = [
        [("read", {"path": path}) for path in (".env", "a/../sub/.env", "link", "second-name")],
        [("read", {"path": "/workspace/conf/token"}), ("read", {"path": "keys"})],
        [("grep", {"pattern": spoken})],
        [("grep", {"pattern": spoken, "path": "conf"})],
        [("shell", {"command": "cat .env sub/.env keys/* conf/token link second-name"})],
        [("shell", {"command": f"grep -r {spoken} . ; tar cf - . | grep -a {spoken}"})],
        [("shell", {"command": "cp -r . /tmp/all; cat /tmp/all/.env /tmp/all/conf/token"})],
        [("shell", {"command": "ln conf/token t; mv conf conf2; cat t conf2/token"})],
        [("shell", {"command": "cat conf2/token conf/token t; ls conf2"})],
        [("shell", {"command": "python3 -c 'print(open(\"conf2/token\").read())'"})],
        [("edit", {"path": ".env", "old": "nothing like it", "new": "x"})],
        [("write", {"path": "conf/token", "content": "mine"})],
        [("shell", {"command": "rm -rf keys .env; echo x > sub/.env; ls -A"})],
    ]
    events = play(sandbox, project, script, gate, turns, live)
    found = results(events)
    assert len(found) == sum(len(calls) for calls in turns)
    assert not [text for text, _ in found if SECRET in text]
    refused = [e for e in events if e.kind is EventKind.PERMISSION and not e.data["allowed"]]
    assert len(refused) >= 6
    assert (project / ".env").read_text() == f"{SECRET} .env\n"
    assert (project / "keys" / "a.pem").read_text() == f"{SECRET} keys/a.pem\n"
    assert (project / "sub" / ".env").read_text() == f"{SECRET} sub/.env\n"


@pytest.mark.parametrize("mode", [Mode.PLAN, Mode.READ_ONLY])
def test_case_18_plan_mode_is_a_read_only_mount(
    sandbox: Sandbox, project: Path, script: Any, mode: Mode
) -> None:
    gate = Permissions(project, mode=mode)
    turns: list[Calls] = [
        [("shell", {"command": "echo x > f"})],
        [("shell", {"command": "rm src/x.py"})],
        [("shell", {"command": "cat src/x.py; touch /tmp/free && echo free"})],
        [("write", {"path": "f", "content": "x"})],
    ]
    found = results(play(sandbox, project, script, gate, turns, True))
    assert "Read-only file system" in found[0][0] and found[0][1] == "nonzero_exit"
    assert "Read-only file system" in found[1][0]
    assert "x = 1" in found[2][0] and "free" in found[2][0]
    assert found[3][1] == "refused"
    assert not (project / "f").exists() and (project / "src" / "x.py").exists()


def test_case_16_in_a_session(sandbox: Sandbox, project: Path, script: Any) -> None:
    """Nobody is there: what asks does not run."""
    gate = Permissions(project, rules(allow=["shell(touch made)"]), Mode.ASK)
    turns: list[Calls] = [
        [("shell", {"command": command})]
        for command in ("touch made && touch b", "touch made $(touch b)", "touch made\ntouch b")
    ]
    found = results(play(sandbox, project, script, gate, turns, True))
    assert [kind for _, kind in found] == ["refused"] * 3
    assert not (project / "made").exists() and not (project / "b").exists()
    script.prompts.clear()
    script.answers.clear()
    found = results(
        play(sandbox, project, script, gate, [[("shell", {"command": "touch made"})]], True)
    )
    assert found[0][1] is None and (project / "made").exists()


def test_case_17_a_snapshot_comes_first(
    sandbox: Sandbox, project: Path, script: Any, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(project, tmp_path / "state")
    kept: list[str] = []

    async def save(request: Request) -> None:
        kept.append(await asyncio.to_thread(checkpoints.save, request.subject))

    gate = Permissions(project, mode=Mode.AUTO, before_change=save)
    outside = tmp_path / "outside"
    outside.write_text("safe")
    turns: list[Calls] = [
        [("shell", {"command": f"ls; rm -rf src keys {outside} ../outside /etc/passwd"})]
    ]
    play(sandbox, project, script, gate, turns, True)
    assert not (project / "src").exists() and outside.read_text() == "safe"
    checkpoints.undo(kept[0])
    assert (project / "src" / "x.py").read_text() == "x = 1\n"
    assert (project / "keys" / "a.pem").exists()


def test_a_person_is_asked_and_the_answer_recorded(
    sandbox: Sandbox, project: Path, script: Any
) -> None:
    asked: list[Question] = []

    async def person(question: Question) -> Decision:
        asked.append(question)
        return Decision("yes" in question.request.subject, reason="because")

    gate = Permissions(project, asker=person)
    turns: list[Calls] = [
        [("write", {"path": "yes", "content": "x"}), ("write", {"path": "no", "content": "x"})]
    ]
    events = play(sandbox, project, script, gate, turns, True)
    assert [q.rules for q in asked] == [("edit(yes)",), ("edit(no)",)]
    noted = [e.data for e in events if e.kind is EventKind.PERMISSION]
    assert [data["allowed"] for data in noted] == [True, False]
    assert results(events)[1] == ("refused: because", "refused")
    assert (project / "yes").exists() and not (project / "no").exists()


# Finding what is to be hidden


def test_what_is_hidden(project: Path) -> None:
    (project / "deep" / "er").mkdir(parents=True)
    (project / "deep" / "er" / ".env").write_text("x")
    (project / "dangling").symlink_to("nowhere")
    (project / "circle").symlink_to("circle")
    (project / "into").symlink_to("keys")
    (project / "far").symlink_to("/etc")
    find = hidden(project, "**/.env", "keys/**", "no/such", "dangling", "circle", "far")
    assert find.now() == (".env", "deep/er/.env", "keys", "sub/.env")
    assert hidden(project, "into").now() == ("keys",)
    assert hidden(project).now() == ()
    assert hidden(project, "**").now() == () or "src" in hidden(project, "*").now()


def test_new_renamed_and_linked_files_are_hidden_too(project: Path) -> None:
    find = hidden(project, "conf/token", "**/.env")
    assert find.now() == (".env", "conf/token", "sub/.env")
    (project / "src" / ".env").write_text("new")
    assert find.now() == (".env", "conf/token", "src/.env", "sub/.env")
    (project / "conf").rename(project / "other")
    os.link(project / ".env", project / "src" / "second")
    assert find.now() == (".env", "other/token", "src/.env", "src/second", "sub/.env")
    (project / "other" / "token").unlink()
    (project / "src" / "second").unlink()
    for number in range(50):  # Numbers of files that are gone are used again.
        (project / "src" / f"f{number}").write_text("x")
    assert find.now() == (".env", "src/.env", "sub/.env")


NAMES = st.sampled_from(["a", "b", ".env", "keys", "x.pem"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.booleans()), max_size=10),
    st.sampled_from(["**/.env", "keys/**", "*.pem", "a/*/x.pem", "**/keys", "a/**/b"]),
)
def test_hidden_is_what_the_rule_names(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[list[str], bool]],
    pattern: str,
) -> None:
    """After each change: a file is under a hidden path exactly if the rule denies to read it. The
    one object that remembers says the same as a fresh one."""
    root = tmp_path_factory.mktemp("p")
    rule = parse_rule(f"read({pattern})")
    assert isinstance(rule, PathRule)
    find = HiddenFiles(root, [rule])
    for parts, folder in steps:
        path = root.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if folder:
                path.mkdir()
            else:
                path.write_text(str(parts))
        except OSError:
            continue
        now = find.now()
        assert now == HiddenFiles(root, [rule]).now()
        for each in root.rglob("*"):
            inside = each.relative_to(root)
            covered = any(str(p) in now for p in (inside, *inside.parents))
            assert covered is rule.holds(f"/workspace/{inside}"), (inside, now)


def test_looking_again_is_cheap(tmp_path: Path) -> None:
    for folder in range(500):
        (tmp_path / f"d{folder}").mkdir()
        for number in range(20):
            (tmp_path / f"d{folder}" / f"f{number}").touch()
    (tmp_path / "d3" / ".env").write_text("x")
    time.sleep(0.15)
    find = hidden(tmp_path, "**/.env", "**/*.pem")
    times: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        assert find.now() == ("d3/.env",)
        times.append(time.perf_counter() - began)
    print(f"10,000 files: first {times[0]:.3f} s, again {min(times[1:]):.4f} s")
    assert min(times[1:]) < 0.25


# What only reads is held to it


def _anything(command: Simple) -> bool:
    return bool(command.words)


def test_a_command_taken_to_read_cannot_write(
    sandbox: Sandbox, project: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can be asked. The last part of the fence is the mount: here the text passes for
    reading."""
    for name in ("fa", "fb"):
        (project / name).write_text(f"{name}\n{name}\n")
    turns: list[Calls] = [
        [("shell", {"command": command})]
        for command in ("uniq f{a,b}", "uniq f*", "uniq f?", "uniq fa fb", "uniq fa")
    ]
    found = results(play(sandbox, project, script, Permissions(project), turns, True))
    assert [kind for _, kind in found] == ["refused"] * 4 + [None]
    monkeypatch.setattr(reading, "only_reads", _anything)
    script.prompts.clear()
    script.answers.clear()
    calls: Calls = [
        ("shell", {"command": "uniq fa fb"}),
        ("write", {"path": "made", "content": "x"}),
        ("shell", {"command": "uniq fa; cat fa"}),
    ]
    gate = Permissions(project, mode=Mode.AUTO)
    found = results(play(sandbox, project, script, gate, [calls], True))
    assert "Read-only file system" in found[0][0]
    assert (project / "fb").read_text() == "fb\nfb\n"
    assert (project / "made").read_text() == "x"  # Other calls of the turn keep their rights.
    assert found[2] == ("fa\nfa\nfa", None)


def test_looking_at_a_repository_runs_nothing_of_its_configuration(
    sandbox: Sandbox, project: Path, script: Any
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(project), *arguments], check=True, timeout=60)

    git("init", "--quiet", "--template=")
    git("add", "src")
    spy = project / "spy.sh"
    spy.write_text("#!/bin/sh\necho ran >> /tmp/mark\n")
    spy.chmod(0o755)
    git("config", "core.fsmonitor", "/workspace/spy.sh")
    turns: list[Calls] = [
        [("shell", {"command": command})]
        for command in ("git status --short", "git diff", "git ls-files", "ls /tmp")
    ]
    found = results(play(sandbox, project, script, Permissions(project), turns, True))
    assert "A  src/x.py" in found[0][0] and found[2] == ("src/x.py", None)
    assert "mark" not in found[3][0]
    script.prompts.clear()
    script.answers.clear()
    turns = [[("shell", {"command": "GIT_CONFIG_COUNT=0 git status --short; ls /tmp"})]]
    found = results(
        play(sandbox, project, script, Permissions(project, mode=Mode.AUTO), turns, True)
    )
    assert "mark" in found[0][0]  # The attack is real.


def test_no_guest_writes_what_runs_outside(sandbox: Sandbox, project: Path, script: Any) -> None:
    """Files of hooks and of tool servers stay as they are, under every name; the rest is free."""
    for name in ("tools/guard.sh", "tools/server.js"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("exit 0\n")
    os.link(project / "tools" / "guard.sh", project / "second-name")
    own = Hook(event=HookEvent.BEFORE_TOOL, command=("/bin/sh", "tools/guard.sh"))
    gate = Permissions(project, mode=Mode.AUTO, hooks=Hooks(project, [own]))
    server = ServerSettings(command="node", args=("tools/server.js",))
    gate.protect(ServerDefinition("s", Origin.PROJECT, server).files(project))
    attacks = (
        "echo evil > tools/guard.sh",
        "echo evil >> second-name",
        "rm -f tools/server.js",
        "mv tools other",
        "echo evil > new && mv -f new tools/server.js",
    )
    turns: list[Calls] = [[("shell", {"command": command})] for command in attacks]
    turns.append([("edit", {"path": "tools/guard.sh", "old": "exit 0", "new": "evil"})])
    turns.append([("shell", {"command": "echo x > tools/free"})])
    found = results(play(sandbox, project, script, gate, turns, True))
    assert all(kind is not None for _, kind in found[:-1])
    for name in ("tools/guard.sh", "tools/server.js"):
        assert (project / name).read_text() == "exit 0\n"
    assert found[-1][1] is None and (project / "tools" / "free").exists()
