"""Which tool servers are defined, by whom, and what exactly would run.

A person's own settings are trusted as they are. What a repository brings is only a wish: its
definition, together with the content of each of the repository's files that it names, has to be
approved first. Of two servers with one name the person's own counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from etude.agent.permissions.approvals import (
    Brought,
    command_content,
    named_files,
    paths_inside,
)
from etude.agent.permissions.settings import (
    PROJECT_FILE,
    read_project_file,
    read_user_file,
    user_settings_path,
)
from etude.errors import EtudeError

APPROVAL_KIND = "tool server"
JSON_FILE = ".mcp.json"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_MAX_BYTES = 1 << 20
_MAX_NAME = 20


class Origin(StrEnum):
    """Who defined a server."""

    USER = "user"
    PROJECT = "project"
    EDITOR = "editor"


class ServerSettings(BaseModel):
    """How to reach one server: a `command` to run, or a `url`. `${NAME}` in values stands for a
    variable of the environment, `${NAME:-text}` for one that may be missing. `cwd` is where the
    command runs: for a person's own servers an empty folder of Etude's unless it is set, since
    many programs run what they find where they stand. `timeout` is how long the server may take
    to start, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str | None = Field(default=None, min_length=1)
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    cwd: str | None = None
    url: str | None = Field(default=None, pattern=r"^(https?://|\$\{)")
    headers: Mapping[str, str] = {}
    timeout: float = Field(default=30, gt=0, le=600)
    enabled: bool = True

    @model_validator(mode="after")
    def _one_way(self) -> ServerSettings:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command or url")
        if self.command is None and (self.args or self.env or self.cwd):
            raise ValueError("args, env and cwd belong to a command")
        if self.url is None and self.headers:
            raise ValueError("headers belong to a url")
        return self


@dataclass(frozen=True)
class ServerDefinition:
    """A server that somebody wants to be there."""

    name: str
    origin: Origin
    settings: ServerSettings

    @property
    def shown(self) -> str:
        """What would run or be spoken to, on one line."""
        settings = self.settings
        if settings.command is None:
            return str(settings.url)
        return " ".join([settings.command, *settings.args])

    def brought(self, project: Path) -> Brought:
        """What a person approves: the definition as it is written, and the digest of each of the
        project's files that its command line names. Libraries that those files load are not
        seen."""
        written = self.settings.model_dump(mode="json", exclude_defaults=True)
        files = named_files(self._words(), project)
        content = command_content({"name": self.name, **written}, files)
        return Brought(APPROVAL_KIND, project, content)

    def files(self, project: Path) -> list[str]:
        """The project's files that its command line names, relative to the project."""
        return paths_inside(self._words(), project)

    def _words(self) -> list[str]:
        words = [] if self.settings.command is None else [self.settings.command]
        words += self.settings.args
        if self.settings.cwd:
            words += [f"{self.settings.cwd}/{word}" for word in words]
        return words


@dataclass(frozen=True)
class Definitions:
    """All servers there are for a project, and a sentence for each that cannot be used."""

    servers: tuple[ServerDefinition, ...] = ()
    complaints: tuple[str, ...] = ()


def clean_name(name: str, limit: int) -> str:
    """A name as models take it: letters, digits, `_` and `-`. One that had to be shortened or
    has nothing left ends in a hash."""
    cleaned = re.sub(r"[^A-Za-z0-9-]+", "_", name.encode("utf-8", "replace").decode()).strip("_")
    if cleaned and len(cleaned) <= limit:
        return cleaned
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{cleaned[: limit - 9]}_{digest}".lstrip("_")


def clean_server_name(name: str) -> str:
    """Without `__`, which ends the server's part of a tool's name, so that no server can take
    another's place in a rule."""
    return re.sub(r"_+", "_", clean_name(name, _MAX_NAME))


def read_definitions(project: Path, given: Sequence[ServerDefinition] = ()) -> Definitions:
    """The servers of a person's settings, those that the editor gave, and those that the project
    wishes for. Raises EtudeError when the person's own file is wrong; what is wrong with the
    project's becomes a complaint."""
    found: dict[str, ServerDefinition] = {}
    complaints: list[str] = []
    path = user_settings_path()
    for server in (*_definitions(read_user_file(path).mcp, Origin.USER, path), *given):
        found.setdefault(clean_server_name(server.name), server)
    for path, read in ((project / PROJECT_FILE, _from_toml), (project / JSON_FILE, _from_json)):
        try:
            servers = _definitions(read(project), Origin.PROJECT, path)
        except EtudeError as error:
            complaints.append(str(error))
            continue
        for server in servers:
            key = clean_server_name(server.name)
            if key in found:
                complaints.append(
                    f"The tool server {server.name!r} of {path} is left out: there is one of that"
                    " name already."
                )
            found.setdefault(key, server)
    servers = [server for server in found.values() if server.settings.enabled]
    return Definitions(tuple(servers), tuple(complaints))


def _from_toml(project: Path) -> Mapping[str, Any]:
    return read_project_file(project).mcp


def _from_json(project: Path) -> Mapping[str, Any]:
    """What other programs too read: `{"mcpServers": {NAME: {…}}}`. No link is followed."""
    path = project / JSON_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise EtudeError(f"{path} cannot be read ({error.strerror}).") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise EtudeError(f"{path} is no file of at most 1 MiB.")
        data = os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
    try:
        table = json.loads(data)["mcpServers"]
        # Other programs write how a server is reached into the same file.
        return {
            name: {key: value for key, value in entry.items() if key != "type"}
            for name, entry in table.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EtudeError(
            f'{path} is not of the form {{"mcpServers": {{NAME: {{…}}}}}}; mend it.'
        ) from error


def _definitions(
    table: Mapping[str, Mapping[str, Any]], origin: Origin, path: Path
) -> list[ServerDefinition]:
    servers: list[ServerDefinition] = []
    for name, value in table.items():
        try:
            servers.append(ServerDefinition(name, origin, ServerSettings.model_validate(value)))
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise EtudeError(
                f"The tool server {name!r} of {path} is wrong{f' at {where}' if where else ''}:"
                f" {fault['msg']}."
            ) from error
    return servers


def expanded(text: str, variables: Mapping[str, str] | None = None) -> str:
    """`text` with its variables replaced. Raises EtudeError for one that is not set."""
    known = os.environ if variables is None else variables

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in known:
            return known[name]
        if default is None:
            raise EtudeError(f"the variable {name} is not set; set it, or write ${{{name}:-…}}")
        return default

    return _VARIABLE.sub(value, text)
