"""Putting together what a person's file and a project's file say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from etude.agent.permissions.approvals import Approvals, Brought
from etude.agent.permissions.hooks import Hooks
from etude.agent.permissions.modes import Mode
from etude.agent.permissions.rules import Kind, Placed, parse_rule
from etude.agent.permissions.settings import (
    PROJECT_FILE,
    ProjectPermissions,
    read_project_file,
    read_user_file,
    user_settings_path,
)

ALLOW_KIND = "allow rules"


@dataclass(frozen=True)
class Loaded:
    """`rules`, `mode` and `hooks` are for `Permissions`. `pending` is what the project brought
    and nobody approved yet: its allow rules and hooks, which do not count until then.
    `own_servers` and `brought_servers` are the tables of MCP servers by name, the latter
    unapproved as they stand in the file."""

    mode: Mode
    rules: tuple[Placed, ...]
    hooks: Hooks
    pending: tuple[Brought, ...]
    own_servers: Mapping[str, Mapping[str, JsonValue]]
    brought_servers: Mapping[str, Mapping[str, JsonValue]]


def load(project: Path, approvals: Approvals, settings: Path | None = None) -> Loaded:
    """Read both files. `settings` is the person's own, in place of the usual one. Raises EtudeError
    for a file or a rule that is wrong."""
    path = settings or user_settings_path()
    project = project.resolve()
    own = read_user_file(path)
    brought = read_project_file(project)
    rules = _placed(own.permissions, str(path))
    for item in own.remembered:
        if Path(item.project) == project:
            kept = ProjectPermissions(
                allow=() if item.allow is None else (item.allow,),
                deny=() if item.deny is None else (item.deny,),
            )
            rules += _placed(kept, f"remembered in {path}")
    theirs = _placed(brought.permissions, PROJECT_FILE)
    allowing = Brought(ALLOW_KIND, project, list(brought.permissions.allow))
    asked = [allowing] if brought.permissions.allow else []
    pending = approvals.pending(asked)
    rules += [p for p in theirs if p.kind is not Kind.ALLOW or not pending]
    hooks = Hooks(project, own.hooks, brought.hooks, approvals)
    return Loaded(
        mode=own.permissions.mode,
        rules=tuple(rules),
        hooks=hooks,
        pending=(*pending, *hooks.pending()),
        own_servers=own.mcp,
        brought_servers=brought.mcp,
    )


def _placed(table: ProjectPermissions, source: str) -> list[Placed]:
    kinds = {Kind.ALLOW: table.allow, Kind.ASK: table.ask, Kind.DENY: table.deny}
    return [
        Placed(kind, parse_rule(text), source) for kind, texts in kinds.items() for text in texts
    ]
