"""Settings files: a person's own (`settings.toml` in the configuration folder) and a project's
(`.etude/settings.toml`). No torch.

The person's file may allow, ask and deny. The project's may only ask and deny by itself; what it
allows, and the programs that it brings, count once a person approved exactly them.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from etude.agent.permissions.files import change
from etude.agent.permissions.modes import Mode
from etude.errors import EtudeError
from etude.machine import config_folder

PROJECT_FILE = ".etude/settings.toml"
_LARGEST = 1 << 20


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HookEvent(StrEnum):
    """When a hook runs."""

    BEFORE_TOOL = "before_tool"
    AFTER_TOOL = "after_tool"
    SESSION_START = "session_start"
    STOP = "stop"


class Hook(_Table):
    """A program of the person's. It gets the event as JSON on standard input."""

    event: HookEvent
    command: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(min_length=1)
    """Program and arguments; no shell reads them."""
    tools: tuple[str, ...] = ()
    """Only for these tools (`*` stands for anything); empty: for all. Of tool events only."""
    timeout: float = Field(default=10, gt=0, le=600)
    """Seconds after which it is killed."""


class ProjectPermissions(_Table):
    """Rules of a project's own file."""

    allow: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class UserPermissions(ProjectPermissions):
    """Rules of a person's own file, and the mode that a session starts in."""

    mode: Mode = Mode.ASK


class Remembered(_Table):
    """A rule that a person chose to keep when asked; of one project."""

    allow: str | None = None
    deny: str | None = None
    project: str


class ProjectFile(_Table):
    """`.etude/settings.toml`."""

    permissions: ProjectPermissions = ProjectPermissions()
    hooks: tuple[Hook, ...] = ()
    mcp: Mapping[str, Mapping[str, JsonValue]] = {}
    """Servers by name; `agent.mcp` knows what stands in one."""


class UserFile(_Table):
    """`settings.toml` of a person."""

    permissions: UserPermissions = UserPermissions()
    remembered: tuple[Remembered, ...] = ()
    hooks: tuple[Hook, ...] = ()
    mcp: Mapping[str, Mapping[str, JsonValue]] = {}


def user_settings_path() -> Path:
    """Where a person's own file is, or would be."""
    return config_folder() / "settings.toml"


def read_user_file(path: Path | None = None) -> UserFile:
    """A person's own settings; the defaults when there is no file. Raises EtudeError."""
    path = path or user_settings_path()
    return _validated(UserFile, path, _read(path, follow=True))


def read_project_file(project: Path) -> ProjectFile:
    """A project's settings; the defaults when there is no file. Raises EtudeError: rules that
    cannot be read must not be taken for no rules."""
    path = project / PROJECT_FILE
    if path.parent.is_symlink():
        raise EtudeError(f"{path.parent} is a link; it has to be a folder of the project.")
    return _validated(ProjectFile, path, _read(path, follow=False))


def _read(path: Path, *, follow: bool) -> Mapping[str, Any]:
    """A TOML file as a table. Of a repository's file no link is followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise EtudeError(f"The settings {path} cannot be read ({error.strerror}).") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
        os.close(descriptor)
        raise EtudeError(f"The settings {path} are no file of at most 1 MiB.")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_LARGEST)
    return _parsed(path, data.decode("utf-8", "replace"))


def _parsed(path: Path, text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
        raise EtudeError(f"The settings {path} are no valid TOML: {reason}.") from error


T = TypeVar("T", bound=BaseModel)


def _validated(model: type[T], path: Path, table: Mapping[str, Any]) -> T:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EtudeError(f"The settings {path} are wrong at `{where}`: {first['msg']}.") from error


def toml_string(text: str) -> str:
    """Text as a TOML basic string."""

    def escaped(match: re.Match[str]) -> str:
        char = match.group()
        return f"\\{char}" if char in '"\\' else f"\\u{ord(char):04x}"

    return '"' + re.sub(r'["\\\x00-\x1f\x7f]', escaped, text) + '"'


def remember(
    path: Path, project: Path, *, allow: str | None = None, deny: str | None = None
) -> None:
    """Append a rule to a person's own file, which keeps its comments and its order. Raises
    EtudeError when it cannot be written, or would no longer be valid."""
    kind, rule = ("deny", deny) if deny is not None else ("allow", allow or "")
    entry = (
        f"\n[[remembered]]\n{kind} = {toml_string(rule)}\nproject = {toml_string(str(project))}\n"
    )

    def appended(text: str) -> str:
        text += ("" if text.endswith("\n") or not text else "\n") + entry
        _validated(UserFile, path, _parsed(path, text))
        return text

    change(path, appended)
