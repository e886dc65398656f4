"""Whether a call may run: what the session asks, and what a gate answers.

A rollout has no gate: its sandbox is all the fence it needs. A person's session has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from etude.agent.tools.tool import Effect, ToolResult
from etude.sandbox.protocol import Rights


@dataclass(frozen=True)
class Request:
    """A call that wants to run; `subject` is its path, command or address."""

    call_id: str
    tool: str
    effect: Effect
    subject: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Permission:
    """The answer; `by` names the rule, the mode or the person that gave it, `reason` is what the
    model is told of a refusal. `readonly`: the call may run only where the workspace cannot be
    written."""

    allowed: bool
    by: str
    reason: str = ""
    readonly: bool = False


class Gate(Protocol):
    """Decides over calls. A gate that asks a person waits for the answer."""

    def rights(self) -> Rights:
        """What the workspace's mounts must forbid at this moment."""
        ...

    async def check(self, request: Request) -> Permission: ...

    async def ran(self, request: Request, result: ToolResult) -> None:
        """An allowed call has ended."""
        ...

    def narrowed(self, *, readonly: bool) -> Gate:
        """The gate of a sub-agent: never more than this one allows, at every moment."""
        ...
