"""Who may do what: rules, modes, approvals and hooks of a person's session."""

from etude.agent.permissions.approvals import Approvals, Brought
from etude.agent.permissions.gate import Gate, Permission, Request
from etude.agent.permissions.modes import Mode
from etude.agent.permissions.permissions import (
    Asker,
    Decision,
    Permissions,
    Question,
    Remember,
)

__all__ = [
    "Approvals",
    "Asker",
    "Brought",
    "Decision",
    "Gate",
    "Mode",
    "Permission",
    "Permissions",
    "Question",
    "Remember",
    "Request",
]
