"""The tools, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from etude.agent.tools.edit import Edit
from etude.agent.tools.finish import Finish
from etude.agent.tools.grep import Grep
from etude.agent.tools.read import Read
from etude.agent.tools.shell import Shell
from etude.agent.tools.tool import AnyTool, ErrorClass, Tool, ToolContext, ToolResult
from etude.agent.tools.write import Write
from etude.errors import EtudeError

_TOOLS: tuple[AnyTool, ...] = (Read(), Edit(), Write(), Grep(), Shell(), Finish())


def default_tools() -> tuple[AnyTool, ...]:
    """Every tool there is, in the order in which a model is told of them."""
    return _TOOLS


def tools_named(names: Sequence[str]) -> tuple[AnyTool, ...]:
    """The tools of these names, in the order given. Raises EtudeError for an unknown name."""
    known = {tool.name: tool for tool in _TOOLS}
    for name in names:
        if name not in known:
            raise EtudeError(f"There is no tool named {name!r}; choose from {', '.join(known)}.")
    return tuple(known[name] for name in names)


__all__ = [
    "AnyTool",
    "ErrorClass",
    "Tool",
    "ToolContext",
    "ToolResult",
    "default_tools",
    "tools_named",
]
