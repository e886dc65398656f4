"""Rules, modes, questions, approvals and hooks: who may do what."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.permissions import (
    Approvals,
    Decision,
    Gate,
    Mode,
    Permission,
    Permissions,
    Question,
    Remember,
    Request,
)
from etude.agent.permissions.hooks import Hooks, hook_brought
from etude.agent.permissions.rules import TOOLS, Kind, Placed, Touch, parse_rule, suggested
from etude.agent.permissions.settings import (
    Hook,
    HookEvent,
    read_project_file,
    read_user_file,
    remember,
    toml_string,
)
from etude.agent.tools import default_tools, session_tools
from etude.agent.tools.skill import ReadSkill
from etude.agent.tools.tool import Effect, ToolResult
from etude.errors import EtudeError
from etude.sandbox.protocol import Rights

EFFECTS = {
    "read": Effect.READ,
    "grep": Effect.READ,
    "glob": Effect.READ,
    "edit": Effect.WRITE,
    "write": Effect.WRITE,
    "shell": Effect.EXECUTE,
    "web_fetch": Effect.NETWORK,
    "task": Effect.DELEGATE,
    "todo": Effect.TALK,
    "mcp__github__issue": Effect.READ,
}


def call(tool: str, subject: str = "", **arguments: Any) -> Request:
    return Request("c1", tool, EFFECTS[tool], subject, arguments)


def shell(command: str) -> Request:
    return call("shell", command, command=command, timeout=None)


class Person:
    """Answers the same to everything, and remembers what was asked."""

    def __init__(self, *answers: Decision) -> None:
        self.answers = list(answers)
        self.asked: list[Question] = []

    async def __call__(self, question: Question) -> Decision:
        self.asked.append(question)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def gate(project: Path, mode: Mode = Mode.ASK, person: Person | None = None, **kinds: Any) -> Any:
    rules = [
        Placed(Kind(kind), parse_rule(rule), "test")
        for kind, texts in kinds.items()
        for rule in texts
    ]
    return Permissions(project, rules, mode, asker=person, settings=project / "user.toml")


def check(permissions: Gate, request: Request) -> Permission:
    return asyncio.run(permissions.check(request))


# Rules


@pytest.mark.parametrize(
    "text",
    ["", "raed(.env)", "shell()", "shell(*)", "shell('a)", "read(../x)", "web_fetch(http://x/)",
     "task(x)", "shell(a) b", "edit(x", "*", "web_fetch(*)"],
)  # fmt: skip
def test_a_wrong_rule_is_one_sentence(text: str) -> None:
    with pytest.raises(EtudeError, match="cannot be used"):
        parse_rule(text)


def test_rules_know_every_tool() -> None:
    tools = (*default_tools(), *session_tools(allow_hosts=["x.org"]), ReadSkill({}))
    assert {tool.name for tool in tools} <= set(TOOLS)


def test_all_arguments_of_a_sessions_shell_are_known(tmp_path: Path) -> None:
    """A command that a rule allows is allowed with the arguments that the tool really sends."""
    (tool,) = [tool for tool in session_tools() if tool.name == "shell"]
    for more in ({}, {"timeout": 3}, {"background": True}, {"cwd": "./"}):
        args = tool.arguments.model_validate({"command": "make test", **more})
        request = Request(
            "c", "shell", tool.effect, tool.subject(args), args.model_dump(mode="json")
        )
        assert check(gate(tmp_path, allow=["shell(make test)"]), request).allowed, more
        assert not check(gate(tmp_path), request).allowed


SPELLINGS = [
    ".env",
    "./.env",
    "a/../.env",
    "./a/b/../../.env",
    "/workspace/.env",
    "/workspace/./x/../.env",
    "//workspace/.env",
    "/tmp/../workspace/.env",
    "sub/.env",
    "sub//deep/./.env",
    "link",
    "way/.env",
]


@pytest.mark.parametrize("path", SPELLINGS)
@pytest.mark.parametrize("tool", ["read", "grep", "edit", "write"])
def test_a_denied_file_is_refused_whatever_its_spelling(
    tmp_path: Path, path: str, tool: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".env").write_text("x")
    (tmp_path / "sub" / ".env").write_text("x")
    (tmp_path / "link").symlink_to("sub/.env")
    (tmp_path / "way").symlink_to("sub")
    for mode in (Mode.ASK, Mode.AUTO):
        permissions = gate(tmp_path, mode, Person(Decision(True)), deny=["read(**/.env)"])
        permission = check(permissions, call(tool, path, path=path))
        assert not permission.allowed
        assert "deny read(**/.env)" in permission.reason


def test_patterns_of_paths(tmp_path: Path) -> None:
    cases = {
        "src/**": (["src/a", "src/a/b"], ["src", "srcs/a", "a/src/b", "src/../a"]),
        "src": (["src"], ["src/a"]),
        "*.py": (["a.py"], ["b/a.py", "a.pyc"]),
        "**/*.py": (["a.py", "b/c/a.py"], ["a.py/x"]),
        "a/**/z": (["a/z", "a/b/c/z"], ["a/bz", "z"]),
        "a?c": (["abc"], ["ac", "a/c"]),
        "A": (["A"], ["a"]),
        "x\\*": (["x*"], ["xy"]),
        "/tmp/**": (["/tmp/a"], ["tmp/a"]),
    }
    for pattern, (inside, outside) in cases.items():
        permissions = gate(tmp_path, allow=[f"edit({pattern})"])
        for path in inside:
            assert check(permissions, call("edit", path)).allowed, (pattern, path)
        for path in outside:
            assert not check(permissions, call("edit", path)).allowed, (pattern, path)


def test_a_denied_folder_is_denied_with_all_in_it(tmp_path: Path) -> None:
    for pattern in ("keys", "keys/**", "**/keys", "k*s"):
        permissions = gate(tmp_path, Mode.AUTO, deny=[f"read({pattern})"])
        for path in ("keys", "keys/a", "keys/deep/a"):
            assert not check(permissions, call("read", path)).allowed, (pattern, path)
        assert check(permissions, call("read", "key")).allowed


def test_allowed_through_a_link_is_not_allowed(tmp_path: Path) -> None:
    """`edit(src/**)` is about what is in src, not about what a link there leads to."""
    (tmp_path / "src").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "src" / "out").symlink_to("../other")
    (tmp_path / "src" / "in").symlink_to("a")
    permissions = gate(tmp_path, allow=["edit(src/**)"])
    assert check(permissions, call("edit", "src/in")).allowed
    assert not check(permissions, call("edit", "src/out/x")).allowed
    (tmp_path / "src" / "far").symlink_to("/etc/passwd")
    assert not check(permissions, call("write", "src/far")).allowed


@pytest.mark.parametrize(
    ("url", "fits"),
    [
        ("https://docs.python.org/3/", True),
        ("http://DOCS.python.org", True),
        ("https://docs.python.org:8443/x?y#z", True),
        ("https://evil.org/docs.python.org", False),
        ("https://docs.python.org.evil.org/", False),
        ("https://docs.python.org@evil.org/", False),
        ("https://evil.org\\@docs.python.org/", False),
        ("https://evil.org/@docs.python.org", False),
        ("https://xdocs.python.org/", False),
        ("https://python.org/", False),
        ("ftp://docs.python.org/", False),
        ("https://docs.python.org\n.evil.org/", False),
        ("https://docs.python.org /", False),
        ("docs.python.org", False),
    ],
)
def test_hosts(tmp_path: Path, url: str, fits: bool) -> None:
    permissions = gate(tmp_path, Mode.AUTO, allow=["web_fetch(docs.python.org)"])
    assert check(permissions, call("web_fetch", url)).allowed is fits
    below = gate(tmp_path, Mode.AUTO, allow=["web_fetch(*.python.org)"])
    assert check(below, call("web_fetch", url)).allowed is (fits or "/xdocs." in url)


def test_a_denied_host_has_many_names(tmp_path: Path) -> None:
    permissions = gate(tmp_path, allow=["web_fetch"], deny=["web_fetch(evil.org)"])
    for url in ("https://EVIL.org/x", "https://a@evil.org./", "//evil.org", "https://evil.org:1/"):
        assert not check(permissions, call("web_fetch", url)).allowed, url
    assert check(permissions, call("web_fetch", "https://good.org/")).allowed


def test_a_host_named_at_the_start_needs_no_rule(tmp_path: Path) -> None:
    """In auto mode and where nobody can be asked; a person in ask mode is asked."""
    page = call("web_fetch", "https://docs.python.org/3/")
    others = [
        call("web_fetch", url)
        for url in ("https://x.org/", "http://docs.python.org:81/", "https://a@docs.python.org/")
    ]
    for mode in Mode:
        for hosts in (("docs.python.org",), ("*.python.org",)):
            person = Person(Decision(False))
            attended = gate(tmp_path, mode, person)
            attended.fetch_hosts = hosts
            assert check(attended, page).allowed is (mode is Mode.AUTO)
            assert len(person.asked) == (mode is not Mode.AUTO)
            headless = gate(tmp_path, mode)
            headless.fetch_hosts = hosts
            assert check(headless, page) == Permission(True, "--allow-host")
            assert not any(check(headless, other).allowed for other in others)
    # `*` names no host; and what a rule says comes first.
    anywhere = gate(tmp_path, Mode.AUTO)
    anywhere.fetch_hosts = ("*",)
    assert not check(anywhere, page).allowed
    for rules in ({"deny": ["web_fetch"]}, {"ask": ["web_fetch(docs.python.org)"]}):
        ruled = gate(tmp_path, Mode.AUTO, **rules)
        ruled.fetch_hosts = ("docs.python.org",)
        assert not check(ruled, page).allowed


def test_servers_of_tools(tmp_path: Path) -> None:
    request = call("mcp__github__issue")
    for mode in Mode:  # What runs outside the sandbox asks in every mode, whatever it says it does.
        assert not check(gate(tmp_path, mode), request).allowed
    for rule in ("mcp__github__issue", "mcp__github", "mcp__github__*", "mcp__*"):
        assert check(gate(tmp_path, allow=[rule]), request).allowed, rule
    for rule in ("mcp__git", "mcp__gitlab", "mcp__github__iss", "read"):
        assert not check(gate(tmp_path, allow=[rule]), request).allowed, rule
    assert not check(gate(tmp_path, allow=["mcp__*"], deny=["mcp__github"]), request).allowed


def test_deny_beats_ask_beats_allow(tmp_path: Path) -> None:
    request = shell("make test")
    person = Person(Decision(True))
    everything = {"allow": ["shell", "shell(make *)"], "ask": ["shell(make test)"]}
    assert check(gate(tmp_path, Mode.AUTO, person, **everything), request).allowed
    assert len(person.asked) == 1
    denied = gate(tmp_path, Mode.AUTO, person, **everything, deny=["shell(make *)"])
    assert not check(denied, request).allowed
    assert len(person.asked) == 1


@pytest.mark.parametrize(
    ("command", "touch"),
    [
        ("git push", Touch.YES),
        ("git push origin main", Touch.YES),
        ("git -C x -c a=b push", Touch.YES),
        ("/usr/bin/git push", Touch.YES),
        ("ls && git push", Touch.YES),
        ("x=$(git push)", Touch.YES),
        ('echo "$(git push)"', Touch.YES),
        ("if true; then git push; fi", Touch.YES),
        ("f() { git push; }", Touch.YES),
        ("cat <<E\n$(git push)\nE", Touch.YES),
        ("env A=1 git push", Touch.YES),
        ("timeout 5 git push", Touch.YES),
        ("sudo -u x git push", Touch.YES),
        ("bash -c 'git push'", Touch.YES),
        ("timeout 5 bash -lc 'ls; git push'", Touch.YES),
        ("eval git push", Touch.YES),
        ("eval 'git' 'push'", Touch.YES),
        ("find . -exec git push ';'", Touch.YES),
        ("'git' \"push\"", Touch.YES),
        ("g\\it pu''sh", Touch.YES),
        ("git >f push", Touch.YES),
        ("echo push | xargs git", Touch.MAYBE),
        ("$GIT push", Touch.MAYBE),
        ("git $X", Touch.MAYBE),
        ("git pu*", Touch.MAYBE),
        ('bash -c "$X"', Touch.MAYBE),
        ("git push '", Touch.MAYBE),
        ("git status", Touch.NO),
        ("echo git push", Touch.NO),
        ("git stash; push", Touch.NO),
        ("pytest $X", Touch.NO),
        ("bash run.sh", Touch.NO),
    ],
)
def test_how_widely_a_denial_is_read(tmp_path: Path, command: str, touch: Touch) -> None:
    """Yes is refused; maybe is asked, also in auto mode; no is none of its business."""
    rule = parse_rule("shell(git push *)")
    found = rule.touches(shell(command), ())
    assert found is touch or (touch is Touch.MAYBE and found is Touch.YES)
    person = Person(Decision(True))
    permission = check(gate(tmp_path, Mode.AUTO, person, deny=["shell(git push)"]), shell(command))
    assert permission.allowed is (found is not Touch.YES)
    assert len(person.asked) == (found is Touch.MAYBE)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=0, max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4))
def test_a_suggested_rule_allows_exactly_its_command(words: list[str]) -> None:
    import shlex

    command = shlex.join(words)
    for text in suggested(shell(command)):
        rule = parse_rule(text)
        assert rule.covers(shell(command), ())
        assert not rule.covers(shell(f"{command} more"), ())
        assert not rule.covers(shell(shlex.join([*words[:-1], words[-1] + "x"])), ())


# Modes


@pytest.mark.parametrize(
    ("mode", "free", "asked", "refused"),
    [
        (Mode.ASK, ["read", "grep", "todo", "task"], ["edit", "write", "shell", "web_fetch"], []),
        (Mode.AUTO, ["read", "edit", "write", "shell", "todo", "task"], ["web_fetch"], []),
        (Mode.READ_ONLY, ["read", "shell", "todo", "task"], ["web_fetch"], ["edit", "write"]),
        (Mode.PLAN, ["read", "shell", "todo", "task"], ["web_fetch"], ["edit", "write"]),
    ],
)
def test_modes(
    tmp_path: Path, mode: Mode, free: list[str], asked: list[str], refused: list[str]
) -> None:
    for tool in (*free, *asked, *refused):
        person = Person(Decision(True))
        permissions = gate(tmp_path, mode, person)
        assert permissions.rights() == Rights(readonly=mode in (Mode.READ_ONLY, Mode.PLAN))
        permission = check(permissions, call(tool, "make x" if tool == "shell" else "x"))
        assert permission.allowed is (tool not in refused)
        assert bool(person.asked) is (tool in asked), tool
        assert permissions.mode_note().startswith(f"Mode: {mode.value}")


def test_a_session_does_not_change_its_own_rules_unasked(tmp_path: Path) -> None:
    permissions = gate(tmp_path, Mode.AUTO, allow=["edit"])
    for path in (".etude/settings.toml", "./x/../.etude/hooks/h", "/workspace/.etude"):
        assert not check(permissions, call("write", path)).allowed


def test_case_19_a_sub_agent_has_never_more_than_its_parent(tmp_path: Path) -> None:
    """Live: a change of the parent's mode or rules counts at once for children of children."""
    parent = gate(tmp_path, Mode.AUTO)
    child, reader = parent.narrowed(readonly=False), parent.narrowed(readonly=True)
    grandchild = child.narrowed(readonly=False).narrowed(readonly=False)
    of_reader = reader.narrowed(readonly=False)
    write = call("write", "x")
    assert all(check(each, write).allowed for each in (parent, child, grandchild))
    assert not check(reader, write).allowed and not check(of_reader, write).allowed
    assert reader.rights().readonly and of_reader.rights().readonly
    parent.set_mode(Mode.PLAN)
    for each in (parent, child, grandchild, reader, of_reader):
        assert each.rights().readonly and not check(each, write).allowed
    parent.set_mode(Mode.AUTO)
    parent.add(Kind.DENY, "shell(make)", "later")
    (tmp_path / "s").write_text("x")
    parent.add(Kind.DENY, "read(s)", "later")
    for each in (child, grandchild, reader, of_reader):
        assert not check(each, shell("make all")).allowed
        assert each.rights().hidden == ("s",)


# Questions


def test_case_23_without_a_person_the_reason_names_the_rule(tmp_path: Path) -> None:
    permissions = gate(tmp_path)
    permission = check(permissions, shell("make test && ls | head"))
    assert not permission.allowed
    assert "`shell(make test)`" in permission.reason and "user.toml" in permission.reason
    permission = check(permissions, call("web_fetch", "https://x.org/y"))
    assert "`web_fetch(x.org)`" in permission.reason
    assert "`edit(a/b)`" in check(permissions, call("write", "./a/b")).reason
    refused = check(permissions, shell("make $(x)"))
    assert not refused.allowed and "shell(" not in refused.reason


def test_answers_are_remembered_as_long_as_said(tmp_path: Path) -> None:
    request = shell("make test")
    for how, later, new in (
        (Remember.ONCE, 3, 1),
        (Remember.SESSION, 1, 1),
        (Remember.ALWAYS, 1, 0),
    ):
        person = Person(Decision(True, how))
        permissions = gate(tmp_path, person=person)
        assert all(check(permissions, request).allowed for _ in range(3))
        assert len(person.asked) == later
        assert not check(permissions, request).reason
        person = Person(Decision(False))
        fresh = Permissions.load(
            tmp_path,
            asker=person,
            approvals=Approvals(tmp_path / "a"),
            settings=tmp_path / "user.toml",
        )
        assert check(fresh, request).allowed is (new == 0)
        assert len(person.asked) == new
    other = tmp_path / "other"
    other.mkdir()
    elsewhere = Permissions.load(
        other, approvals=Approvals(tmp_path / "a"), settings=tmp_path / "user.toml"
    )
    assert not check(elsewhere, request).allowed  # Remembered for that project only.


def test_a_no_is_remembered_too(tmp_path: Path) -> None:
    person = Person(Decision(False, Remember.SESSION, "use ninja"))
    permissions = gate(tmp_path, person=person)
    first = check(permissions, shell("make test"))
    assert (first.allowed, first.reason) == (False, "use ninja")
    assert not check(permissions, shell("make test")).allowed
    assert not check(permissions, shell("ls; make test")).allowed
    assert len(person.asked) == 1


def test_what_no_rule_can_say_is_remembered_to_the_letter(tmp_path: Path) -> None:
    person = Person(Decision(True, Remember.SESSION), Decision(False))
    permissions = gate(tmp_path, person=person)
    assert check(permissions, shell("x=$(date) make")).allowed
    assert check(permissions, shell("x=$(date) make")).allowed
    assert person.asked[0].rules == ()
    assert not check(permissions, shell("x=$(date) make ")).allowed
    moved = Request("c", "shell", Effect.EXECUTE, "x=$(date) make", {"cwd": "/tmp"})
    assert not check(permissions, moved).allowed


def test_questions_come_one_at_a_time_and_answers_count_for_those_that_wait(tmp_path: Path) -> None:
    open_now, most, asked = 0, 0, 0

    async def person(question: Question) -> Decision:
        nonlocal open_now, most, asked
        open_now, asked = open_now + 1, asked + 1
        most = max(most, open_now)
        await asyncio.sleep(0.02)
        open_now -= 1
        return Decision(True, Remember.SESSION)

    async def go() -> list[Permission]:
        permissions = Permissions(tmp_path, asker=person, settings=tmp_path / "u")
        sub = permissions.narrowed(readonly=False)
        requests = [shell("make a"), shell("make a"), shell("make b"), call("write", "x")]
        return await asyncio.gather(
            *(one.check(request) for request in requests for one in (permissions, sub))
        )

    assert all(permission.allowed for permission in asyncio.run(go()))
    assert (most, asked) == (1, 3)


def test_a_cancelled_question_blocks_nobody(tmp_path: Path) -> None:
    async def person(question: Question) -> Decision:
        await asyncio.sleep(60)
        return Decision(True)

    async def go() -> Permission:
        permissions = Permissions(tmp_path, asker=person, settings=tmp_path / "u")
        waiting = asyncio.create_task(permissions.check(shell("make a")))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled()
        permissions.asker = Person(Decision(True))
        return await asyncio.wait_for(permissions.check(shell("make a")), 5)

    assert asyncio.run(go()).allowed


def test_what_may_change_files_is_announced_first(tmp_path: Path) -> None:
    """Case 17: the driver takes its snapshot there."""
    announced: list[str] = []

    async def before(request: Request) -> None:
        announced.append(request.subject)

    permissions = Permissions(tmp_path, mode=Mode.AUTO, before_change=before)
    for request in (
        shell("git status"),
        call("read", "x"),
        shell("git reset --hard"),
        call("edit", "y"),
        shell("ls; rm z"),
        call("web_fetch", "https://x.org"),
    ):
        check(permissions.narrowed(readonly=False), request)
    assert announced == ["git reset --hard", "y", "ls; rm z"]
    permissions.set_mode(Mode.PLAN)
    check(permissions, shell("git reset --hard"))
    assert len(announced) == 3


# Settings


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_project_may_only_restrict_until_approved(tmp_path: Path) -> None:
    project = tmp_path / "project"
    user = write(
        tmp_path / "user.toml", '[permissions]\nmode = "auto"\nallow = ["web_fetch(a.org)"]\n'
    )
    theirs = write(
        project / ".etude" / "settings.toml",
        '[permissions]\nallow = ["web_fetch"]\ndeny = ["shell(git push)"]\nask = ["edit(x)"]\n',
    )
    approvals = Approvals(tmp_path / "approvals.json")

    def load() -> Permissions:
        return Permissions.load(project, approvals=approvals, settings=user)

    fetch, push = call("web_fetch", "https://b.org/"), shell("git push")
    first = load()
    assert first.mode is Mode.AUTO
    assert check(first, call("web_fetch", "https://a.org/")).allowed
    assert not check(first, fetch).allowed
    assert not check(first, push).allowed and not check(first, call("edit", "x")).allowed
    (brought,) = first.pending
    approvals.approve(brought.kind, brought.project, brought.content)
    second = load()
    assert not second.pending and check(second, fetch).allowed and not check(second, push).allowed
    theirs.write_text('[permissions]\nallow = ["web_fetch", "shell"]\n')  # Another content.
    third = load()
    assert third.pending and not check(third, fetch).allowed


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("[permissions", "no valid TOML"),
        ('[permissions]\nmode = "auto"\n', "permissions.mode"),
        ("[permision]\ndeny = []\n", "permision"),
        ('[permissions]\ndeny = "read(x)"\n', "permissions.deny"),
        ('[permissions]\ndeny = ["raed(x)"]\n', "there is no tool"),
        ('[[hooks]]\nevent = "before_tool"\ncommand = "a b"\n', "hooks.0.command"),
        ('[[hooks]]\nevent = "before_tool"\ncommand = []\n', "hooks.0.command"),
        ('[[remembered]]\nallow = "shell"\nproject = "/"\n', "remembered"),
    ],
)
def test_a_projects_file_that_is_wrong_is_told(tmp_path: Path, text: str, about: str) -> None:
    """Rules that cannot be read are not taken for no rules."""
    write(tmp_path / ".etude" / "settings.toml", text)
    with pytest.raises(EtudeError) as caught:
        Permissions.load(tmp_path, approvals=Approvals(tmp_path / "a"), settings=tmp_path / "u")
    assert about in str(caught.value) and "\n" not in str(caught.value).strip()


def test_a_projects_file_is_read_without_following_links(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside.toml", "[permissions]\n")
    for make in ("link", "folder", "pipe"):
        project = tmp_path / make
        (project / ".etude").mkdir(parents=True)
        path = project / ".etude" / "settings.toml"
        if make == "link":
            path.symlink_to(outside)
        elif make == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
        with pytest.raises(EtudeError):
            read_project_file(project)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / ".etude").symlink_to(tmp_path / "link")
    with pytest.raises(EtudeError, match="is a link"):
        read_project_file(tmp_path / "p")


def test_remembering_keeps_the_file_as_it_is(tmp_path: Path) -> None:
    real = write(tmp_path / "dotfiles" / "settings.toml", '# mine\n[permissions]\nallow = ["todo"]')
    real.chmod(0o640)
    link = tmp_path / "settings.toml"
    link.symlink_to(real)
    rule = "shell(echo '\"\\' 'a\nb\u2028\x7f')"
    remember(link, tmp_path, allow=rule)
    remember(link, tmp_path, deny="edit(x)")
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert real.read_text().startswith('# mine\n[permissions]\nallow = ["todo"]\n')
    kept = read_user_file(link)
    assert [item.allow for item in kept.remembered] == [rule, None]
    assert kept.remembered[1].deny == "edit(x)" and kept.permissions.allow == ("todo",)
    assert sorted(p.name for p in real.parent.iterdir()) == [".settings.toml.lock", "settings.toml"]


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_is_a_toml_string(text: str) -> None:
    import tomllib

    assert tomllib.loads(f"x = {toml_string(text)}") == {"x": text}


# Approvals and hooks


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import json, sys, time, os\nevent = json.load(sys.stdin)\n{body}\n")
    return path


def hook(event: HookEvent, *command: str, **options: Any) -> Hook:
    return Hook(event=event, command=(sys.executable, *command), **options)


def test_case_21_nothing_of_a_repository_runs_unapproved(tmp_path: Path) -> None:
    project, mark = tmp_path / "project", tmp_path / "ran"
    body = f"open({str(mark)!r}, 'a').write('x')"
    path = script(project / ".etude" / "guard.py", body)
    write(
        project / ".etude" / "settings.toml",
        f'[[hooks]]\nevent = "before_tool"\ncommand = ["{sys.executable}", ".etude/guard.py"]\n',
    )
    approvals = Approvals(tmp_path / "approvals.json")

    def run() -> Sequence[Any]:
        permissions = Permissions.load(
            project, Mode.AUTO, approvals=approvals, settings=tmp_path / "u"
        )
        assert check(permissions, call("read", "x")).allowed
        return permissions.hooks.pending() if permissions.hooks else ()

    (brought,) = run()
    assert not mark.exists()
    approvals.approve(brought.kind, brought.project, brought.content)
    assert run() == ()
    assert mark.read_text() == "x"
    script(path, body + " # changed")  # The definition is the same, what it runs is not.
    assert len(run()) == 1
    assert mark.read_text() == "x"
    script(path, body)
    run()
    assert mark.read_text() == "xx"
    approvals.revoke(project)
    run()
    assert mark.read_text() == "xx"


def test_a_script_that_changes_during_the_session_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = script(tmp_path / "p" / "h.py", f"open({str(mark)!r}, 'a').write('x')")
    approvals = Approvals(tmp_path / "approvals.json")
    theirs = hook(HookEvent.STOP, "h.py")
    brought = hook_brought(theirs, tmp_path / "p")
    approvals.approve(brought.kind, brought.project, brought.content)
    hooks = Hooks(tmp_path / "p", (), [theirs], approvals)
    asyncio.run(hooks.stop("s", "finished", ""))
    path.write_text(path.read_text() + "\n")
    asyncio.run(hooks.stop("s", "finished", ""))
    assert mark.read_text() == "x"


def approved_hook(tmp_path: Path, theirs: Hook) -> Approvals:
    approvals = Approvals(tmp_path / "approvals.json")
    brought = hook_brought(theirs, tmp_path / "p")
    approvals.approve(brought.kind, brought.project, brought.content)
    return approvals


@pytest.mark.parametrize("as_program", [False, True])
def test_a_hook_runs_the_bytes_that_were_looked_at(tmp_path: Path, as_program: bool) -> None:
    """The file is exchanged after the look and before the start, by a hook that runs first."""
    project, mark = tmp_path / "p", tmp_path / "ran"
    path = project / "hooks" / "guard.py"
    path.parent.mkdir(parents=True)
    approved = f"open({str(mark)!r}, 'a').write('approved')"
    path.write_text(f"#!{sys.executable}\n{approved}\n")
    path.chmod(0o755)
    theirs = hook(HookEvent.BEFORE_TOOL, "hooks/guard.py")
    if as_program:
        theirs = Hook(event=HookEvent.BEFORE_TOOL, command=("hooks/guard.py",))
    approvals = approved_hook(tmp_path, theirs)
    evil = path.read_text().replace("approved", "evil")
    swap = script(tmp_path / "swap.py", f"open({str(path)!r}, 'w').write({evil!r})")
    hooks = Hooks(project, [hook(HookEvent.BEFORE_TOOL, str(swap))], [theirs], approvals)
    assert asyncio.run(hooks.before_tool(call("read", "x"))).refusal is None
    assert "evil" in path.read_text() and mark.read_text() == "approved"
    outcome = asyncio.run(hooks.before_tool(call("read", "x")))  # Not silent from now on.
    assert "hooks/guard.py was changed" in str(outcome.refusal)
    assert mark.read_text() == "approved"


@pytest.mark.parametrize("how", ["changed", "removed", "link"])
def test_an_approved_guard_does_not_fall_silent(tmp_path: Path, how: str) -> None:
    project = tmp_path / "p"
    path = script(project / "guard.py", "sys.exit(2)")
    theirs = hook(HookEvent.BEFORE_TOOL, "guard.py", tools=("shell",))
    approvals = approved_hook(tmp_path, theirs)
    permissions = Permissions(
        project, mode=Mode.AUTO, hooks=Hooks(project, (), [theirs], approvals)
    )
    assert not check(permissions, shell("make")).allowed
    text = path.read_text()
    path.unlink()
    if how == "changed":
        path.write_text("")
    elif how == "link":
        (project / "other.py").write_text("")
        path.symlink_to("other.py")
    permission = check(permissions, shell("make"))
    assert not permission.allowed and "the approved hook" in permission.reason
    assert check(permissions, call("read", "x")).allowed  # It guards the shell only.
    path.unlink(missing_ok=True)
    path.write_text(text.replace("2", "0"))
    approved_hook(tmp_path, theirs)  # The person looked again.
    assert check(permissions, shell("make")).allowed
    approvals.revoke(project)  # Unchanged, and no longer wanted.
    assert check(permissions, shell("make")).allowed


def test_a_copied_hook_finds_the_other_files_that_it_names(tmp_path: Path) -> None:
    project, mark = tmp_path / "p", tmp_path / "ran"
    body = f"open({str(mark)!r}, 'w').write(open(sys.argv[1].split('=')[1]).read() + os.getcwd())"
    script(project / "a" / "hook.py", body)
    write(project / "a" / "conf", "settings of ")
    theirs = hook(HookEvent.STOP, "a/hook.py", "--config=a/conf")
    hooks = Hooks(project, (), [theirs], approved_hook(tmp_path, theirs))
    assert asyncio.run(hooks.stop("s", "finished", "")).failures == ()
    assert mark.read_text() == f"settings of {project}"


def test_a_hook_takes_no_program_from_the_projects_folder_of_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An active virtual environment in the project is in PATH, and a session writes there."""
    program = write(tmp_path / ".venv" / "bin" / "checker", "#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    hooks = Hooks(tmp_path, [Hook(event=HookEvent.STOP, command=("checker",))])
    (failure,) = asyncio.run(hooks.stop("s", "finished", "")).failures
    assert "no such program" in failure


def test_an_approval_is_of_one_project_and_content(tmp_path: Path) -> None:
    approvals = Approvals(tmp_path / "s" / "approvals.json")
    content = {"command": ["x", "y"], "n": 1}
    approvals.approve("mcp", tmp_path, content)
    assert approvals.approved("mcp", tmp_path, {"n": 1, "command": ["x", "y"]})
    assert approvals.approved("mcp", tmp_path / "s" / "..", content)
    assert not approvals.approved("hook", tmp_path, content)
    assert not approvals.approved("mcp", tmp_path / "s", content)
    assert not approvals.approved("mcp", tmp_path, {**content, "n": 1.5})
    assert not approvals.approved("mcp", tmp_path, {**content, "command": ["x y"]})
    assert stat.S_IMODE((tmp_path / "s" / "approvals.json").stat().st_mode) == 0o600
    (tmp_path / "s" / "approvals.json").write_text('{"approved": 3')
    with pytest.raises(EtudeError, match="damaged"):
        approvals.approved("mcp", tmp_path, content)


def test_hooks_get_the_call_and_may_refuse_it(tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    guard = script(
        tmp_path / "g.py",
        f"json.dump(event, open({str(seen)!r}, 'w'))\n"
        "if event['arguments'].get('command') == 'make bad':\n"
        "    print('not that one', file=sys.stderr); sys.exit(2)",
    )
    hooks = Hooks(tmp_path, [hook(HookEvent.BEFORE_TOOL, str(guard), tools=("sh*",))])
    permissions = Permissions(tmp_path, mode=Mode.AUTO, hooks=hooks)
    assert check(permissions, call("read", "x")).allowed and not seen.exists()
    assert check(permissions, shell("make good")).allowed
    assert json.loads(seen.read_text()) == {
        "event": "before_tool",
        "project": str(tmp_path),
        "id": "c1",
        "tool": "shell",
        "effect": "execute",
        "subject": "make good",
        "arguments": {"command": "make good", "timeout": None},
    }
    refused = check(permissions.narrowed(readonly=False), shell("make bad"))
    assert (refused.allowed, refused.by, refused.reason) == (False, "hook", "not that one")


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ("time.sleep(60)", "killed after 0.5 s"),
        ("os.fork() or time.sleep(60)\nsys.exit(3)", "exit code 3"),
        ("raise ValueError('broken')", "broken"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_guard_that_fails_lets_nothing_through(tmp_path: Path, body: str, about: str) -> None:
    timeout = 0.5 if "killed" in about else 30
    guard = hook(HookEvent.BEFORE_TOOL, str(script(tmp_path / "g.py", body)), timeout=timeout)
    permissions = Permissions(tmp_path, mode=Mode.AUTO, hooks=Hooks(tmp_path, [guard]))
    began = time.monotonic()
    permission = check(permissions, call("read", "x"))
    assert not permission.allowed and about in permission.reason
    assert time.monotonic() - began < 20
    missing = Hook(event=HookEvent.BEFORE_TOOL, command=("no-such-program-of-ours",))
    permissions.hooks = Hooks(tmp_path, [missing])
    assert "no such program" in check(permissions, call("read", "x")).reason


def test_other_hooks_only_report(tmp_path: Path) -> None:
    failing = script(tmp_path / "f.py", "print('oh', file=sys.stderr); sys.exit(2)")
    events = [HookEvent.AFTER_TOOL, HookEvent.SESSION_START, HookEvent.STOP]
    hooks = Hooks(tmp_path, [hook(event, str(failing)) for event in events])

    async def go() -> None:
        for outcome in (
            await hooks.after_tool(call("read", "x"), ToolResult("t")),
            await hooks.session_start("s"),
            await hooks.stop("s", "finished", ""),
        ):
            assert outcome.refusal is None and "oh" in outcome.failures[0]

    asyncio.run(go())


def test_a_hook_reads_no_program_from_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder on PATH would be one of the repository's."""
    mark = tmp_path / "ran"
    program = write(tmp_path / "bin" / "guard", f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"bin:.:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    own = Hook(event=HookEvent.STOP, command=("guard",))
    outcome = asyncio.run(Hooks(tmp_path, [own]).stop("s", "finished", ""))
    assert "no such program" in outcome.failures[0] and not mark.exists()
