"""The session's to-do list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from etude.agent.tools.tool import Arguments, Effect, Todo, Tool, ToolContext, ToolResult
from etude.records import Event, EventKind

_CHARS = 300
_MARKS = {"open": " ", "doing": ">", "done": "x", "dropped": "-"}


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if not line or len(line) > _CHARS:
        raise ValueError(f"must have 1 to {_CHARS} characters")
    return line


class TodoEntry(Arguments):
    """One thing to do, in one line."""

    text: Annotated[str, AfterValidator(_one_line)]
    state: Literal["open", "doing", "done", "dropped"] = "open"


class TodoArguments(Arguments):
    """The whole list, in order."""

    entries: Annotated[list[TodoEntry], Field(max_length=50)]


class TodoList(Tool[TodoArguments]):
    """Replaces the list and shows it. Summaries carry it over."""

    name = "todo"
    description = "replace the whole to-do list of this session"
    arguments = TodoArguments
    effect = Effect.TALK

    async def run(self, context: ToolContext, args: TodoArguments) -> ToolResult:
        """See `Tool.run`."""
        context.todos[:] = _todos(args)
        return ToolResult(shown(context.todos))


def shown(todos: Sequence[Todo]) -> str:
    """The list as a model and a person read it."""
    if not todos:
        return "(the list is empty)"
    return "\n".join(f"[{_MARKS[todo.state]}] {todo.text}" for todo in todos)


def recalled(events: Sequence[Event]) -> list[Todo]:
    """The list as a recorded session left it."""
    accepted = {
        event.data["id"]
        for event in events
        if event.kind is EventKind.TOOL_RESULT and event.data["error_class"] is None
    }
    for event in reversed(events):
        data = event.data
        if (
            event.kind is EventKind.TOOL_CALL
            and data["name"] == TodoList.name
            and data["id"] in accepted
        ):
            return _todos(TodoArguments.model_validate(dict(data["arguments"])))
    return []


def _todos(args: TodoArguments) -> list[Todo]:
    return [Todo(entry.text, entry.state) for entry in args.entries]
