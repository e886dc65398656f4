"""What a session's events look like: one rendering for a session that runs, one that is resumed,
and one in a pipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etude.cli.lines import Line, difference, folded, line, lines, shortened
from etude.models.stream import Delta
from etude.records import Event, EventKind, StopReason

_RESULT_LINES = 4
_ERROR_LINES = 8
_LONG_LINES = 24
"""Of a diff, a written file, a to-do list or a command."""
_SUBJECTS = ("command", "path", "pattern", "query", "url", "question", "prompt", "name", "answer")
"""Arguments that say what a call is about, the first that is there."""
_QUIET_NOTES = ("[date:",)


class Show:
    """Events, and what was streamed before them, as lines. Feed it in order."""

    def __init__(self) -> None:
        self._speech = _Speech()
        self._streamed = False
        self._group = ""
        self._calls: dict[str, Mapping[str, Any]] = {}
        self._last_call = ""
        self._shown: set[str] = set()
        self.call_characters = 0
        """How much of a call the model has written so far."""

    @property
    def partial(self) -> tuple[str, str]:
        """(text, style) of the line that is still being written."""
        return self._speech.partial, self._speech.style

    def already_shown(self, call_id: str) -> None:
        """A person has just been shown what this call does."""
        self._shown.add(call_id)

    def delta(self, delta: Delta) -> list[Line]:
        """A piece of an answer."""
        self._streamed = True
        if delta.kind == "call":
            self.call_characters += len(delta.text)
            return []
        return self._spoken(delta)

    def event(self, event: Event) -> list[Line]:
        """What has happened."""
        show = {
            EventKind.ASSISTANT: self._assistant,
            EventKind.USER: self._user,
            EventKind.NOTE: self._note,
            EventKind.TOOL_CALL: self._call,
            EventKind.TOOL_RESULT: self._result,
            EventKind.PERMISSION: self._permission,
            EventKind.SUMMARY: self._summary,
            EventKind.STOP: self._stop,
        }.get(event.kind)
        return [] if show is None else show(event.data)

    def child(self, session_id: str, event: Event) -> list[Line]:
        """What a sub-agent does, briefly."""
        if event.kind is not EventKind.TOOL_CALL:
            return []
        number = session_id.rpartition(".")[2]
        about = shortened(subject(event.data["arguments"]).split("\n")[0], 200)
        return [line((f"  ◦ agent {number}: {event.data['name']}  {about}", "dim"))]

    def say(self, text: str, style: str = "") -> list[Line]:
        """A word of the program's own."""
        return self._in_group("own", lines(text, style))

    def _in_group(self, group: str, found: list[Line]) -> list[Line]:
        """Groups are parted by an empty line."""
        if not found:
            return []
        gap = [line()] if self._group not in ("", group) else []
        self._group = group
        return [*gap, *found]

    def _spoken(self, delta: Delta) -> list[Line]:
        out: list[Line] = []
        for group, said in self._speech.feed(delta.kind, delta.text):
            out += self._in_group(group, [said])
        return out

    def _end_speech(self) -> list[Line]:
        out: list[Line] = []
        for group, said in self._speech.end():
            out += self._in_group(group, [said])
        self._streamed, self.call_characters = False, 0
        return out

    def _assistant(self, data: Mapping[str, Any]) -> list[Line]:
        out: list[Line] = []
        if not self._streamed:
            out += self._spoken(Delta("thinking", data["thinking"]))
            out += self._spoken(Delta("text", data["text"]))
        return [*out, *self._end_speech()]

    def _user(self, data: Mapping[str, Any]) -> list[Line]:
        return self._in_group("user", lines(data["text"], "bold", first="› ", rest="  "))

    def _note(self, data: Mapping[str, Any]) -> list[Line]:
        quiet = data["text"].startswith(_QUIET_NOTES)
        return [] if quiet else self._in_group("note", lines(data["text"], "dim"))

    def _permission(self, data: Mapping[str, Any]) -> list[Line]:
        """A refusal is said by the result."""
        told = [line((f"  allowed by {data['by']}", "dim"))] if data["allowed"] else []
        return self._in_group("call", told)

    def _summary(self, data: Mapping[str, Any]) -> list[Line]:
        told = line(("— from this summary the work goes on, in a new context window —", "dim"))
        return [*self._assistant(data), *self._in_group("summary", [told])]

    def _call(self, data: Mapping[str, Any]) -> list[Line]:
        return self._in_group("call", self._call_lines(data))

    def _call_lines(self, data: Mapping[str, Any]) -> list[Line]:
        self._last_call = data["id"]
        self._calls[data["id"]] = data["arguments"]
        if data["malformed"]:
            raw = folded(str(data.get("raw", "")), _RESULT_LINES, "dim", first="  ", rest="  ")
            return [line(("• ", "red"), ("malformed call", "bold red")), *raw]
        about = subject(data["arguments"]).split("\n")
        head = line(("• ", "cyan"), (data["name"], "bold"), f"  {shortened(about[0])}")
        rest = folded("\n".join(about[1:]), _LONG_LINES, first="    ", rest="    ")
        return [head, *(rest if len(about) > 1 else [])]

    def _result(self, data: Mapping[str, Any]) -> list[Line]:
        return self._in_group("call", self._result_lines(data))

    def _result_lines(self, data: Mapping[str, Any]) -> list[Line]:
        arguments = self._calls.pop(data["id"], {})
        shown = data["id"] in self._shown
        others = data["id"] != self._last_call
        first = f"  └ {data['name']}: " if others else "  └ "
        if data["error_class"] is not None:
            return folded(data["text"], _ERROR_LINES, "red", first=first, rest="    ")
        name = data["name"]
        if name in ("edit", "write") and not shown:
            said = folded(data["text"], _RESULT_LINES, "dim", first=first, rest="    ")
            return [*said, *change(name, arguments, _LONG_LINES)]
        if name == "read":
            count = data["text"].count("\n") + 1
            return [line((f"{first}{count} lines" if count > 1 else f"{first}1 line", "dim"))]
        most = _LONG_LINES if name == "todo" else _RESULT_LINES
        return folded(data["text"], most, "dim", first=first, rest="    ")

    def _stop(self, data: Mapping[str, Any]) -> list[Line]:
        out = self._end_speech()
        self._calls.clear()
        self._shown.clear()
        if data["reason"] == StopReason.FINISHED.value:
            return out
        detail = f" {data['detail']}" if data["detail"] else ""
        return [*out, *self._in_group("stop", lines(f"[{data['reason']}]{detail}", "yellow"))]


def subject(arguments: Mapping[str, Any]) -> str:
    """What a call is about, in one text."""
    for name in _SUBJECTS:
        if isinstance(arguments.get(name), str):
            return str(arguments[name])
    return json.dumps(dict(arguments), ensure_ascii=False) if arguments else ""


def change(
    name: str, arguments: Mapping[str, Any], most: int | None = None, *, whole: bool = False
) -> list[Line]:
    """What an `edit` or `write` puts where, as a diff; all of it with `whole`."""
    old, new = ("old", "new") if name == "edit" else ("", "content")
    before, after = str(arguments.get(old, "")), str(arguments.get(new, ""))
    return difference(before, after, "    ", most, whole=whole)


class _Speech:
    """Thinking and text of one turn, cut into lines while they come. Empty lines at the
    beginning and the end of each are left out."""

    def __init__(self) -> None:
        self.partial = ""
        self._kind = "text"
        self._blank = 0
        self._begun = False
        self._fenced = False

    @property
    def style(self) -> str:
        """Of the kind that is being written."""
        return "dim italic" if self._kind == "thinking" else ""

    def feed(self, kind: str, text: str) -> list[tuple[str, Line]]:
        """Lines that are complete, each with its kind."""
        out: list[tuple[str, Line]] = []
        if kind != self._kind:
            out += self.end()
            self._kind = kind
        *whole, self.partial = (self.partial + text).split("\n")
        for part in whole:
            out += self._line(part)
        return out

    def end(self) -> list[tuple[str, Line]]:
        """The rest; the next piece begins anew."""
        out = self._line(self.partial)
        self.partial, self._kind, self._blank = "", "text", 0
        self._begun = self._fenced = False
        return out

    def _line(self, text: str) -> list[tuple[str, Line]]:
        if not text.strip():
            self._blank += self._begun
            return []
        out = [(self._kind, line()) for _ in range(self._blank)]
        self._blank, self._begun = 0, True
        out.append((self._kind, line((text, self._styled(text)))))
        return out

    def _styled(self, text: str) -> str:
        """Code and headings of Markdown stand out; the words stay as they are."""
        if self._kind == "thinking":
            return self.style
        if text.lstrip().startswith("```"):
            self._fenced = not self._fenced
            return "dim"
        if self._fenced:
            return "cyan"
        return "bold" if text.startswith("#") else ""
