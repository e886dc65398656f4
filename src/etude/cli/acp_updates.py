"""What happens in a session, as updates of the Agent Client Protocol: plain JSON objects."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.agent.tools.files import guest_path
from etude.agent.tools.todo import TodoList
from etude.agent.tools.tool import Todo
from etude.cli.visible import visible
from etude.records import Event, EventKind
from etude.sandbox.protocol import WORKSPACE_ROOT

Update = dict[str, Any]
_KINDS = {
    "read": "read",
    "edit": "edit",
    "write": "edit",
    "grep": "search",
    "glob": "search",
    "semantic_search": "search",
    "shell": "execute",
    "job": "execute",
    "web_fetch": "fetch",
    "task": "think",
    "skill": "read",
}
_STATES = {"open": "pending", "doing": "in_progress", "done": "completed"}
_SHOWN_FILE = 512 << 10
"""Bytes of the largest file whose changes are shown."""
_TITLE = 200


def text_chunk(kind: str, text: str) -> Update:
    """`kind` is agent_message_chunk, agent_thought_chunk or user_message_chunk."""
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}}


def fenced(text: str) -> str:
    """Foreign text that an editor must not take for markup: no link or picture in it is loaded."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{visible(text)}\n{fence}"


def host_path(project: Path, path: object) -> Path | None:
    """Where a path of the guest lies on the host; None outside the project."""
    if not isinstance(path, str) or "\0" in path:
        return None
    inside = guest_path(path)
    if inside != WORKSPACE_ROOT and not inside.startswith(f"{WORKSPACE_ROOT}/"):
        return None
    return project / inside[len(WORKSPACE_ROOT) :].lstrip("/")


def plan(todos: Sequence[Todo]) -> Update:
    """The to-do list; what was dropped is left out."""
    entries = [
        {"content": visible(todo.text), "priority": "medium", "status": _STATES[todo.state]}
        for todo in todos
        if todo.state in _STATES
    ]
    return {"sessionUpdate": "plan", "entries": entries}


def call_fields(project: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a call is about: title, kind, places in files, arguments."""
    title = f"{name} {subject(arguments)}".strip()
    path = host_path(project, arguments.get("path"))
    fields: dict[str, Any] = {
        "title": visible(title.replace("\n", " "))[:_TITLE],
        "kind": _KINDS.get(name, "other"),
        "rawInput": dict(arguments),
    }
    if path is not None:
        place: dict[str, Any] = {"path": str(path)}
        if isinstance(arguments.get("start"), int) and name == "read":
            place["line"] = arguments["start"]
        fields["locations"] = [place]
    return fields


def subject(arguments: Mapping[str, Any]) -> str:
    """The words that tell one call of a tool from another."""
    for key in ("path", "command", "pattern", "query", "url", "question", "prompt", "name"):
        if isinstance(arguments.get(key), str):
            return arguments[key]
    return json.dumps(dict(arguments), ensure_ascii=False) if arguments else ""


def proposed(project: Path, name: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The change that a call asks for, before it is made."""
    path = host_path(project, arguments.get("path"))
    if path is None:
        return []
    if name == "edit":
        return [_diff(path, arguments.get("old"), arguments.get("new"))]
    if name == "write":
        return [_diff(path, read_text(project, path), arguments.get("content"))]
    return []


def _diff(path: Path, old: object, new: object) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": "diff", "path": str(path), "newText": str(new or "")}
    return {**shown, "oldText": old} if isinstance(old, str) else shown


def read_text(project: Path, path: Path) -> str | None:
    """A file of the project as text; None when there is none, it is too large, or a link leads
    elsewhere."""
    try:
        if not path.parent.resolve().is_relative_to(project):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _SHOWN_FILE:
            return None
        return os.read(descriptor, _SHOWN_FILE).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


class Reporter:
    """Turns a session's events into updates. `live` reads the files that are changed, so that an
    edit is shown as it happened; of an old session only what the calls say is known."""

    def __init__(self, project: Path, *, live: bool) -> None:
        self._project = project
        self._live = live
        self._calls: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._texts: dict[Path, str | None] = {}

    def open_call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether this very call waits for its result; `arguments` with defaults filled in."""
        known, said = self._calls.get(call_id, ("", {}))
        return known == name and all(arguments.get(key) == value for key, value in said.items())

    def updates(self, event: Event, prefix: str = "") -> Iterator[Update]:
        """Of one event, the model's words left out. `prefix` makes the ids of a sub-agent's
        calls its own."""
        data = event.data
        if event.kind is EventKind.TOOL_CALL:
            yield from self._call(f"{prefix}{data['id']}", data, prefix)
        elif event.kind is EventKind.PERMISSION and data["allowed"]:
            yield {
                "sessionUpdate": "tool_call_update",
                "toolCallId": f"{prefix}{data['id']}",
                "status": "in_progress",
            }
        elif event.kind is EventKind.TOOL_RESULT:
            yield from self._result(f"{prefix}{data['id']}", data)

    def _call(self, call_id: str, data: Mapping[str, Any], prefix: str) -> Iterator[Update]:
        name, arguments = str(data["name"]), dict(data["arguments"])
        self._calls[call_id] = (name, arguments)
        if name in (TodoList.name, "finish") and not data["malformed"]:
            return
        path = host_path(self._project, arguments.get("path"))
        if self._live and path is not None and path not in self._texts:
            self._texts[path] = read_text(self._project, path)
        fields = call_fields(self._project, name or "a malformed call", arguments)
        if prefix:
            fields["title"] = f"sub-agent: {fields['title']}"
        yield {
            "sessionUpdate": "tool_call",
            "toolCallId": call_id,
            "status": "pending",
            **fields,
        }

    def _result(self, call_id: str, data: Mapping[str, Any]) -> Iterator[Update]:
        name, arguments = self._calls.pop(call_id, (str(data["name"]), {}))
        failed = data["error_class"] is not None
        if name == "finish" and not failed:
            if data["text"]:
                yield text_chunk("agent_message_chunk", data["text"])
            return
        if name == TodoList.name and not failed:
            entries = arguments.get("entries", [])
            yield plan([Todo(str(e["text"]), str(e.get("state", "open"))) for e in entries])
            return
        content = [] if failed else self._change(name, arguments)
        words = {"type": "content", "content": {"type": "text", "text": fenced(data["text"])}}
        yield {
            "sessionUpdate": "tool_call_update",
            "toolCallId": call_id,
            "status": "failed" if failed else "completed",
            "content": [*content, words],
            **({"rawOutput": {"error_class": data["error_class"]}} if failed else {}),
        }
        if not self._calls:
            self._texts.clear()

    def _change(self, name: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not self._live or name not in ("edit", "write"):
            return (
                proposed(self._project, name, arguments)
                if name == "edit"
                else self._whole(name, arguments)
            )
        path = host_path(self._project, arguments.get("path"))
        if path is None:
            return []
        before, after = self._texts.get(path), read_text(self._project, path)
        self._texts[path] = after
        return [] if after is None or after == before else [_diff(path, before, after)]

    def _whole(self, name: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        path = host_path(self._project, arguments.get("path"))
        return [_diff(path, None, arguments.get("content"))] if path and name == "write" else []


def replayed(project: Path, events: Sequence[Event]) -> Iterator[Update]:
    """A whole session again."""
    reporter = Reporter(project, live=False)
    for event in events:
        if event.kind is EventKind.USER:
            yield text_chunk("user_message_chunk", event.data["text"])
        elif event.kind is EventKind.ASSISTANT:
            if event.data["thinking"]:
                yield text_chunk("agent_thought_chunk", event.data["thinking"])
            if event.data["text"]:
                yield text_chunk("agent_message_chunk", event.data["text"])
        elif event.kind is EventKind.SUMMARY:
            yield text_chunk("agent_thought_chunk", "(the conversation so far was summarized)")
        else:
            yield from reporter.updates(event)
