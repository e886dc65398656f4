"""Asking a person whether a call may run: exactly what it would do, then one key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from etude.agent.permissions import Decision, Question, Remember, Request
from etude.agent.permissions.settings import user_settings_path
from etude.cli.lines import Line, line, lines
from etude.cli.show import change

if TYPE_CHECKING:
    from etude.cli.talk import Talk

_BAR = "  │ "


def exactly(request: Request) -> list[Line]:
    """The whole of what a call would do, nothing folded or cut."""
    arguments = dict(request.arguments)
    if request.tool in ("edit", "write"):
        head = line(_BAR, (str(arguments.get("path", "")), "bold"))
        everywhere = [line((f"{_BAR}every place in the file", ""))]
        return [
            head,
            *(everywhere if arguments.get("replace_all") else []),
            *change(request.tool, arguments, whole=True),
        ]
    shown: list[Line] = []
    if isinstance(arguments.get("command"), str):
        shown += lines(str(arguments.pop("command")), "bold", first=_BAR, rest=_BAR)
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown += lines(text, "", first=f"{_BAR}{name}: ", rest=_BAR)
    return shown


async def decide(talk: Talk, question: Question) -> Decision:
    """Show the call and wait for the person's answer."""
    request = question.request
    head = line(("? ", "bold yellow"), (f"may {request.tool} run?", "bold"), f"  {question.why}")
    talk.terminal.print([line(), head, *exactly(request)])
    offered = "y yes, once · s yes, for this session · n no"
    keys = "ysn"
    if question.rules:
        offered, keys = f"{offered} · a always", "ysna"
    key = await talk.ask_key(offered, keys)
    if key == "a":
        rules = [line((f"  + allow {rule}", "green")) for rule in question.rules]
        talk.terminal.print([line(f"  this goes into {user_settings_path()}:"), *rules])
        key = await talk.ask_key("y write it · n no, only this once", "yn")
        return Decision(True, Remember.ALWAYS if key == "y" else Remember.ONCE)
    if key == "n":
        reason = await talk.ask_line("Why not? The model is told (Enter: nothing)")
        return Decision(False, reason=reason and f"the person said no: {reason}")
    return Decision(True, Remember.SESSION if key == "s" else Remember.ONCE)
