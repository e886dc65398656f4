"""The task format is a contract: a task that the first release stored loads for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from etude.tasks.task import Check, Edit, Rung, Split, Task

GOLDEN = Path(__file__).parents[1] / "golden" / "task-1.json"

TASK = Task(
    id="smallib-expression-0001",
    repository="0123456789abcdef",
    kind="feature-deletion",
    rung=Rung.EXPRESSION,
    split=Split.HELDOUT,
    path="smallib/core.py",
    function="smallib/core.py::double",
    prompt="smallib/core.py: an expression is missing, marked MISSING. Put it back.",
    files={"smallib/core.py": "def double(x):\r\n    return MISSING\r\n"},
    reference={"smallib/core.py": "def double(x):\r\n    return x * 2\r\n"},
    answer=Edit(path="smallib/core.py", old="MISSING", new="x * 2"),
    target_tests=["tests/test_core.py::test_double[é]"],
    allowed_paths=["smallib/core.py"],
    checks=[Check(function="smallib/core.py::double", args="(3,)", kwargs="{}", expected="6")],
)


def test_golden_task_is_still_read() -> None:
    assert Task.model_validate_json(GOLDEN.read_text()) == TASK
    assert TASK.model_dump_json(indent=1) + "\n" == GOLDEN.read_text()


def test_an_unknown_field_is_refused() -> None:
    data = TASK.model_dump() | {"hint": "x"}
    with pytest.raises(ValidationError):
        Task.model_validate(data)


def test_the_answer_turns_the_start_into_the_reference() -> None:
    (path,) = TASK.files
    assert TASK.files[path].count(TASK.answer.old) == 1
    text = TASK.files[path].replace(TASK.answer.old, TASK.answer.new)
    assert text == TASK.reference[path]


def test_restored_lines_are_those_of_the_reference() -> None:
    assert TASK.restored_lines() == "return x * 2"
    many = TASK.model_copy(
        update={
            "files": {"a.py": "def f(x):\n    y = 1\n    MISSING\n    return y\n"},
            "reference": {"a.py": "def f(x):\n    y = 1\n    if x:\n        y = 2\n    return y\n"},
            "answer": Edit(path="a.py", old="MISSING", new="if x:\n        y = 2"),
        }
    )
    assert many.restored_lines() == "if x:\n        y = 2"
