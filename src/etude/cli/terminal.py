"""The terminal of a session: a transcript in the terminal's own scrollback, and below it a small
region that is redrawn: what is being written, the input, a status line.

The transcript is only ever appended to. After a change of the window's size the visible screen is
written anew, so that it shows what a fresh start at that size would show; what has scrolled away
belongs to the terminal, which reflows it or does not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import (
    BufferControl,
    ConditionalContainer,
    FormattedTextControl,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from etude.cli.lines import Ansi, Line, count_rows, last_rows, line
from etude.cli.visible import visible

_KEPT_LINES = 4000
"""Of the transcript, for painting the screen anew."""
_COMPLETIONS = 6
_GRACE = 0.5
"""Seconds in which a key cannot be meant for a question that has just appeared."""
_PUSH_EVERY = 1.0
_TICK, _IDLE_TICK = 0.1, 0.5
_STYLE = Style.from_dict(
    {"status": "fg:ansibrightblack", "prompt": "bold fg:ansicyan", "chosen": "reverse"}
)


@dataclass
class Handlers:
    """What the terminal calls. `live` gives the lines above the input for a width and a height, at
    least one: where the region shrank, what has scrolled away could not be had back. `status`
    gives the line below the input, `working` whether something runs, so that time passes on
    screen."""

    submit: Callable[[str], None]
    interrupt: Callable[[], bool]
    live: Callable[[int, int], list[Line]]
    status: Callable[[], str]
    working: Callable[[], bool]


@dataclass
class _Question:
    keys: frozenset[str]
    answer: asyncio.Future[str]
    since: float


class _Application(Application[None]):
    """Redraws at a new size without first erasing at the old one: how the terminal has moved what
    stood there, nobody knows."""

    def _on_resize(self) -> None:
        self._redraw()


class Terminal:
    """See the module. Use it from one event loop."""

    def __init__(self, handlers: Handlers, completer: Completer, history: Path | None) -> None:
        self._handlers = handlers
        self._completer = completer
        self._ansi = Ansi(colour=True)
        self._kept: list[Line] = []
        self._pending: list[Line] = []
        self._size: Size | None = None
        self._drawn: list[int] = [1]
        self._owned = False
        self._pushed = 0.0
        self._question: _Question | None = None
        self._line: asyncio.Future[str] | None = None
        self._leaving = False
        self.input = Buffer(
            completer=completer,
            complete_while_typing=True,
            history=_history(history),
            multiline=True,
        )
        # Where the cursor is, is never asked: an answer may come late, or as typed text.
        self._output = Vt100_Output(
            sys.stdout, _window_size, term=os.environ.get("TERM"), enable_cpr=False
        )
        self._app = _Application(
            layout=self._layout(),
            key_bindings=self._keys(),
            style=_STYLE,
            full_screen=False,
            erase_when_done=True,
            min_redraw_interval=0.02,
            input=create_input(),
            output=self._output,
            before_render=self._before_render,
            after_render=self._after_render,
            enable_page_navigation_bindings=False,
        )
        self._app.ttimeoutlen = 0.05
        self._app.timeoutlen = 0.2

    async def run(self, ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until `leave`, or until the terminal is gone. `ready` runs once the prompt stands on the
        screen."""
        tick = asyncio.ensure_future(self._tick())
        first = None
        try:
            if ready is not None:
                first = asyncio.ensure_future(ready())
            await self._app.run_async()
        except EOFError:
            self._pending.clear()  # Nobody is there to read it.
        finally:
            for task in (tick, first):
                if task is not None:
                    task.cancel()
            self._write_pending()

    def farewell(self, text: str) -> None:
        """A last line, after `run`."""
        for shown in self._ansi.encode([line((text, "dim"))]):
            self._output.write_raw(f"{shown}\r\n")
        self._output.flush()

    def leave(self) -> None:
        """End `run`."""
        if self._app.is_running and not self._leaving:
            self._leaving = True
            self._app.exit()

    def print(self, lines: Sequence[Line]) -> None:
        """Append to the transcript."""
        if lines:
            self._pending += lines
            self.redraw()

    def redraw(self) -> None:
        """The region has changed."""
        if self._app.is_running:
            self._app.invalidate()

    def clear(self) -> None:
        """An empty screen; what stood there is in the scrollback."""
        self._kept.clear()
        self._owned = False
        self._refresh()

    async def choose(self, keys: str) -> str:
        """Wait for one of these keys. Keys that were pressed before the question could have been
        read are not answers."""
        self._question = _Question(
            frozenset(keys), asyncio.get_running_loop().create_future(), time.monotonic()
        )
        self.redraw()
        try:
            return await self._question.answer
        finally:
            self._question = None
            self.redraw()

    async def line(self) -> str:
        """Wait for a line; what was being typed comes back afterwards."""
        kept, cursor = self.input.text, self.input.cursor_position
        self.input.reset()
        self._line = asyncio.get_running_loop().create_future()
        self.redraw()
        try:
            return await self._line
        finally:
            self._line = None
            self.input.reset(Document(kept, cursor))
            self.redraw()

    # What is drawn.

    def _layout(self) -> Layout:
        """The cursor stands in the last row, as a rule: when a window gets lower, terminals cut
        off what is below it."""
        live = Window(
            FormattedTextControl(self._live), wrap_lines=True, dont_extend_height=True, height=None
        )
        typed = Window(
            BufferControl(self.input),
            height=Dimension(min=1, max=10),
            wrap_lines=True,
            dont_extend_height=True,
            get_line_prefix=lambda number, wrapped: [
                ("class:prompt", "› " if number == 0 and not wrapped else "  ")
            ],
        )
        offered = ConditionalContainer(
            Window(FormattedTextControl(self._offered), dont_extend_height=True),
            Condition(lambda: self.input.complete_state is not None),
        )
        status = Window(
            FormattedTextControl(lambda: [("class:status", self._handlers.status())]),
            height=1,
            dont_extend_height=True,
        )
        return Layout(HSplit([live, status, typed, offered]), focused_element=typed)

    def _live(self) -> ANSI:
        size = self._output.get_size()
        live = self._handlers.live(size.columns, size.rows)
        return ANSI("\n".join(self._ansi.encode(live)))

    def _offered(self) -> StyleAndTextTuples:
        state = self.input.complete_state
        if state is None:
            return []
        chosen = state.complete_index
        first = 0 if chosen is None else max(0, chosen - _COMPLETIONS + 1)
        out: StyleAndTextTuples = []
        for index, found in enumerate(state.completions[first : first + _COMPLETIONS], first):
            style = "class:chosen" if index == chosen else "class:status"
            words = f"{found.display_text}  {found.display_meta_text}".rstrip()
            out += [("", "\n")] * bool(out)
            out.append((style, f"  {visible(words)}"))
        return out

    async def _tick(self) -> None:
        while True:
            working = self._handlers.working()
            await asyncio.sleep(_TICK if working else _IDLE_TICK)
            if working:
                self.redraw()

    # The transcript.

    def _before_render(self, app: Application[None]) -> None:
        size = self._output.get_size()
        if self._size is not None and size != self._size:
            self._paint_anew(size)
            self._write_pending()
        elif self._pending:
            app.renderer.erase()
            self._write_pending()
        self._size = size

    def _after_render(self, app: Application[None]) -> None:
        """Keep how long the rows of the region are, down to the cursor's."""
        screen = app.renderer.last_rendered_screen
        if screen is not None:
            cursor = screen.get_cursor_position(app.layout.current_window)
            rows = [screen.data_buffer[row] for row in range(cursor.y + 1)]
            self._drawn = [
                max((x + 1 for x, char in row.items() if char.char.strip()), default=1)
                for row in rows
            ]

    def _write_pending(self) -> None:
        """Append for good; the cursor stands where the next line goes."""
        for text in self._ansi.encode(self._pending):
            self._output.write_raw(f"{text}\r\n")
        self._output.flush()
        self._kept = [*self._kept, *self._pending][-_KEPT_LINES:]
        self._pending = []

    def _paint_anew(self, size: Size) -> None:
        """The visible screen as a fresh start would show it.

        Terminals reflow: the last rows of the transcript stand there already, above as many rows
        as the region takes at its new width. As many rows are written again, so that none is lost
        and hardly one comes twice; what the region needs beyond that moves up as it is drawn."""
        output = self._output
        region = self._app.layout.container.preferred_height(size.columns, size.rows).preferred
        reflowed = sum(-(-length // size.columns) for length in self._drawn)
        room = max(0, size.rows - min(region, reflowed))
        shown = last_rows(self._kept, size.columns, room)
        output.reset_attributes()
        output.enable_autowrap()
        grown = self._size is None or size.rows > self._size.rows
        if count_rows(shown, size.columns) < room and (grown or not self._owned):
            self._push(size)
        # Row by row: erasing all at once would make some terminals keep it as history.
        for row in range(size.rows):
            output.cursor_goto(row + 1, 1)
            output.write_raw("\x1b[2K")
        output.cursor_goto(1, 1)
        for text in self._ansi.encode(shown):
            output.write_raw(f"{text}\r\n")
        output.flush()
        self._app.renderer.reset()

    def _push(self, size: Size) -> None:
        """Move what the screen shows into the scrollback: some of it may be older than the
        session. Once in a while only, since a window that is being dragged has many sizes."""
        now = time.monotonic()
        if now - self._pushed > _PUSH_EVERY:
            self._output.cursor_goto(size.rows, 1)
            self._output.write_raw("\r\n" * size.rows)
        self._owned, self._pushed = True, now

    # Keys.

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        asking = Condition(self._takes_keys)
        keys.add("<any>", filter=asking, eager=True)(self._key_of_answer)
        keys.add("enter", filter=~asking)(self._enter)
        for newline in (("escape", "enter"), ("c-j",)):
            keys.add(*newline, filter=~asking)(self._newline)
        keys.add("tab", filter=~asking)(self._complete)
        for end in ("escape", "c-c", "<sigint>"):
            keys.add(end, eager=end == "c-c")(self._interrupt)
        keys.add("c-d", filter=Condition(lambda: not self.input.text))(self._end_of_input)
        keys.add("c-l")(self._refresh)
        keys.add("c-z")(self._suspend)
        return keys

    def _key_of_answer(self, event: KeyPressEvent) -> None:
        question, key = self._question, event.data.lower()
        if question is not None and key in question.keys and not question.answer.done():
            question.answer.set_result(key)

    def _newline(self, event: KeyPressEvent) -> None:
        self.input.insert_text("\n")

    def _complete(self, event: KeyPressEvent) -> None:
        if self.input.complete_state is not None:
            self.input.complete_next()
            return
        asked = CompleteEvent(completion_requested=True)
        found = list(self._completer.get_completions(self.input.document, asked))
        if len(found) == 1:
            self.input.apply_completion(found[0])
        elif found:
            self.input.start_completion(select_first=True)

    def _end_of_input(self, event: KeyPressEvent) -> None:
        if not self._handlers.working():
            self.leave()

    def _suspend(self, event: KeyPressEvent) -> None:
        self._app.suspend_to_background()

    def _refresh(self, event: KeyPressEvent | None = None) -> None:
        self._size = Size(0, 0)  # Paints anew.
        self.redraw()

    def _takes_keys(self) -> bool:
        question = self._question
        return question is not None and time.monotonic() - question.since > _GRACE

    def _enter(self, event: KeyPressEvent) -> None:
        state = self.input.complete_state
        if state is not None and state.current_completion is not None:
            self.input.complete_state = None
            return
        text = self.input.text
        if self._line is not None:
            if not self._line.done():
                self._line.set_result(text.strip())
            return
        if text.strip():
            self.input.append_to_history()
            self.input.reset()
            self._handlers.submit(text.strip())

    def _interrupt(self, event: KeyPressEvent) -> None:
        """End what runs; else clear the input; else, with Ctrl-C, leave."""
        key_is_escape = event.key_sequence[0].key == "escape"
        if self.input.complete_state is not None and key_is_escape:
            self.input.cancel_completion()
        elif self._handlers.interrupt():
            for waiting in (self._question and self._question.answer, self._line):
                if waiting is not None and not waiting.done():
                    waiting.cancel()
        elif self.input.text:
            if not key_is_escape:
                self.input.reset()
        elif not key_is_escape:
            self.leave()


def _window_size() -> Size:
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:  # The window is gone.
        columns, rows = 0, 0
    return Size(rows=rows or 24, columns=columns or 80)


def _history(path: Path | None) -> History:
    """What was typed, kept for the next session; nobody else's business."""
    if path is None:
        return InMemoryHistory()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    return FileHistory(str(path))
