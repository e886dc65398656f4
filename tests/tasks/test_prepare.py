"""Preparation: what a repository's tests need, what passes every time, and each refusal."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.tasks.prepare import is_test_file, prepare, python_files, remove_copies, stable_tests
from etude.tasks.repository import Repository
from etude.tasks.requirements import declared_requirements, extra_names
from etude.tasks.settings import PrepareSettings

SOURCE = "def double(x):\n    return x * 2\n\n\nclass Thing:\n    pass\n"


def repository(root: Path, tests: str) -> Repository:
    """A repository without an environment of its own: the one that runs this test serves."""
    for name, text in {"pkg/__init__.py": SOURCE, "tests/test_pkg.py": tests}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Repository(
        key="k", name="pkg", source=str(root), root=root, env=Path(sys.prefix),
        source_files=("pkg/__init__.py",), test_files=("tests/test_pkg.py",), tests=(),
        suite_seconds=0.0,
    )  # fmt: skip


def stable(root: Path, tests: str, **settings: float) -> tuple[tuple[str, ...], list[str]]:
    said: list[str] = []
    found, seconds = asyncio.run(
        stable_tests(
            repository(root, tests), BubblewrapSandbox(), PrepareSettings(**settings), said.append
        )
    )
    assert seconds > 0
    return found, said


def test_only_tests_that_pass_every_time_are_kept(tmp_path: Path) -> None:
    tests = """\
import os, sys
import pytest
from pkg import double

STATE = []

def test_good():
    assert double(2) == 4

@pytest.mark.parametrize("x", [1, 2])
def test_each(x):
    assert double(x) == x + x

def test_fails():
    assert double(2) == 5

def test_leaves_state():
    STATE.append(1)

def test_a_needs_the_state():
    assert STATE

def test_needs_the_hash_seed():
    assert os.environ["PYTHONHASHSEED"] == "0"

@pytest.mark.skip
def test_skipped():
    pass
"""
    (tmp_path / "tests").mkdir()
    kept: set[str] = set()
    found, said = stable(tmp_path, tests)
    kept = {test.split("::")[1] for test in found}
    assert {"test_good", "test_each[1]", "test_each[2]", "test_leaves_state"} <= kept
    assert kept.isdisjoint({"test_fails", "test_needs_the_hash_seed", "test_skipped"})
    assert any("do not pass every time" in line for line in said)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("x = 1\n", "has no tests that pytest finds"),
        ("def test_no():\n    assert 1 == 2, 'broken before'\n", "none of its tests passes before"),
        ("import no_such_module_xyz\n\ndef test_a(): pass\n", "need the module no_such_module_xyz"),
        ("def test_a(:\n", "tests/test_pkg.py, line 1: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "none of its tests passes before"),
    ],
)
def test_tests_that_cannot_grade_are_told(tests: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EtudeError) as error:
        stable(tmp_path, tests)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_names_that_are_no_utf8_do_not_stop_a_preparation(tmp_path: Path) -> None:
    """Their tests cannot be named in a record, so they are left out; the others count."""
    (tmp_path / "tests").mkdir()
    odd = tmp_path / "tests" / os.fsdecode(b"test_\xe9.py")
    odd.write_text("def test_odd(): pass\n")
    found, _ = stable(tmp_path, "def test_a(): pass\n")
    assert found == ("tests/test_pkg.py::test_a",)
    assert [p for p in python_files(tmp_path) if "test" in p] == ["tests/test_pkg.py"]


def test_a_syntax_error_of_a_source_is_told_with_its_place(tmp_path: Path) -> None:
    broken = repository(tmp_path, "from pkg import double\n\ndef test_a(): pass\n")
    (tmp_path / "pkg/__init__.py").write_text("x = 1\ndef double(x:\n    pass\n")
    run = stable_tests(broken, BubblewrapSandbox(), PrepareSettings(), lambda line: None)
    with pytest.raises(EtudeError, match=r"pkg/__init__\.py, line 2: SyntaxError: ") as error:
        asyncio.run(run)
    assert "1 test file: tests/test_pkg.py" in str(error.value)


def test_a_broken_conftest_is_not_called_a_lack_of_tests(tmp_path: Path) -> None:
    broken = repository(tmp_path, "def test_a(): pass\n")
    (tmp_path / "conftest.py").write_text("def x(:\n")
    run = stable_tests(broken, BubblewrapSandbox(), PrepareSettings(), lambda line: None)
    with pytest.raises(EtudeError, match=r"\(conftest\.py, line 1: SyntaxError: ") as error:
        asyncio.run(run)
    assert "no tests" not in str(error.value)


def test_files_that_fail_collection_are_said(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in "bcde":
        (tmp_path / f"tests/test_{name}.py").write_text("import nothing_of_that_name\n")
    found, said = stable(tmp_path, "def test_a(): pass\n")
    assert found == ("tests/test_pkg.py::test_a",)
    (line,) = [line for line in said if "collect" in line]
    assert line == (
        "pytest could not collect 4 test files: tests/test_b.py, tests/test_c.py,"
        " tests/test_d.py, … (ModuleNotFoundError: No module named 'nothing_of_that_name')"
    )


def test_tests_that_never_end_are_told(tmp_path: Path) -> None:
    tests = "import time\n\ndef test_a():\n    time.sleep(600)\n"
    with pytest.raises(EtudeError, match="did not end within 2 s"):
        stable(tmp_path, tests, suite_timeout=2.0)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    repository(tmp_path / "proj", "def test_a(): pass\n")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EtudeError, match="could not be prepared in") as error:
        asyncio.run(
            prepare(str(tmp_path / "proj"), cache=tmp_path / "cache", sandbox=BubblewrapSandbox())
        )
    assert "\n" not in str(error.value)


def test_links_that_are_left_out_are_said_in_one_line(tmp_path: Path) -> None:
    """The installation is given no time, so that this ends soon after the source was fetched."""
    repository(tmp_path / "proj", "def test_a(): pass\n")
    for name in ("one", "two", "three", "four"):
        (tmp_path / "proj" / name).symlink_to("/etc")
    said: list[str] = []
    with pytest.raises(EtudeError, match="installation did not end"):
        asyncio.run(
            prepare(
                str(tmp_path / "proj"),
                cache=tmp_path / "cache",
                sandbox=BubblewrapSandbox(),
                settings=PrepareSettings(install_timeout=0.01),
                progress=said.append,
            )
        )
    assert said[1] == "left out 4 symbolic links: four, one, three, …"


def test_requirements_of_tests_are_found_wherever_they_are_declared(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[dependency-groups]\ntest = ["alpha>=1", {include-group = "more"}]\n'
        'more = ["beta", {include-group = "test"}]\ndocs = ["sphinx"]\ndev = ["heavy"]\n'
        '[tool.poetry.group.test.dependencies]\ngamma = "^1"\n'
    )
    (tmp_path / "requirements-test.txt").write_text(
        "-r more.txt\ndelta==2 # why\n--index-url https://x\n-e .\n./local\n\n"
    )
    (tmp_path / "more.txt").write_text("epsilon; python_version > '3'\n")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "tests.txt").write_text("zeta\n")
    (tmp_path / "requirements.txt").write_text("runtime-only\n")
    (tmp_path / "tox.ini").write_text(
        "[testenv]\ndeps =\n    eta\n    py27: theta\n    {[base]deps}\n"
        "    -r{toxinidir}/more.txt\n"
    )
    assert declared_requirements(tmp_path) == [
        "alpha>=1", "beta", "gamma", "epsilon; python_version > '3'", "delta==2", "zeta", "eta",
        "theta",
    ]  # fmt: skip


def test_requirements_survive_broken_files(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[[[")
    (tmp_path / "tox.ini").write_text("no section\n")
    (tmp_path / "test-requirements.txt").write_bytes(b"one\n\xff\xfe\n")
    assert declared_requirements(tmp_path) == ["one"]


def test_extras_about_tests_come_before_those_about_development() -> None:
    head = "Metadata-Version: 2.1\nName: p\n"
    assert extra_names(
        head + "Provides-Extra: docs\nProvides-Extra: Tests\nProvides-Extra: dev\n"
    ) == ["Tests"]
    assert extra_names(head + "Provides-Extra: dev\nProvides-Extra: docs\n") == ["dev"]
    assert extra_names(head) == []


def test_copies_of_the_source_are_removed_from_the_environment(tmp_path: Path) -> None:
    root, env = tmp_path / "root", tmp_path / "env"
    site = env / "lib" / "python3.11" / "site-packages"
    (site / "vendor").mkdir(parents=True)
    root.mkdir()
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(20))
    (root / "m.py").write_text(text)
    (root / "tiny.py").write_text("x = 1\n")
    (site / "vendor" / "copy.py").write_text(text.replace("\n", "\r\n").replace("    ", "\t"))
    (site / "other.py").write_text(text + "y = 2\n")
    (site / "tiny.py").write_text("x = 1\n")
    assert remove_copies(root, env, ["m.py", "tiny.py"]) == [
        "lib/python3.11/site-packages/vendor/copy.py"
    ]
    assert sorted(p.name for p in site.rglob("*.py")) == ["other.py", "tiny.py"]


def test_files_of_tests_are_told_from_sources() -> None:
    assert all(
        is_test_file(p)
        for p in ("tests/a.py", "pkg/tests/helper.py", "test_a.py", "pkg/a_test.py", "conftest.py")
    )
    assert not any(is_test_file(p) for p in ("pkg/a.py", "pkg/testing_tools.py", "contest.py"))


@pytest.mark.slow
def test_a_folder_is_installed_and_its_tests_run(tmp_path: Path) -> None:
    """The whole of preparation on a folder with a test requirement, asked for by two at a time;
    one of them does it, and the third time is free."""
    root = tmp_path / "proj"
    repository(root, "import iniconfig, pkg\n\ndef test_it():\n    assert pkg.double(3) == 6\n")
    (root / "pyproject.toml").write_text(
        '[project]\nname = "pkg"\nversion = "1"\n[project.optional-dependencies]\n'
        'tests = ["iniconfig"]\n[tool.setuptools]\npackages = ["pkg"]\n'
    )
    sandbox = BubblewrapSandbox()

    async def twice() -> tuple[Repository, Repository]:
        cache = tmp_path / "cache"
        installing: list[str] = []
        first, other = await asyncio.gather(
            *(
                prepare(str(root), cache=cache, sandbox=sandbox, progress=installing.append)
                for _ in range(2)
            )
        )
        assert first == other
        assert sum("installing" in line for line in installing) == 1
        said: list[str] = []
        second = await prepare(str(root), cache=cache, sandbox=sandbox, progress=said.append)
        assert said == [f"fetching {root}"]
        return first, second

    first, second = asyncio.run(twice())
    assert first == second
    assert first.tests == ("tests/test_pkg.py::test_it",)
    assert first.source_files == ("pkg/__init__.py",)
    left = {p.relative_to(first.root).as_posix() for p in first.root.rglob("*") if p.is_file()}
    assert left == {"pyproject.toml", "pkg/__init__.py", "tests/test_pkg.py"}
    assert not list(first.env.glob("lib/*/site-packages/pkg"))
    record = json.loads((first.root.parent / "repository.json").read_text())
    assert record["key"] == first.key


@pytest.mark.slow
def test_a_project_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    root = tmp_path / "proj"
    repository(root, "def test_a(): pass\n")
    (root / "setup.py").write_text("raise SystemExit('broken on purpose')\n")
    with pytest.raises(EtudeError, match="could not be installed in a fresh environment"):
        asyncio.run(prepare(str(root), cache=tmp_path / "c", sandbox=BubblewrapSandbox()))
