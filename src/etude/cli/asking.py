"""Asking a person whether a call may run: exactly what it would do, then one key."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING

from wcwidth import wcswidth

from etude.agent.permissions import Decision, Question, Remember, Request
from etude.agent.permissions.settings import user_settings_path
from etude.cli.lines import Line, line, lines
from etude.cli.show import change
from etude.cli.visible import visible

if TYPE_CHECKING:
    from etude.cli.talk import Talk

_BAR = "  │ "
_LEAST = 20
_MANY = 12
_BLANKS = re.compile(r"[ \t]{12,}")


def framed(text: str, width: int) -> str:
    """`text` cut into rows that fit behind the bar, so that no text can reach the first column and
    look like a question of ours. Long runs of blanks, which could push the real question off the
    screen, are counted instead."""
    rows: list[str] = []
    room = max(_LEAST, width - len(_BAR) - 1)
    for part in text.split("\n"):
        row = _BLANKS.sub(lambda found: f" ⟨{len(found[0])} blanks⟩ ", visible(part).expandtabs(4))
        while len(row) > room or wcswidth(row) > room:
            cut = min(len(row), room)
            while cut > 1 and wcswidth(row[:cut]) > room:
                cut -= 1
            rows.append(row[:cut])
            row = row[cut:]
        rows.append(row)
    return "\n".join(rows)


def exactly(request: Request, width: int) -> list[Line]:
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
        command = framed(str(arguments.pop("command")), width)
        shown += lines(command, "bold", first=_BAR, rest=_BAR)
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown += lines(framed(f"{name}: {text}", width), "", first=_BAR, rest=_BAR)
    return shown


async def decide(talk: Talk, question: Question) -> Decision:
    """Show the call and wait for the person's answer."""
    request = question.request
    head = line(("? ", "bold yellow"), (f"may {request.tool} run?", "bold"), f"  {question.why}")
    shown = exactly(request, shutil.get_terminal_size().columns)
    if len(shown) > _MANY:
        shown.append(line((f"  all {len(shown)} lines above belong to this question", "yellow")))
    talk.terminal.print([line(), head, *shown])
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
