"""Tools that talk: the to-do list, questions, sub-agents; and the sets of tools."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import default_tools, session_tools, tools_named
from etude.agent.tools.ask import Ask
from etude.agent.tools.task import Task
from etude.agent.tools.todo import TodoList, recalled
from etude.agent.tools.tool import ErrorClass, Todo, ToolContext, ToolResult, invoke, prepare
from etude.errors import EtudeError
from etude.models.renderer import ToolCall
from etude.records import EventKind, StopReason
from etude.sandbox.protocol import Workspace


async def no_workspace() -> Workspace:
    raise AssertionError("no workspace is needed")


def call(tool: Any, context: ToolContext, **arguments: Any) -> ToolResult:
    prepared = prepare([tool], ToolCall(tool.name, arguments, ""))
    if isinstance(prepared, ToolResult):
        return prepared
    return asyncio.run(invoke(prepared, context))


def test_the_list_is_replaced_and_shown() -> None:
    context = ToolContext(no_workspace, 5)
    entries = [
        {"text": "read  the\ncode", "state": "done"},
        {"text": "mend it", "state": "doing"},
        {"text": "test it"},
        {"text": "rewrite it", "state": "dropped"},
    ]
    result = call(TodoList(), context, entries=entries)
    assert result.text == "[x] read the code\n[>] mend it\n[ ] test it\n[-] rewrite it"
    assert context.todos[0] == Todo("read the code", "done")
    assert call(TodoList(), context, entries=[]).text == "(the list is empty)"
    assert context.todos == []


@pytest.mark.parametrize(
    "entries",
    [
        "text",
        [{"text": ""}],
        [{"text": "x", "state": "finished"}],
        [{"text": "x" * 301}],
        [{"text": "x", "id": 1}],
        [{"text": "x"}] * 51,
    ],
)
def test_a_wrong_list_changes_nothing(entries: Any) -> None:
    context = ToolContext(no_workspace, 5, todos=[Todo("kept")])
    result = call(TodoList(), context, entries=entries)
    assert result.error_class is ErrorClass.INVALID_ARGUMENTS
    assert context.todos == [Todo("kept")]


def test_a_question_waits_for_its_answer_longer_than_any_tool() -> None:
    asked: list[tuple[str, Sequence[str]]] = []

    async def person(question: str, options: Sequence[str]) -> str:
        asked.append((question, options))
        await asyncio.sleep(0.05)
        return " blue "

    tool = Ask(person)
    context = ToolContext(no_workspace, -29.99)  # the deadline of other tools is 10 ms
    result = call(tool, context, question="Which colour?", options=["red", "blue"])
    assert (result.text, result.error_class) == ("blue", None)
    assert asked == [("Which colour?", ("red", "blue"))]


def test_what_nobody_lends_is_unavailable() -> None:
    context = ToolContext(no_workspace, 5)
    for tool, arguments in ((Ask(), {"question": "?"}), (Task(), {"prompt": "work"})):
        result = call(tool, context, **arguments)
        assert result.error_class is ErrorClass.UNAVAILABLE


def session(script: Any, **options: Any) -> Session:
    return Session(
        TokenPolicy(script.engine(), script.renderer),
        no_workspace,
        session_tools(),
        SessionSettings(max_turn_tokens=4000),
        session_id="s",
        **options,
    )


def test_the_session_goes_on_without_a_person_and_keeps_the_list(script: Any) -> None:
    script.calls(("todo", {"entries": [{"text": "a"}]}), ("ask", {"question": "Really?"}))
    script.calls(("todo", {"entries": [{"text": "wrong", "state": "?"}]}))
    script.says("Done.")
    running = session(script)
    assert asyncio.run(running.prompt("Work.")) is StopReason.FINISHED
    classes = [
        event.data["error_class"] for event in running.events if event.kind is EventKind.TOOL_RESULT
    ]
    assert classes == [None, "unavailable", "invalid_arguments"]
    assert running.context.todos == recalled(running.events) == [Todo("a")]


@pytest.mark.parametrize(("readonly", "most"), [(True, 3), (False, 1)])
def test_only_readonly_sub_agents_run_side_by_side(script: Any, readonly: bool, most: int) -> None:
    running = 0
    together = 0

    async def delegate(parent: Session, prompt: str, narrowed: bool) -> ToolResult:
        nonlocal running, together
        assert narrowed is readonly
        running += 1
        together = max(together, running)
        await asyncio.sleep(0.1)
        running -= 1
        return ToolResult(f"did {prompt}")

    script.calls(*(("task", {"prompt": f"{n}", "readonly": readonly}) for n in range(3)))
    script.says("Done.")
    parent = session(script, delegate=delegate)
    assert asyncio.run(parent.prompt("Work.")) is StopReason.FINISHED
    assert together == most
    texts = [e.data["text"] for e in parent.events if e.kind is EventKind.TOOL_RESULT]
    assert texts == ["did 0", "did 1", "did 2"]


def test_the_sets_of_tools() -> None:
    assert [tool.name for tool in default_tools()] == [
        "read",
        "edit",
        "write",
        "grep",
        "shell",
        "finish",
    ]
    names = [tool.name for tool in session_tools(allow_hosts=["docs.example"])]
    assert len(names) == len(set(names))
    assert {"glob", "job", "todo", "task", "ask", "web_fetch", "shell"} <= set(names)
    assert [tool.name for tool in tools_named(["glob", "read"])] == ["glob", "read"]
    with pytest.raises(EtudeError, match="no tool named 'job'"):
        tools_named(["job"])


def test_what_models_are_told_is_plain_and_short() -> None:
    for tool in session_tools(allow_hosts=["docs.example"]):
        spec = tool.spec()
        schema = json.dumps(spec.parameters)
        assert "$ref" not in schema
        assert "$defs" not in schema
        assert '"title"' not in schema
        assert len(spec.description) < 90
        assert len(schema) < 700


def test_rules_see_what_a_call_is_about() -> None:
    calls = {
        "shell": ({"command": "ls -l"}, "ls -l"),
        "read": ({"path": "a/b"}, "a/b"),
        "web_fetch": ({"url": "https://docs.example/x"}, "https://docs.example/x"),
        "task": ({"prompt": "look"}, "look"),
        "ask": ({"question": "?"}, "?"),
        "grep": ({"pattern": "x", "path": "src"}, "src"),
    }
    tools = session_tools(allow_hosts=["docs.example"])
    for name, (arguments, subject) in calls.items():
        prepared = prepare(tools, ToolCall(name, arguments, ""))
        assert not isinstance(prepared, ToolResult)
        assert prepared.subject == subject
