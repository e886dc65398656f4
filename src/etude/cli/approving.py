"""`etude approve`: what a project brings that would run or allow, in its exact words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.agent.mcp.servers import brought_servers
from etude.agent.permissions import Approvals, Brought
from etude.agent.permissions.loading import load
from etude.cli.lines import Line, line, lines
from etude.errors import EtudeError

_ID_CHARS = 12


def pending(project: Path) -> list[Brought]:
    """What nobody approved yet. Raises EtudeError for a settings file that is wrong."""
    approvals = Approvals()
    found = [*load(project, approvals).pending, *approvals.pending(brought_servers(project))]
    return list({brought.fingerprint: brought for brought in found}.values())


def approve(project: Path, ids: Sequence[str]) -> list[Brought]:
    """Approve exactly these contents, named by the beginning of their ids. All or none. Raises
    EtudeError for an id that fits none or several."""
    waiting = pending(project)
    chosen: list[Brought] = []
    for wanted in ids:
        fitting = [b for b in waiting if wanted and b.fingerprint.startswith(wanted)]
        if len(fitting) != 1:
            many = "several things" if fitting else "nothing"
            raise EtudeError(
                f"{many} that waits for approval in {project} has the id {wanted!r}; `etude"
                " approve` lists what does"
            )
        chosen += fitting
    approvals = Approvals()
    for brought in chosen:
        approvals.approve(brought.kind, brought.project, brought.content)
    return chosen


def described(brought: Brought) -> list[Line]:
    """Id, kind and the exact content of one."""
    content = json.dumps(brought.content, indent=2, ensure_ascii=False)
    head = line((short_id(brought), "bold"), f"  {brought.kind}")
    return [head, *lines(content, "", first="  ", rest="  ")]


def short_id(brought: Brought) -> str:
    """What a person types."""
    return brought.fingerprint[:_ID_CHARS]


def as_json(brought: Brought) -> dict[str, Any]:
    """The same for a program."""
    return {"id": short_id(brought), "kind": brought.kind, "content": brought.content}
