"""The `/` commands of the terminal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.choices import PICK, Choices
from etude.cli.lines import line, lines, patch
from etude.errors import EtudeError

if TYPE_CHECKING:
    from etude.agent.live import LiveSession
    from etude.cli.talk import Talk


@dataclass(frozen=True)
class Command:
    """`idle` ones wait until nothing runs; what they do is shown as `doing` meanwhile."""

    usage: str
    about: str
    run: Callable[[Talk, str], Awaitable[None]]
    idle: bool = False


def run_command(talk: Talk, name: str, words: str) -> None:
    """Run a command; what is wrong with it is shown."""
    command = _COMMANDS.get(name)
    if command is None:
        talk.say(f"there is no /{name}; /help lists the commands", "red")
    elif name == "quit":
        talk.terminal.leave()
    elif command.idle:
        if talk.working:
            talk.say(f"/{name} has to wait until nothing runs (Esc interrupts)", "red")
        else:
            talk.start(_run(command, talk, words), name)
    else:
        talk.aside(_run(command, talk, words))


def _run(command: Command, talk: Talk, words: str) -> Coroutine[Any, Any, None]:
    async def work() -> None:
        await command.run(talk, words)

    return work()


def _live(talk: Talk) -> LiveSession:
    if talk.live is None:
        raise EtudeError("the session is not open yet")
    return talk.live


async def _help(talk: Talk, words: str) -> None:
    width = max(len(command.usage) for command in _COMMANDS.values()) + 2
    out = [
        line((f"  {command.usage:<{width}}", "bold"), command.about)
        for command in _COMMANDS.values()
    ]
    keys = (
        "Enter sends, Alt-Enter or Ctrl-J begins a line, @ completes files. While the model works a"
        " message steers it and Esc or Ctrl-C interrupts. Ctrl-C or Ctrl-D at an empty prompt"
        " leaves, Ctrl-L draws the screen anew."
    )
    talk.terminal.print([*out, line((f"  {keys}", "dim"))])


async def _mode(talk: Talk, words: str) -> None:
    from etude.agent.permissions.modes import Mode

    live = _live(talk)
    names = [mode.value for mode in Mode]
    if words in names:
        live.set_mode(Mode(words))
    elif words:
        raise EtudeError(f"there is no mode {words!r}; choose from {', '.join(names)}")
    else:
        talk.say(f"mode {live.mode.value}; there are {', '.join(names)}")


async def _effort(talk: Talk, words: str) -> None:
    from etude.agent.effort import EffortLevel

    live = _live(talk)
    names = [level.value for level in EffortLevel]
    if words in names:
        live.set_effort(EffortLevel(words))
    elif words:
        raise EtudeError(f"there is no effort {words!r}; choose from {', '.join(names)}")
    else:
        talk.say(f"effort {live.effort.value}; there are {', '.join(names)}")


async def _undo(talk: Talk, words: str) -> None:
    undone = await _live(talk).undo(words or None)
    done = "the files were put back" if undone.changed else "no file was different"
    talk.say(f"{done}; /undo {undone.left} takes that back, /undo goes one message further")


async def _diff(talk: Talk, words: str) -> None:
    text = await _live(talk).changes(since_start=words == "all")
    talk.terminal.print(patch(text) if text else [line("nothing was changed")])


async def _summarize(talk: Talk, words: str) -> None:
    await _live(talk).session.summarize()


async def _resume(talk: Talk, words: str) -> None:
    await talk.open(replace(talk.choices, model="", fork="", resume=words or PICK))


async def _fork(talk: Talk, words: str) -> None:
    from etude.cli.opening import Target

    if words and not words.isdecimal():
        raise EtudeError("/fork takes the number of a turn of the model, from 0")
    session_id = _live(talk).session.session_id
    await talk.reopen(Target(session_id, True, int(words) if words else None))


async def _sessions(talk: Talk, words: str) -> None:
    from etude.cli.history import describe, whole
    from etude.cli.opening import session_store

    project = None if words == "all" else talk.choices.folder.resolve()
    found = whole(session_store().list(project))[:20]
    talk.terminal.print([line(text) for text in describe(found)] or [line("there are none")])


async def _model(talk: Talk, words: str) -> None:
    if not words:
        name = talk.bench.name if talk.bench is not None else "none"
        talk.say(f"model {name}; /model NAME begins a new session with another")
        return
    await talk.open(replace(_fresh(talk.choices), model=words, dialect=""))


def _fresh(choices: Choices) -> Choices:
    """Without an old session to go on with."""
    return replace(choices, resume="", fork="")


async def _tools(talk: Talk, words: str) -> None:
    for tool in _live(talk).session.tools:
        name = f"  {tool.name:<16}"
        talk.terminal.print([line((name, "bold"), tool.description.split("\n")[0])])


async def _cost(talk: Talk, words: str) -> None:
    live = _live(talk)
    used, length = live.session.context_used
    budget = live.session.budget
    left = budget.remaining()
    talk.say(
        f"{budget.sampled} tokens were sampled for ${budget.spent:.4f};"
        f" the next prompt has {used} of {length} tokens" + (f"; {left} are left" if left else "")
    )


async def _explain(talk: Talk, words: str) -> None:
    from etude.cli.telling import explained

    talk.terminal.print(lines(explained(_live(talk).session.events)))


async def _export(talk: Talk, words: str) -> None:
    from etude.cli.history import exported, write_new
    from etude.cli.opening import session_store

    form, _, name = words.partition(" ")
    form = form or "markdown"
    session_id = _live(talk).session.session_id
    ending = "json" if form == "atif" else "md"
    path = Path(name.strip() or f"etude-{session_id}.{ending}")
    text = exported(session_store(), session_id, form)
    write_new(path, text)
    talk.say(f"written to {path.resolve()}")


async def _clear(talk: Talk, words: str) -> None:
    from etude.cli.opening import Target

    talk.terminal.clear()
    await talk.reopen(Target())


async def _quit(talk: Talk, words: str) -> None:
    talk.terminal.leave()


_COMMANDS = {
    "help": Command("/help", "this list", _help),
    "mode": Command("/mode [MODE]", "what may run unasked: ask, auto, read-only, plan", _mode),
    "effort": Command("/effort [LEVEL]", "how hard to try: low, medium, high", _effort),
    "undo": Command("/undo [ID]", "put files back, one message at a time", _undo, idle=True),
    "diff": Command("/diff [all]", "what the last message (the session) changed", _diff),
    "summarize": Command("/summarize", "go on from a summary", _summarize, idle=True),
    "resume": Command("/resume [ID]", "go on with another session", _resume, idle=True),
    "fork": Command("/fork [TURN]", "go on in a copy of this session", _fork, idle=True),
    "sessions": Command("/sessions [all]", "sessions of this folder", _sessions),
    "model": Command("/model [NAME]", "a new session with another model", _model, idle=True),
    "tools": Command("/tools", "what the model may call", _tools),
    "cost": Command("/cost", "tokens, money and context so far", _cost),
    "explain": Command("/explain", "what was done, and what shows each claim", _explain),
    "export": Command("/export [markdown|atif] [FILE]", "write this session to a file", _export),
    "clear": Command("/clear", "an empty screen and a new session", _clear, idle=True),
    "quit": Command("/quit", "leave", _quit),
}

COMMANDS = {name: command.about for name, command in _COMMANDS.items()}
"""Name → what it does."""
