"""Diagnostics after edits, by the real checkers in the real sandbox."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from etude.agent.tools.diagnostics import Diagnostics, RuffChecker
from etude.agent.tools.edit import Edit
from etude.agent.tools.programs import with_tools
from etude.agent.tools.tool import ToolContext, ToolResult, invoke, prepare
from etude.agent.tools.write import Write
from etude.models.renderer import ToolCall
from etude.sandbox.protocol import Image, Sandbox, Workspace

MakeImage = Callable[[Mapping[str, bytes]], Image]
FILES = {
    "a.py": b"import os\n\nx = 1\n",
    "pkg/__init__.py": b"x = 1\n",
    "d.json": b'{"a": 1}\n',
    "p.toml": b"a = 1\n",
    "c.yaml": b"a: 1\n",
    "n.txt": b"def (\n",
}


CHECKED = Diagnostics()


class Editor:
    def __init__(self, runner: asyncio.Runner, workspace: Workspace) -> None:
        self.runner, self.workspace = runner, workspace

    def __call__(self, name: str, diagnose: Any = CHECKED, **arguments: Any) -> list[str]:
        tool = {"edit": Edit(), "write": Write()}[name]

        async def workspace() -> Workspace:
            return self.workspace

        context = ToolContext(workspace, 60, diagnose=diagnose)
        prepared = prepare([tool], ToolCall(name, arguments, ""))
        assert not isinstance(prepared, ToolResult)
        result = self.runner.run(invoke(prepared, context))
        assert result.error_class is None
        assert result.changed
        return result.text.splitlines()


@pytest.fixture
def editor(sandbox: Sandbox, image: MakeImage) -> Iterator[Editor]:
    with asyncio.Runner() as runner:
        workspace = runner.run(sandbox.create(image(FILES)))
        yield Editor(runner, workspace)
        runner.run(workspace.close())


def test_only_new_findings_come_back(editor: Editor) -> None:
    # The unused import was there before.
    assert editor("edit", path="a.py", old="x = 1", new="x = 2") == ["edited a.py."]
    assert editor("edit", path="a.py", old="x = 2", new="x = y") == [
        "edited a.py.",
        "New problems in the file:",
        "a.py:3: F821 Undefined name `y`",
    ]
    # Moved, it is no new one.
    assert editor("edit", path="a.py", old="import os\n", new="\n\nimport os\n") == ["edited a.py."]
    # A second of the same kind is one.
    assert editor("edit", path="a.py", old="x = y", new="x = y\nz = y")[2:] == [
        "a.py:6: F821 Undefined name `y`"
    ]


def test_broken_syntax_is_told(editor: Editor) -> None:
    said = editor("write", path="new.py", content="def f(:\n    pass\n")
    assert said[1] == "New problems in the file:"
    assert said[2].startswith("new.py:1: invalid-syntax")
    assert editor("write", path="deep/new.py", content="type X[T] = list[T]\n") == [
        "made deep/new.py (20 bytes)."
    ]
    assert len(editor("write", path="odd\nname.py", content="x = y\n")) > 1


def test_an_exported_name_of_a_package_is_not_unused(editor: Editor) -> None:
    said = editor("write", path="pkg/__init__.py", content="from os import path as path\n")
    assert len(said) == 1


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        ("d.json", '{"a": 1,\n "b" 2}\n', "d.json:2: Expecting ':' delimiter"),
        ("p.toml", "a = 1\na = 2\n", "p.toml:2: Cannot overwrite a value"),
        ("c.yaml", "a: 1\n b: [\n", "c.yaml:2: mapping values are not allowed here"),
        ("new.yml", "a: &x [1, *x]\n", None),
        ("new.json", "[1, 2]\n", None),
        ("tsconfig.json", "{ // comment\n}\n", None),
        ("n.txt", "class (\n", None),
    ],
)
def test_data_files(editor: Editor, path: str, content: str, expected: str | None) -> None:
    said = editor("write", path=path, content=content)
    assert said[1:] == ([] if expected is None else ["New problems in the file:", expected])


def test_deep_nesting_is_not_an_end(editor: Editor) -> None:
    assert editor("write", path="d.json", content="[" * 100_000)[1:] == [
        "(not checked: the checker failed: too deep)"
    ]


def test_findings_are_capped(editor: Editor) -> None:
    said = editor("write", path="many.py", content="".join(f"u{n}\n" for n in range(500)))
    assert len(said) == 13
    assert said[-1].startswith("(and 490")


def test_the_repository_cannot_configure_the_checker(editor: Editor) -> None:
    editor("write", path="ruff.toml", content='[lint]\nignore = ["F"]\n')
    assert len(editor("write", path="b.py", content="x = y\n")) == 3


def test_a_slow_checker_does_not_hold_the_edit(editor: Editor) -> None:
    started = time.monotonic()
    said = editor(
        "write", path="b.py", content="x = y\n" * 100_000, diagnose=Diagnostics(seconds=0.01)
    )
    assert said[1:] == ["(not checked: ruff gave no answer in time)"]
    assert time.monotonic() - started < 5


def test_a_rollout_is_not_checked(editor: Editor) -> None:
    assert editor("write", path="b.py", content="x = y\n", diagnose=None) == [
        "made b.py (6 bytes)."
    ]


def test_a_sandbox_without_checkers_says_so(sandbox: Sandbox, tmp_path: Any) -> None:
    with asyncio.Runner() as runner:
        workspace = runner.run(sandbox.create(Image(tmp_path)))
        editor = Editor(runner, workspace)
        assert editor("write", path="b.py", content="x = y\n")[1:] == [
            "(not checked: this sandbox shows no ruff)"
        ]
        assert editor("write", path="b.yaml", content="x: y\n")[1:] == [
            "(not checked: the checker failed: no module yaml)"
        ]
        runner.run(workspace.close())
    assert RuffChecker().applies("x.pyi")
    assert with_tools(Image(tmp_path)).root == tmp_path
