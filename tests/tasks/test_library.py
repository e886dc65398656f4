"""Stored tasks come back as they were; damage is told by file and line."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.tasks.library import RECORD, TASKS, Library, load, save
from etude.tasks.repository import Repository
from etude.tasks.task import Check, Edit, Rung, Split, Task

REPOSITORY = Repository(
    key="k", name="n", source="s", root=Path("/r"), env=Path("/e"), source_files=("m.py",),
    test_files=("t.py",), tests=("t.py::a",), suite_seconds=1.5,
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def task(name: str = "t1", text: str = "x") -> Task:
    return Task(
        id=name, repository="k", kind="feature-deletion", rung=Rung.EXPRESSION,
        split=Split.HELDOUT, path="m.py", function="m.py::f", prompt=text, files={"m.py": text},
        reference={"m.py": text}, answer=Edit(path="m.py", old="MISSING", new=text),
        target_tests=["t.py::a"], allowed_paths=["m.py"],
        checks=[Check(function="m:f", args="()", kwargs="{}", expected=text)], meta={"line": 3},
    )  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=st.lists(TEXT, max_size=4))
def test_round_trip(texts: list[str], tmp_path: Path) -> None:
    library = Library(REPOSITORY, tuple(task(f"t{n}", text) for n, text in enumerate(texts)))
    save(library, tmp_path)
    assert load(tmp_path) == library
    assert {p.name for p in tmp_path.iterdir()} == {TASKS, RECORD}


def test_line_separators_inside_texts_are_no_lines(tmp_path: Path) -> None:
    library = Library(REPOSITORY, (task(text="a\r\nb\u2028c\x85d\x0ce"),))
    save(library, tmp_path)
    assert load(tmp_path) == library


def damage(folder: Path, old: str, new: str) -> None:
    path = folder / TASKS
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema_version":1', '"schema_version":99', "line 1: has schema version 99"),
        ('{"schema_version"', '"schema_version"', "line 1: is damaged"),
        ('"rung":"expression"', '"rung":"galaxy"', "line 1: is no task (rung"),
        ('"id":"t1"', '"id":"t1","extra":1', "line 1: is no task (extra"),
        ('"repository":"k"', '"repository":"other"', "belongs to another repository"),
    ],
)
def test_damage_is_told(old: str, new: str, message: str, tmp_path: Path) -> None:
    save(Library(REPOSITORY, (task(),)), tmp_path)
    damage(tmp_path, old, new)
    with pytest.raises(EtudeError) as error:
        load(tmp_path)
    assert message in str(error.value) and str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_torn_file_is_told_and_not_shortened(tmp_path: Path) -> None:
    save(Library(REPOSITORY, (task("t1"), task("t2"))), tmp_path)
    path = tmp_path / TASKS
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(EtudeError, match="line 2: is damaged"):
        load(tmp_path)


def test_the_same_task_twice_is_told(tmp_path: Path) -> None:
    save(Library(REPOSITORY, (task(), task())), tmp_path)
    with pytest.raises(EtudeError, match="stands there twice"):
        load(tmp_path)


def test_no_library_is_told(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="no such file"):
        load(tmp_path / "nothing")
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(EtudeError, match="is not the record of a prepared repository"):
        load(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match="could not be stored"):
        save(Library(REPOSITORY, (task(),)), tmp_path / "file" / "x")
