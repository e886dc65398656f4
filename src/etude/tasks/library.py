"""Storing tasks: one folder, `tasks.jsonl` with a task a line and `repository.json` beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from etude.errors import EtudeError
from etude.tasks.repository import Repository
from etude.tasks.task import SCHEMA_VERSION, Task

TASKS = "tasks.jsonl"
RECORD = "repository.json"


@dataclass(frozen=True)
class Library:
    """Tasks of one repository and the record of its preparation."""

    repository: Repository
    tasks: tuple[Task, ...]


def save(library: Library, folder: Path) -> None:
    """Write a library, each file whole or not at all; `tasks.jsonl` comes last and marks it done.

    Raises EtudeError when the folder cannot be written.
    """
    lines = "".join(task.model_dump_json() + "\n" for task in library.tasks)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / RECORD, library.repository.model_dump_json(indent=1) + "\n")
        _replace(folder / TASKS, lines)
    except OSError as error:
        raise EtudeError(
            f"{folder}: the tasks could not be stored ({error.strerror or error})."
        ) from error


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(path)


def load(folder: Path) -> Library:
    """Read a library. Raises EtudeError when there is none or a line is not a task of this
    version; the message names the file and the line."""
    repository = _load_repository(folder / RECORD)
    path = folder / TASKS
    tasks: list[Task] = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line:
            tasks.append(_load_task(f"{path}, line {number}", line))
    _check(path, repository, tasks)
    return Library(repository, tuple(tasks))


def _load_repository(path: Path) -> Repository:
    try:
        return Repository.model_validate_json(_read(path))
    except ValidationError as error:
        raise EtudeError(
            f"{path}: is not the record of a prepared repository ({_first(error)}); "
            "make the tasks again."
        ) from None


def _load_task(where: str, line: str) -> Task:
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise EtudeError(f"{where}: is damaged ({error.msg}); make the tasks again.") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise EtudeError(
            f"{where}: has schema version {version}, this program reads {SCHEMA_VERSION}; make "
            "the tasks again."
        )
    try:
        return Task.model_validate_json(line)
    except ValidationError as error:
        raise EtudeError(f"{where}: is no task ({_first(error)}); make the tasks again.") from None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise EtudeError(
            f"{path}: no such file; `etude tasks make` writes a folder of tasks."
        ) from None
    except UnicodeDecodeError:
        raise EtudeError(f"{path}: is damaged (no UTF-8); make the tasks again.") from None
    except OSError as error:
        raise EtudeError(f"{path}: could not be read ({error.strerror or error}).") from error


def _check(path: Path, repository: Repository, tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise EtudeError(f"{path}: the task {task.id} stands there twice; make them again.")
        seen.add(task.id)
        if task.repository != repository.key:
            raise EtudeError(
                f"{path}: the task {task.id} belongs to another repository than {RECORD} names; "
                "make the tasks again."
            )


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    place = ".".join(str(part) for part in detail["loc"])
    return f"{place}: {detail['msg']}" if place else str(detail["msg"])
