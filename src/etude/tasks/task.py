"""The task format: one verified piece of practice, as stored in JSON."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


class Rung(StrEnum):
    """How much was removed: the ladder of feature deletion."""

    EXPRESSION = "expression"
    STATEMENT = "statement"
    BODY = "body"


class Split(StrEnum):
    """What a task may be used for. Splits are by function: a held-out function is in no
    training text, no warm-up transcript and no practice task."""

    WARMUP = "warmup"
    PRACTICE = "practice"
    HELDOUT = "heldout"


class Edit(BaseModel):
    """The arguments of one `edit` call: `old` stands exactly once in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    old: str
    new: str


class Check(BaseModel):
    """A held-out check: call `function` (path::qualname) with arguments and compare with what the
    reference did. `args` and `kwargs` are Python literals as text; names of a fixed table of
    built-in callables (`len`, `operator.add`, …) may stand among them. `expected` is
    `('returns', value)` or `('raises', type name)`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str
    args: str
    kwargs: str
    expected: str


class Task(BaseModel):
    """One task.

    `repository` is the content key of the prepared repository it belongs to. `files` are the
    texts that differ from the pristine repository at the start, `reference` the same files
    solved, `answer` the edit that turns one into the other. `target_tests` fail at the start and
    pass with the reference; every other recorded test of the repository passes both times. Only
    `allowed_paths` travel from the agent's workspace to the grader.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    id: str
    repository: str
    kind: str
    rung: Rung
    split: Split
    path: str
    function: str
    prompt: str
    files: dict[str, str]
    reference: dict[str, str]
    answer: Edit
    target_tests: list[str]
    allowed_paths: list[str]
    checks: list[Check] = []
    max_turns: int = 1
    meta: dict[str, Any] = {}

    def restored_lines(self) -> str:
        """The whole lines of the reference on which the answer stands, without outer white
        space: what a person would point at when saying what is missing."""
        text = self.files[self.answer.path]
        start = text.index(self.answer.old)
        solved = self.reference[self.answer.path]
        end = start + len(self.answer.new)
        first = max(solved.rfind("\n", 0, start), solved.rfind("\r", 0, start)) + 1
        rest = re.split(r"[\r\n]", solved[end:], maxsplit=1)[0]
        return (solved[first:end] + rest).strip()
