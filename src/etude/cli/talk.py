"""`etude`: a session in the terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from etude.cli.choices import PICK, Choices
from etude.cli.completion import TalkCompleter
from etude.cli.lines import Line, line, lines, row_starts, shortened
from etude.cli.show import Show
from etude.cli.slash import COMMANDS, run_command
from etude.cli.terminal import Handlers, Terminal
from etude.cli.visible import visible
from etude.errors import EtudeError
from etude.machine import state_folder
from etude.models.stream import Delta
from etude.records import Event, EventKind

if TYPE_CHECKING:
    from etude.agent.live import LiveSession
    from etude.agent.permissions import Decision, Question
    from etude.cli.opening import Bench, OpenSession, Target

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_REPLAYED = 400
"""Lines of an old session that are shown when it goes on."""
_CLOSE_SECONDS = 10.0


async def talk(choices: Choices) -> None:
    """Until the person leaves. Raises EtudeError when no session can be opened."""
    await Talk(choices).run()


class Talk:
    """One terminal and the session that is open in it."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.show = Show()
        self.live: LiveSession | None = None
        self._opened: OpenSession | None = None
        self.bench: Bench | None = None
        self.completer = TalkCompleter(COMMANDS, choices.folder)
        handlers = Handlers(
            self._submit, self._interrupt, self._live_lines, self._status, lambda: self.working
        )
        self.terminal = Terminal(handlers, self.completer, state_folder() / "history")
        self._work: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._queue: list[str] = []
        self._waiting: list[str] = []
        self._asking = asyncio.Lock()
        self._asked = ""
        self._doing = ""
        self._since = 0.0
        self._first_delta = 0.0
        self._facts = ""
        self._speed = ""
        self._reading = False
        """Whether a model is still being read for which nobody waits any more."""
        self._asides: set[asyncio.Task[None]] = set()

    @property
    def working(self) -> bool:
        """Whether something runs."""
        return self._work is not None

    async def run(self) -> None:
        """See `talk`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.terminal.leave)
        try:
            await self.terminal.run(self._open_first)
        finally:
            await self._end()
        if self._fault is not None:
            raise self._fault

    async def _end(self) -> None:
        """Whatever still runs ends, then everything is closed."""
        work = self._work
        if work is not None:
            if self.live is not None:
                await self.live.session.cancel()
            work.cancel()
            await asyncio.wait([work], timeout=_CLOSE_SECONDS)
        live = self.live
        await self.close_session()
        loading = self._reading or (self.bench is not None and self.bench.loading)
        if self.bench is not None:
            await self.bench.close()
        if live is not None and live.used:
            self.terminal.farewell(f"go on with: etude --resume {live.session.session_id}")
        if loading:
            # A model that is being read cannot be interrupted; everything else is closed.
            os._exit(0)

    # Sessions.

    async def _open_first(self) -> None:
        self.start(self._first(), "opening")

    async def _first(self) -> None:
        try:
            await self.open(self.choices)
        except EtudeError as error:
            self._fault = error
            self.terminal.leave()

    async def open(self, choices: Choices) -> None:
        """Open another session in place of this one. Raises EtudeError; then this one stays."""
        opening = await asyncio.to_thread(_import_opening)
        if choices.resume == PICK:
            choices = replace(choices, resume=await self._pick(choices))
        bench, target = await asyncio.to_thread(opening.open_bench, choices)
        old = self.bench
        try:
            await self._open_on(bench, target)
        except BaseException:
            self._reading = self._reading or bench.loading
            await bench.close()
            raise
        self.choices = choices
        if old is not None:
            await old.close()

    async def reopen(self, target: Target) -> None:
        """Another session with the same model. Raises EtudeError; then this one stays."""
        if self.bench is not None:
            await self._open_on(self.bench, target)

    async def _open_on(self, bench: Bench, target: Target) -> None:
        from etude.agent.live import Drivers
        from etude.cli.opening import Target, open_session

        if self.live is not None and target == Target(self.live.session.session_id):
            raise EtudeError("this session is open already")
        self._doing, self._since = f"reading the model {bench.name}", time.monotonic()
        drivers = Drivers(
            backend=bench.backend,
            open_sandbox=bench.sandbox,
            asker=self._ask_permission,
            ask=self._ask_person,
            on_event=self._on_event,
            on_delta=self._on_delta,
            on_child_event=self._on_child_event,
            say=self.say,
        )
        shown, self.show, told = self.show, Show(), list[str]()
        try:
            opened = await open_session(bench, target, drivers, told.append)
        except BaseException:
            self.show = shown
            raise
        await self.close_session()
        self._opened, self.bench = opened, bench
        self.live = live = opened.live
        self.completer.project = live.options.project
        self._replay(live, told)
        self._take_facts()

    def _replay(self, live: LiveSession, told: Sequence[str]) -> None:
        """The head of a session, and what was said in it before."""
        session = live.session
        head = f"{self.bench.name if self.bench else ''} in {live.options.project}"
        self.say(f"etude · {head}", "bold")
        self.say(f"session {session.session_id} · /help says what there is", "dim")
        for sentence in told:
            self.say(sentence, "yellow")
        old: list[Line] = []
        for event in session.events:
            old += self.show.event(event)
        if len(old) > _REPLAYED:
            old = [line((f"… {len(old) - _REPLAYED} earlier lines", "dim")), *old[-_REPLAYED:]]
        self.terminal.print(old)

    async def close_session(self) -> None:
        """Close the open session, if any."""
        opened, self._opened, self.live = self._opened, None, None
        if opened is not None:
            await opened.close()

    async def _pick(self, choices: Choices) -> str:
        """Let the person choose among the sessions of the folder. Raises EtudeError."""
        from etude.cli.history import describe
        from etude.cli.opening import session_store

        found = session_store().list(choices.folder.resolve())[:20]
        if not found:
            raise EtudeError(f"there is no session of {choices.folder.resolve()} to go on with")
        self.terminal.print([line((text, "")) for text in describe(found)])
        answer = await self.ask_line("Which one? Its number (Enter: the newest)")
        if not answer:
            return found[0].id
        if not answer.isdecimal() or not 1 <= int(answer) <= len(found):
            raise EtudeError(f"there is no session number {answer}")
        return found[int(answer) - 1].id

    # What the person does.

    def start(self, work: Coroutine[Any, Any, None], doing: str) -> None:
        """Run something while the terminal goes on. What an EtudeError says is shown."""
        self._doing, self._since = doing, time.monotonic()
        self._work = asyncio.ensure_future(self._guarded(work))

    def aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Something short that may run beside the session's work."""

        async def guarded() -> None:
            try:
                await work
            except EtudeError as error:
                self.say(str(error), "red")
            self._take_facts()

        task = asyncio.ensure_future(guarded())
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            while self._queue and self.live is not None:
                text = self._queue.pop(0)
                self._since = time.monotonic()
                await self.live.prompt(text)
        except EtudeError as error:
            if not self._shown(error):
                self.say(str(error), "red")
        except asyncio.CancelledError:
            if self.live is None:
                self.terminal.leave()  # Not even opened: nothing to stay for.
        except BaseException as error:  # noqa: BLE001 (raised again where the terminal ends)
            self._fault = error
            self.terminal.leave()
        finally:
            self._work = None
            self._asked = ""
            self._give_back()
            self._take_facts()

    def _shown(self, error: EtudeError) -> bool:
        """Whether the session's own word for how it ended said this already."""
        last = self.live.session.events[-1:] if self.live is not None else ()
        return any(e.kind is EventKind.STOP and e.data["detail"] == str(error) for e in last)

    def _give_back(self) -> None:
        """Messages that nobody has read go back into the input."""
        unread, self._queue, self._waiting = self._queue, [], []
        if unread and self.live is None:
            self.say("no session is open; /clear begins one, /resume goes on with one", "red")
        if unread and not self.terminal.input.text:
            self.terminal.input.insert_text("\n".join(unread))

    def _submit(self, text: str) -> None:
        word = text.split(maxsplit=1)[0]
        if word.startswith("/") and "/" not in word[1:]:
            self.say(f"› {text}", "bold")
            run_command(self, word[1:], text[len(word) :].strip())
        elif self.live is not None and self.live.session.busy:
            self._waiting.append(text)
            self.live.session.steer(text)
        else:
            self._waiting.append(text)
            self._queue.append(text)
            if not self.working:
                self.start(_nothing(), "reading")
        self.terminal.redraw()

    def _interrupt(self) -> bool:
        if self._work is None:
            return False
        if self.live is not None and self.live.session.busy:
            self.aside(self.live.session.cancel())
        else:
            self._work.cancel()
        self._give_back()
        return True

    # What the session does.

    def _on_event(self, event: Event) -> None:
        self.terminal.print(self.show.event(event))
        name = str(event.data.get("name", ""))
        match event.kind:
            case EventKind.USER:
                del self._waiting[:1]
                self._doing = "reading"
            case EventKind.TOOL_CALL:
                self._doing = f"running {name}"
            case EventKind.TOOL_RESULT:
                self._doing = "reading"
            case EventKind.ASSISTANT:
                self._take_facts(event)
            case _:
                pass

    def _on_delta(self, delta: Delta) -> None:
        self._first_delta = self._first_delta or time.monotonic()
        self._doing = {"thinking": "thinking", "text": "writing"}.get(delta.kind, "")
        self.terminal.print(self.show.delta(delta))
        if not self._doing:
            self._doing = f"writing a call, {self.show.call_characters} characters"
        self.terminal.redraw()

    def _on_child_event(self, session_id: str, event: Event) -> None:
        self.terminal.print(self.show.child(session_id, event))

    def say(self, text: str, style: str = "") -> None:
        """A word of the program's own."""
        self.terminal.print(self.show.say(text, style))

    # Questions.

    async def _ask_permission(self, question: Question) -> Decision:
        from etude.cli.asking import decide

        async with self._asking:
            self.show.already_shown(question.request.call_id)
            return await decide(self, question)

    async def _ask_person(self, question: str, options: Sequence[str]) -> str:
        async with self._asking:
            self.terminal.print([line(), *lines(question, "bold", first="? ", rest="  ")])
            for number, option in enumerate(options, 1):
                self.terminal.print([line(f"  {number}. {option}")])
            hint = "a number or your own words" if options else "your answer"
            answer = await self.ask_line(hint)
            if answer.isdecimal() and 1 <= int(answer) <= len(options):
                return options[int(answer) - 1]
            return answer

    async def ask_line(self, hint: str) -> str:
        """A line that the person types as an answer."""
        self._asked = hint
        try:
            return await self.terminal.line()
        finally:
            self._asked = ""

    async def ask_key(self, hint: str, keys: str) -> str:
        """One of these keys."""
        self._asked = hint
        try:
            return await self.terminal.choose(keys)
        finally:
            self._asked = ""

    # What is drawn below the transcript.

    def _live_lines(self, width: int, height: int) -> list[Line]:
        out: list[Line] = []
        text, style = self.show.partial
        if text.strip():
            whole = line((text[-width * height :], style))
            starts = row_starts(whole.plain, width)
            begin = starts[max(0, len(starts) - max(1, height // 3))]
            out.append(whole[begin:])
        out += [line((f"› {shortened(text, 200)}", "dim")) for text in self._waiting[:3]]
        if self._asked:
            out.append(line((self._asked, "bold yellow")))
        elif self.working:
            seconds = time.monotonic() - self._since
            frame = _FRAMES[int(seconds * 10) % len(_FRAMES)]
            out.append(line((f"{frame} {self._doing} · {seconds:.0f} s · Esc interrupts", "cyan")))
        return out

    def _status(self) -> str:
        return self._facts or "opening …"

    def _take_facts(self, answer: Event | None = None) -> None:
        """The status line; the context is measured only when it has changed."""
        live = self.live
        if live is None or self.bench is None:
            self._facts = ""
            return
        used, length = live.session.context_used
        parts = [self.bench.name, live.mode.value, f"effort {live.effort.value}"]
        parts.append(f"{100 * used / length:.0f} % of {length / 1000:.0f}k")
        if self.bench.backend.price is not None:
            parts.append(f"${live.session.budget.spent:.4f}")
        if answer is not None and self._first_delta:
            seconds = max(1e-3, time.monotonic() - self._first_delta)
            self._speed = f"{answer.data['sampled_tokens'] / seconds:.0f} tok/s"
            self._first_delta = 0.0
        parts.append(self._speed)
        self._facts = visible(" · ".join(part for part in parts if part))
        self.terminal.redraw()


async def _nothing() -> None:
    """The queue is what is to be done."""


def _import_opening() -> Any:
    """Everything heavy, once the prompt stands on the screen."""
    import etude.cli.opening

    return etude.cli.opening
