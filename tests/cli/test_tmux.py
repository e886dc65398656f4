"""The terminal session inside tmux: a real terminal, which reflows and keeps a scrollback."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_place import Place

from etude.cli.lines import row_starts

pytestmark = [
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
    pytest.mark.timeout(240),
    pytest.mark.slow,
]
LONG = "\n".join(
    f"{n}. the quick brown fox jumps over the lazy dog, and over {n} others" for n in range(60)
)
DEADLINE = 60.0


class Tmux:
    """One window of a tmux server of its own."""

    def __init__(self, socket: Path, place: Place) -> None:
        self._socket = socket
        self._place = place

    def call(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), "-f", "/dev/null", *words],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout

    def start(self, *words: str, columns: int, rows: int) -> None:
        self.call("kill-server")
        env = [f"-e{name}={value}" for name, value in self._place.env.items()]
        size = ["-x", str(columns), "-y", str(rows)]
        here = ["-c", str(self._place.project)]
        self.call("new-session", "-d", *size, *env, *here, *self._place.argv(*words))
        self.call("set-option", "-g", "remain-on-exit", "on")

    def resize(self, columns: int, rows: int) -> None:
        self.call("resize-window", "-x", str(columns), "-y", str(rows))

    def type(self, text: str) -> None:
        self.call("send-keys", "-l", text)

    def key(self, name: str) -> None:
        self.call("send-keys", name)

    def lines(self) -> list[str]:
        return [text.rstrip() for text in self.call("capture-pane", "-p").split("\n")]

    def whole(self) -> str:
        """Scrollback and screen, lines that the terminal wrapped joined again."""
        return self.call("capture-pane", "-p", "-J", "-S", "-")

    def wait(self, what: str | Callable[[str], bool]) -> str:
        end = time.monotonic() + DEADLINE
        check = what if callable(what) else lambda text: re.search(what, text) is not None
        while time.monotonic() < end:
            text = "\n".join(self.lines())
            if check(text):
                return text
            time.sleep(0.05)
        raise AssertionError(f"not on the screen: {what}\n{self.lines()}")

    def still(self) -> list[str]:
        seen, since = self.lines(), time.monotonic()
        end = since + DEADLINE
        while time.monotonic() < end:
            time.sleep(0.1)
            now = self.lines()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > 1.0:
                return seen
        raise AssertionError(f"the screen does not come to rest\n{seen}")


@pytest.fixture
def tmux(place: Place, tmp_path: Path) -> Iterator[Tmux]:
    window = Tmux(tmp_path / "tmux", place)
    yield window
    window.call("kill-server")


def body(lines: list[str]) -> list[str]:
    kept = [text for text in lines if " · effort " not in text]
    while kept and not kept[-1]:
        kept.pop()
    return kept


def test_type_stream_resize_resume(place: Place, tmux: Tmux) -> None:
    """Case 27 once more, where the terminal itself moves what it shows. Nothing of a long
    transcript is lost or shown twice, in the scrollback either."""
    model = place.script({"text": LONG}, seconds_per_token=0.002)
    tmux.start("--model", model, columns=80, rows=24)
    tmux.wait("effort medium")
    tmux.type("tell me")
    tmux.key("Enter")
    tmux.wait("25. the quick brown")
    sizes = [(60, 20), (100, 22), (45, 12), (80, 24), (110, 23), (50, 10), (79, 20), (70, 21)]
    for columns, rows in [*sizes, (90, 15), (64, 18)]:
        tmux.resize(columns, rows)
        time.sleep(0.25)
    tmux.wait(lambda text: "Esc interrupts" not in text)
    resized = tmux.still()
    told = re.findall(r"(\d+)\. the quick", tmux.whole())
    assert sorted(set(told), key=int) == [str(n) for n in range(60)]
    assert len(told) <= 60 + 2 * len(sizes), "a row or two may come twice when a window narrows"
    tmux.key("C-d")
    tmux.wait("etude --resume")
    tmux.start("--resume", place.sessions()[-1].stem, columns=64, rows=18)
    tmux.wait("effort medium")
    assert body(tmux.still()) == body(resized)
    assert "59. the quick brown fox" in "\n".join(resized)


def test_interrupt(place: Place, tmux: Tmux) -> None:
    model = place.script({"text": LONG}, {"text": "Again."}, seconds_per_token=0.02)
    tmux.start("--model", model, columns=80, rows=24)
    tmux.wait("effort medium")
    tmux.type("tell me")
    tmux.key("Enter")
    tmux.wait("2. the quick brown")
    tmux.key("Escape")
    tmux.wait(r"\[cancelled\]")
    tmux.type("and now")
    tmux.key("Enter")
    tmux.wait("Again")
    tmux.wait(lambda text: "Esc interrupts" not in text)
    tmux.key("C-c")
    tmux.wait("etude --resume")


def test_wide_characters_wrap_as_they_are_counted(place: Place, tmux: Tmux, tmp_path: Path) -> None:
    text = "a漢字かな交じり文 and more 漢字 to wrap"
    file = tmp_path / "text"
    file.write_text(text + "\n")
    tmux.call("new-session", "-d", "-x", "80", "-y", "40", "sleep", "100")
    for width in (2, 3, 5, 7, 12):
        tmux.resize(width, 40)
        tmux.call("respawn-pane", "-k", "sh", "-c", f"cat '{file}'; echo END; sleep 100")
        tmux.wait("E")
        tmux.wait(lambda shown: shown.replace("\n", "").rstrip().endswith("END"))
        shown = tmux.lines()
        end = next(n for n, row in enumerate(shown) if row.startswith("EN"))
        assert end == len(row_starts(text, width)), (width, shown)
