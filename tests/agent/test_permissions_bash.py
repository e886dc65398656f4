"""What a command would run: the analysis against real bash, and case 16 with all its kinds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.permissions import Decision, Mode, Permissions, Question, Request
from etude.agent.permissions.bash import Script, analyse
from etude.agent.permissions.reading import reads_only
from etude.agent.permissions.rules import Kind, Placed, parse_rule
from etude.agent.tools.tool import Effect
from etude.sandbox.protocol import Image, Sandbox

PROJECT = Path("/nowhere")


def shell(command: str, **arguments: object) -> Request:
    return Request(
        "c1", "shell", Effect.EXECUTE, command, {"command": command, "timeout": None, **arguments}
    )


def allowing(*rules: str) -> tuple[Placed, ...]:
    return tuple(Placed(Kind.ALLOW, parse_rule(rule), "test") for rule in rules)


def asks(request: Request, *rules: str, mode: Mode = Mode.ASK) -> bool:
    """Whether a person is asked about a call."""
    asked: list[Question] = []

    async def person(question: Question) -> Decision:
        asked.append(question)
        return Decision(False)

    permissions = Permissions(PROJECT, allowing(*rules), mode, asker=person)
    permission = asyncio.run(permissions.check(request))
    assert permission.allowed is not bool(asked)
    return bool(asked)


@pytest.mark.parametrize(
    "command",
    [
        "git status && rm x",
        "git status $(rm x)",
        "git status > f",
        "git status\nrm x",
        "git status; rm x",
        "git status || rm x",
        "git status | rm x",
        "rm x | git status",
        "git status & rm x",
        "git status &",
        "git status `rm x`",
        'git status "$(rm x)"',
        "git status <(rm x)",
        "git status >> f",
        "git status >| f",
        "git status &> f",
        "git status 2> f",
        "git status < f",
        "git status <> f",
        "git status >&f",
        "git status > /dev/null/../../f",
        "git status <<E\n$(rm x)\nE",
        "git status <<< x",
        "X=1 git status",
        "PATH=. git status",
        "PATH=.; git status",
        "export PATH=.; git status",
        "env git status",
        "eval git status",
        "exec git status",
        "command git status",
        "bash -c 'git status'",
        "git status $X",
        "git status ${X:-$(rm x)}",
        "git status $((a[$(rm x)]))",
        "git status $'x'",
        "g* status",
        "$GIT status",
        "./git status",
        "git -c core.pager=x status",
        "git  -C /tmp status",
        "cd /tmp && git status",
        "git() { rm x; }; git status",
        "function git { rm x; }\ngit status",
        "alias git=rm; git status",
        "(git status; rm x)",
        "{ git status; rm x; }",
        "if git status; then rm x; fi",
        "for x in a; do git status; done",
        "while git status; do rm x; done",
        "! git status",
        "time git status; rm x",
        "coproc git status",
        "git status # x",
        "git status \\\n; rm x",
        "git status\r\nrm x",
        "git status\u2028rm x",
        "git sta\\\ntus\nrm x",
        "git status && (",
        "git status '",
        "trap 'rm x' EXIT; git status",
        ". ./x; git status",
        "source x && git status",
        "set -- x; git status",
    ],
)
def test_case_16(command: str) -> None:
    assert asks(shell(command), "shell(git status)")


def test_case_16_with_nothing_that_only_reads() -> None:
    """The same where the allowed command is not on the list of reading ones."""
    rule = "shell(make test)"
    assert not asks(shell("make test"), rule)
    assert not asks(shell("make 'test'  2>&1 | tail -5"), rule)
    assert not asks(shell("ls && make test;\n make test"), rule)
    for command in (
        "make test x",
        "make",
        "make test > f",
        "ls | make test",
        "cd src && make test",
        "make test | sh",
        "make test && make",
        "make te*t",
        "make {test,x}",
        "make\\\n test; make\\\ntest",
    ):
        assert asks(shell(command), rule), command
    assert asks(shell("make test", cwd="src"), rule)
    assert asks(shell("make test", cwd="/tmp"), rule)
    assert asks(shell("make test", something="new"), rule)
    assert not asks(shell("make test", cwd="."), rule)


WRAPPERS = [
    "{a} && {b}",
    "{a} || {b}",
    "{a}; {b}",
    "{a}\n{b}",
    "{a} | {b}",
    "{b} | {a}",
    "{b}; {a}",
    "{a} & {b}",
    "{a} $({b})",
    "{a} `{b}`",
    '{a} "$({b})"',
    '{a} "x`{b}`"',
    "{a} <({b})",
    "{a} >({b})",
    "{a} ${{x:-$({b})}}",
    "{a} $(( $({b}) ))",
    "{a} <<E\n$({b})\nE\n",
    "{a} <<< $({b})",
    "({a}; {b})",
    "{{ {a}; {b}; }}",
    "if {b}; then {a}; fi",
    "while {b}; do {a}; done",
    "case x in x) {b};; esac; {a}",
    "f() {{ {b}; }}; {a}; f",
    "x=$({b}) {a}",
    "x=(`{b}`); {a}",
    "{a} # \n{b}",
    "eval '{b}'; {a}",
    "{a} \\\n&& {b}",
    "! {b} && {a}",
    "[[ -n $({b}) ]] && {a}",
    "{a} 2>&1 && {b} 2>/dev/null",
    "coproc {b}; {a}",
    "{a} >$({b})",
]
ALLOWED = st.sampled_from(["make test", "git status", "pytest -q x", "ls", "cat a | head"])
OTHER = st.sampled_from(["rm x", "touch y", "curl z", "git push", "make other", "python w"])


@st.composite
def embedded(draw: st.DrawFn, depth: int = 3) -> str:
    """A second command in or beside an allowed one, in several layers."""
    inner = draw(OTHER)
    for _ in range(draw(st.integers(1, depth))):
        inner = draw(st.sampled_from(WRAPPERS)).format(a=draw(ALLOWED), b=inner)
    return inner


@settings(max_examples=250, deadline=None)
@given(embedded())
def test_a_second_command_is_never_allowed_with_the_first(command: str) -> None:
    assert asks(shell(command), "shell(make test)", "shell(git status)", "shell(pytest *)")


ALPHABET: list[str] = [
    *["aa", "bb", "cc", "aa", "bb"],
    *" \t\n;&|()<>'\"\\$`{}[]*?!#~=,-",
    *[" ", " ", "\r", "\x0b", "\x0c", "\u00a0", "\u2028", "é", "1", "2>&1", ">/dev/null", "\\\n"],
    *[" && ", " || ", "; ", " | ", "$(", "${", "<<", ">&", "&>", "$'", '$"', "in", "do", "if "],
]

_RUNNER = r"""
command_not_found_handle() { printf -v all '%s\037' "$@"; printf '%s\036' "$all" >&9; }
export -f command_not_found_handle
cd /tmp; mkdir empty; cd empty
while IFS= read -r -d '' text; do
  PATH=/nonexistent timeout=1 /bin/bash -c "$text" 9>&1 >/dev/null 2>/dev/null </dev/null
  printf '\035'
done
/bin/ls -A | /bin/sed 's/^/made: /'
"""


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 250), *(pytest.param(seed, 1500, marks=pytest.mark.slow) for seed in range(2, 12))],
)
def test_real_bash_runs_nothing_that_was_not_seen(
    sandbox: Sandbox,
    image: Callable[[Mapping[str, bytes]], Image],
    seed: int,
    count: int,
) -> None:
    """Random texts that the analysis calls plain are given to bash, which reports each command
    that it would run: all of them were seen, word for word, and no file appears."""
    draw = random.Random(seed)
    texts: dict[str, Script] = {}
    while len(texts) < count:
        text = "".join(draw.choice(ALPHABET) for _ in range(draw.randint(2, 9)))
        script = analyse(text)
        if script.objection is None and len(text) > 4:
            texts[text] = script

    async def go() -> str:
        workspace = await sandbox.create(image({"f": b""}))
        try:
            output: list[str] = []
            # In pieces: the output of one command is cut at a limit.
            pieces = [list(texts)[at : at + 250] for at in range(0, len(texts), 250)]
            for piece in pieces:
                sent = "".join(f"{text}\0" for text in piece).encode()
                done = await workspace.exec(
                    ["bash", "-c", _RUNNER.replace("mkdir empty", "rm -rf empty; mkdir empty")],
                    timeout=60,
                    stdin=sent,
                )
                assert done.exit_code == 0 and not done.truncated, done
                output.append(done.stdout)
            return "".join(output)
        finally:
            await workspace.close()

    output = asyncio.run(go())
    assert "made: " not in output
    blocks = output.split("\x1d")
    ran = 0
    for (text, script), block in zip(texts.items(), blocks, strict=False):
        for command in filter(None, block.split("\x1e")):
            ran += 1
            words = command.split("\x1f")[:-1]
            seen = [
                simple
                for simple in script.commands
                if simple.words[0].text == words[0]
                and (not simple.literal or [word.text for word in simple.words] == words)
            ]
            assert seen, (text, words, script)
    assert ran > count // 2


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_at_all(text: str) -> None:
    script = analyse(text)
    assert script.objection is None or script.objection
    reads_only(text)


def test_long_and_deep_texts_ask_quickly() -> None:
    for text in ("a " * 20_000, "(" * 5000, "$(" * 5000, "a && " * 4000 + "b", "{a," * 3000):
        assert asks(shell(text), "shell(a *)", "shell(b)") or "(" not in text


READING = [
    "ls -la src",
    "cat *.py",
    "git status --short",
    "git diff HEAD~1 -- src/x.py",
    "git log --oneline -5",
    "git show HEAD:README.md | head -20",
    "git branch -a",
    "git stash list",
    "rg -n 'def x' src",
    "grep -rn x . | wc -l",
    "find . -name '*.py' -type f",
    "sort -u x | uniq -c | sort -rn",
    "sed -n '10,20p' x",
    "cd src && ls",
    "pwd; ls",
    "which python && python --version",
    "head -c 10 x 2>/dev/null || true",
    "command -v node",
    "echo done",
    "tree -L 2",
]
DOING = [
    "find . -exec rm {} +",
    "find . -delete",
    "find . -fprint x",
    "find . -okdir x ';'",
    "git -c core.fsmonitor=x status",
    "git --git-dir=x status",
    "git diff --output=x",
    "git diff --outp x",
    "git log --ext-diff",
    "git grep -Oless x",
    "git grep --open-files x",
    "git branch new",
    "git branch -D x",
    "git tag v1",
    "git remote add x y",
    "git stash",
    "git stash drop",
    "git show --output=x",
    "git config user.name x",
    "git commit -m x",
    "rg --pre=sh x",
    "rg --pre sh x",
    "rg --hostname-bin=x y",
    "sort -o x y",
    "sort -uo x y",
    "sort --outp=x y",
    "sort --compress-program=sh y",
    "sort *",
    "sort {-o,x}",
    "uniq a b",
    "uniq -- a -b",
    "uniq src/f{a,b}",
    "uniq src/f*",
    "uniq f?",
    "date +{a,b}",
    "git show --textconv x",
    "git show --textc x",
    "git ls-files --recurse-submodules",
    "git diff --submodule=diff",
    "git log --remerge-diff",
    "git grep --textconv x",
    "sed -n '1w x' y",
    "sed -n '1p' -i y",
    "sed 1e y",
    "tree -o x",
    "tree -aox",
    "file -C -m x",
    "date -s tomorrow",
    "printf -v 'a[$(x)]' y",
    "test -v 'a[$(x)]'",
    "[ -v 'a[$(x)]' ]",
    "cd x && git status",
    'cd "$HOME" && ls',
    "python -V x",
    "env",
    "xargs ls",
    "tee x",
    "awk 1 x",
    "less x",
    "read x",
    "command rm x",
    "command -p rm",
    "hostname x",
    "xxd -r x y",
]


@pytest.mark.parametrize("command", READING)
def test_commands_that_only_read_need_no_question(command: str) -> None:
    for mode in Mode:
        assert not asks(shell(command), mode=mode)


@pytest.mark.parametrize("command", DOING)
def test_their_options_that_do_more_ask(command: str) -> None:
    assert asks(shell(command))


def test_reading_commands_change_nothing(
    sandbox: Sandbox, image: Callable[[Mapping[str, bytes]], Image]
) -> None:
    """All of the list, with options that are let through, in a read-only and in a writable view:
    the same output, and no file differs."""

    async def go() -> None:
        workspace = await sandbox.create(image({"x": b"b\na\n", "src/x.py": b"def x(): 0\n"}))
        try:
            for command in READING:
                await workspace.exec(["bash", "-c", command], timeout=30)
            diff = await workspace.diff()
            assert not diff.files and not diff.special
        finally:
            await workspace.close()

    asyncio.run(go())
