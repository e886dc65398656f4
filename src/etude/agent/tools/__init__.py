"""The tools, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from etude.agent.tools.ask import Ask, AskPerson
from etude.agent.tools.edit import Edit
from etude.agent.tools.embedding import embedding_model
from etude.agent.tools.finish import Finish
from etude.agent.tools.glob import Glob
from etude.agent.tools.grep import Grep
from etude.agent.tools.job import JobTool
from etude.agent.tools.programs import tool_mounts, with_tools
from etude.agent.tools.read import Read
from etude.agent.tools.semantic_search import SemanticSearch
from etude.agent.tools.shell import SessionShell, Shell
from etude.agent.tools.task import Task
from etude.agent.tools.todo import TodoList
from etude.agent.tools.tool import AnyTool, ErrorClass, Tool, ToolContext, ToolResult
from etude.agent.tools.write import Write
from etude.errors import EtudeError

_ROLLOUT: tuple[AnyTool, ...] = (Read(), Edit(), Write(), Grep(), Shell(), Finish())
_FILES: tuple[AnyTool, ...] = (Read(), Edit(), Write(), Grep(), Glob())


def default_tools() -> tuple[AnyTool, ...]:
    """What a rollout gets, in the order in which a model is told of them."""
    return _ROLLOUT


def session_tools(
    *, ask: AskPerson | None = None, allow_hosts: Sequence[str] = ()
) -> tuple[AnyTool, ...]:
    """What a person's session gets. `ask` puts a question to the person (None: nobody is there),
    `allow_hosts` may be fetched from (none: there is no `web_fetch`). `semantic_search` is there
    with the extra `search`. Raises EtudeError for an entry that is no host."""
    talk = (TodoList(), Task(), Ask(ask), Finish())
    tools: list[AnyTool] = [*_FILES, SessionShell(), JobTool(), *talk]
    if embedding_model() is not None:
        tools.insert(len(_FILES), SemanticSearch())
    if allow_hosts:
        from etude.agent.tools.web_fetch import WebFetch, fetch_settings

        tools.append(WebFetch(fetch_settings(allow_hosts)))
    return tuple(tools)


def tools_named(names: Sequence[str]) -> tuple[AnyTool, ...]:
    """The tools of a rollout of these names, in the order given. Raises EtudeError for an unknown
    name."""
    known: dict[str, AnyTool] = {tool.name: tool for tool in (*_ROLLOUT, Glob(), TodoList())}
    for name in names:
        if name not in known:
            raise EtudeError(f"There is no tool named {name!r}; choose from {', '.join(known)}.")
    return tuple(known[name] for name in names)


__all__ = [
    "AnyTool",
    "AskPerson",
    "ErrorClass",
    "Tool",
    "ToolContext",
    "ToolResult",
    "default_tools",
    "session_tools",
    "tool_mounts",
    "tools_named",
    "with_tools",
]
