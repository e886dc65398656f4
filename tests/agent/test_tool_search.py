"""grep and glob by the real ripgrep in the real sandbox."""

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.tools.glob import Glob
from etude.agent.tools.globs import regex_of_glob
from etude.agent.tools.grep import Grep
from etude.agent.tools.programs import RIPGREP, tool_mounts, with_tools
from etude.agent.tools.tool import AnyTool, ToolContext, ToolResult, invoke, prepare
from etude.models.renderer import ToolCall
from etude.sandbox.protocol import Image, Rights, Sandbox, Workspace

FILES = {
    "src/a.py": b"import os\nVALUE = 1\n# value\n",
    "src/deep/b.py": b"one\ntwo\nthree VALUE\nfour\nfive\n",
    "src/b.txt": b"VALUE in text\n",
    ".gitignore": b"build/\n*.log\ngen.py\n",
    "build/c.py": b"VALUE ignored\n",
    "gen.py": b"VALUE generated\n",
    "x.log": b"VALUE logged\n",
    ".hidden/d.py": b"VALUE hidden\n",
    ".git/config": b"VALUE of git\n",
    "with space/e.py": b"VALUE spaced\n",
    "-dash.py": b"VALUE dashed\n",
    "many.py": b"again\n" * 60,
    "long.py": b"start " + b"x" * 5000 + b"\n",
    "bin.dat": b"VALUE \0 binary\n",
}


class Tools:
    """Calls tools on one workspace."""

    def __init__(self, runner: asyncio.Runner, workspace: Workspace) -> None:
        self.runner, self.workspace = runner, workspace

    def __call__(self, tool: AnyTool, **arguments: Any) -> ToolResult:
        async def workspace() -> Workspace:
            return self.workspace

        prepared = prepare([tool], ToolCall(tool.name, arguments, ""))
        if isinstance(prepared, ToolResult):
            return prepared
        return self.runner.run(invoke(prepared, ToolContext(workspace, 60)))


@pytest.fixture(scope="module")
def tools(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    root = tmp_path_factory.mktemp("image")
    for age, (name, data) in enumerate(FILES.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (1_000_000_000 - age, 1_000_000_000 - age))
    with asyncio.Runner() as runner:
        workspace = runner.run(sandbox.create(with_tools(Image(root))))
        yield Tools(runner, workspace)
        runner.run(workspace.close())


def lines(result: ToolResult) -> list[str]:
    assert result.error_class is None, result.text
    return result.text.splitlines()


def test_the_mounted_program_is_executable() -> None:
    place = next(place for place, guest in tool_mounts().items() if guest == RIPGREP)
    assert os.access(place, os.X_OK)


def test_grep_leaves_out_what_gitignore_names_and_git_itself(tools: Tools) -> None:
    assert lines(tools(Grep(), pattern="VALUE")) == [
        "-dash.py:1:VALUE dashed",
        ".hidden/d.py:1:VALUE hidden",
        "src/a.py:2:VALUE = 1",
        "src/b.txt:1:VALUE in text",
        "src/deep/b.py:3:three VALUE",
        "with space/e.py:1:VALUE spaced",
    ]


def test_grep_options(tools: Tools) -> None:
    assert lines(tools(Grep(), pattern="value", path="src/a.py")) == ["src/a.py:3:# value"]
    assert lines(tools(Grep(), pattern="value", path="src/a.py", ignore_case=True)) == [
        "src/a.py:2:VALUE = 1",
        "src/a.py:3:# value",
    ]
    assert lines(tools(Grep(), pattern="VALUE", path="/workspace/src", files_only=True)) == [
        "src/a.py",
        "src/b.txt",
        "src/deep/b.py",
    ]
    assert lines(tools(Grep(), pattern="VALUE", path="src/deep", context=1)) == [
        "src/deep/b.py-2-two",
        "src/deep/b.py:3:three VALUE",
        "src/deep/b.py-4-four",
    ]
    # What Rust's engine cannot, PCRE2 does.
    assert lines(tools(Grep(), pattern=r"(?<=three )VALUE")) == ["src/deep/b.py:3:three VALUE"]


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("*.py", ".", ["-dash.py", ".hidden/d.py", "src/a.py", "src/deep/b.py", "with space/e.py"]),
        ("src/*.py", ".", ["src/a.py"]),
        ("*.{txt,log}", ".", ["src/b.txt"]),
        ("deep/*", "src", ["src/deep/b.py"]),
        ("src/**/*.py", "src", ["src/a.py", "src/deep/b.py"]),
        ("gen.py", ".", []),
    ],
)
def test_grep_glob_does_not_bring_ignored_files_back(
    tools: Tools, glob: str, path: str, expected: list[str]
) -> None:
    result = tools(Grep(), pattern="VALUE", path=path, glob=glob, files_only=True)
    assert lines(result) == (expected or ["no match for 'VALUE'."])


def test_grep_says_when_it_cut(tools: Tools) -> None:
    found = lines(tools(Grep(), pattern="again"))
    assert found[:50] == [f"many.py:{n}:again" for n in range(1, 51)]
    assert found[50:] == ["(there are more; narrow the search)"]
    (long,) = lines(tools(Grep(), pattern="start"))
    assert len(long) < 400


def test_grep_failures_have_a_class(tools: Tools) -> None:
    assert tools(Grep(), pattern="nowhere").text == "no match for 'nowhere'."
    assert tools(Grep(), pattern="nowhere", glob="*.py").error_class is None
    for options in ({}, {"glob": "*.py"}):
        assert tools(Grep(), pattern="x", path="none", **options).error_class == "not_found"
        broken = tools(Grep(), pattern="(", **options)
        assert broken.error_class == "invalid_arguments"
        assert "(" in broken.text
    assert tools(Grep(), pattern="x", glob="[").error_class == "invalid_arguments"
    assert tools(Grep(), pattern="").error_class == "invalid_arguments"


def test_a_sandbox_without_ripgrep_says_so(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x")
    with asyncio.Runner() as runner:
        workspace = runner.run(sandbox.create(Image(tmp_path)))
        try:
            for tool, arguments in (
                (Grep(), {"pattern": "x"}),
                (Grep(), {"pattern": "x", "glob": "*"}),
                (Glob(), {"pattern": "*"}),
            ):
                result = Tools(runner, workspace)(tool, **arguments)
                assert result.error_class == "unavailable"
                assert "ripgrep" in result.text
        finally:
            runner.run(workspace.close())


def test_glob_is_newest_first_and_minds_gitignore(tools: Tools) -> None:
    assert lines(tools(Glob(), pattern="*.py")) == [
        "src/a.py",
        "src/deep/b.py",
        ".hidden/d.py",
        "with space/e.py",
        "-dash.py",
        "many.py",
        "long.py",
    ]
    assert lines(tools(Glob(), pattern="**/b.*", path="src")) == ["src/deep/b.py", "src/b.txt"]
    assert lines(tools(Glob(), pattern="*.rs")) == ["no file matches '*.rs'."]
    assert tools(Glob(), pattern="*", path="none").error_class == "not_found"
    assert tools(Glob(), pattern="{a").error_class == "invalid_arguments"


NAME = st.text(alphabet="ab.-", min_size=1, max_size=3).filter(lambda name: name.strip("."))
PATHS = st.lists(st.lists(NAME, min_size=1, max_size=3).map("/".join), min_size=1, max_size=8)
# ripgrep's `[!a]` also means a slash; here it does not, so the slash is said.
PIECE = st.sampled_from(["a", "b", ".", "-", "*", "?", "[ab]", "[!a/]", "{a,b}", "{a*,.b}"])
PART = st.one_of(st.just("**"), st.lists(PIECE, min_size=1, max_size=3).map("".join))
PATTERN = (
    st.lists(PART, min_size=1, max_size=3)
    .map("/".join)
    .filter(
        # ripgrep knows no `./`; here it may stand before any pattern.
        lambda pattern: not pattern.startswith("./")
    )
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PATHS, PATTERN)
def test_globs_agree_with_ripgreps_own(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str], pattern: str
) -> None:
    root = tmp_path_factory.mktemp("tree")
    for path in paths:
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue
    program = next(place for place, guest in tool_mounts().items() if guest == RIPGREP)

    def files(*options: str) -> set[str]:
        argv = [str(program), "--files", "--hidden", "--no-ignore", "--null", *options]
        done = subprocess.run(argv, cwd=root, capture_output=True, check=False, text=True)
        return set(done.stdout.split("\0")) - {""}

    regex = re.compile(regex_of_glob(pattern))
    assert {name for name in files() if regex.search(name)} == files(f"--glob={pattern}")


def test_files_that_a_view_hides_stay_unread(tools: Tools) -> None:
    hidden = Tools(tools.runner, tools.workspace.view(Rights(hidden=("src/a.py", "src/deep"))))
    found = hidden(Grep(), pattern="VALUE", path="src")
    assert "src/b.txt" in found.text
    assert "a.py:" not in found.text
    assert "three" not in found.text
    assert "VALUE = 1" not in hidden(Grep(), pattern="VALUE", path="src/a.py").text
    assert "three" not in hidden(Grep(), pattern="VALUE", path="src/deep/b.py").text
    assert "deep" not in hidden(Glob(), pattern="src/**").text


def test_the_tree_is_what_the_tests_think(tools: Tools) -> None:
    assert Path(next(iter(tool_mounts()))).is_absolute()
    assert set(lines(tools(Glob(), pattern="*"))) == set(FILES) - {
        "build/c.py",
        "gen.py",
        "x.log",
        ".git/config",
    }
