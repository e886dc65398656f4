"""The terminal session on a real pseudo-terminal, seen through a terminal emulator."""

from __future__ import annotations

import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cli_place import Place, running

EDIT = {"calls": [["edit", {"path": "a.py", "old": "hello = 1", "new": "hello = 2"}]]}
LONG = "\n".join(
    f"{n}. the quick brown fox jumps over the lazy dog, and over {n} others" for n in range(30)
)


def body(lines: list[str]) -> list[str]:
    """Without the status line, which tells the speed, and empty lines at the end."""
    kept = [text for text in lines if " · effort " not in text]
    while kept and not kept[-1]:
        kept.pop()
    return kept


def session_id(place: Place) -> str:
    return place.sessions()[-1].stem


def test_the_prompt_stands_within_a_second(place: Place) -> None:
    """The best of some by the clock; on a machine that others use, by the processor's time until
    then, which is what it takes on a machine of one's own."""
    model = place.script()
    walls: list[float] = []
    processor: list[float] = []
    while len(walls) < 5 and not (walls and min(walls) < 1.0):
        began = time.monotonic()
        with place.terminal("--model", model) as screen:
            screen.wait("›")
            walls.append(time.monotonic() - began)
            processor.append(screen.processor_seconds())
            screen.type("/quit\r")
            screen.ends()
    shared = os.getloadavg()[0] > 1.5 * len(os.sched_getaffinity(0))
    assert min(walls) < 1.0 or (shared and min(processor) < 0.9), (walls, processor)


def test_a_question_shows_the_exact_change_and_runs_it_after_a_yes(place: Place) -> None:
    model = place.script({"text": "I change it.", **EDIT}, {"text": "All is done."})
    with place.terminal("--model", model) as screen:
        screen.wait("›")
        screen.type("please\r")
        text = screen.wait("y yes, once")
        assert "- hello = 1" in text and "+ hello = 2" in text and "may edit run?" in text
        assert screen.colour_of("- hello = 1") == "red"
        assert screen.colour_of("+ hello = 2") == "green"
        assert (place.project / "a.py").read_text() == "hello = 1\n"
        time.sleep(0.7)
        screen.type("y")
        screen.wait("All is done")
        assert (place.project / "a.py").read_text() == "hello = 2\n"
        text = "\n".join(screen.still())
        assert re.search(r"script s\.json · ask · effort medium · \d+ % of 66k · \$0\.0000", text)
        screen.type("/diff\r")
        screen.wait(r"\+hello = 2")
        screen.type("/undo\r")
        screen.wait("files were put back")
        assert (place.project / "a.py").read_text() == "hello = 1\n"
        screen.type("\x04")
        assert screen.ends() == 0
        screen.wait(f"etude --resume {session_id(place)}")
        assert b"\x1b[?1049h" not in screen.raw  # Never the alternate screen.
        assert b"\x1b[3J" not in screen.raw  # The scrollback is the person's.


def test_a_no_has_a_reason_and_early_keys_are_no_answer(place: Place) -> None:
    model = place.script(EDIT, {"text": "Then not."})
    with place.terminal("--model", model) as screen:
        screen.wait("›")
        screen.type("please\r")
        screen.wait("y yes, once")
        screen.type("yyy")  # Meant for something else: nobody can have read the question.
        time.sleep(1.0)
        assert "y yes, once" in screen.text()
        screen.type("n")
        screen.wait("Why not")
        screen.type("I like it as it is\r")
        screen.wait("Then not")
        assert "the person said no: I like it as it is" in " ".join(screen.lines())
        assert (place.project / "a.py").read_text() == "hello = 1\n"
        assert screen.text().rstrip().splitlines()[-1].endswith("› yyy")


def test_always_shows_the_rule_and_writes_it(place: Place) -> None:
    again = {"calls": [["edit", {"path": "a.py", "old": "hello = 2", "new": "hello = 3"}]]}
    model = place.script(EDIT, again, {"text": "Both done."})
    with place.terminal("--model", model) as screen:
        screen.wait("›")
        screen.type("please\r")
        screen.wait("a always")
        time.sleep(0.7)
        screen.type("a")
        screen.wait("allow edit")
        assert not (place.config / "settings.toml").exists()
        time.sleep(0.7)
        screen.type("y")
        screen.wait("Both done")
    assert "edit(a.py)" in (place.config / "settings.toml").read_text()
    assert (place.project / "a.py").read_text() == "hello = 3\n"


@pytest.mark.parametrize(("text", "start"), [(LONG, (80, 24)), ("short\n\nand sweet", (60, 20))])
def test_after_ten_resizes_the_screen_is_a_fresh_one(
    place: Place, text: str, start: tuple[int, int]
) -> None:
    """Case 27. A fresh start is the same session, resumed at the final size."""
    model = place.script({"text": text}, seconds_per_token=0.002 if text is LONG else 0.05)
    sizes = [(60, 20), (100, 30), (33, 12), (80, 24), (120, 40), (50, 10), (79, 25), (40, 40)]
    sizes += [(90, 15), (64, 18)]
    with place.terminal("--model", model, columns=start[0], rows=start[1]) as screen:
        screen.wait("›")
        screen.type("tell me\r")
        screen.wait("quick brown|short")
        for columns, rows in sizes:
            screen.resize(columns, rows)
            time.sleep(0.08)
        screen.wait(lambda shown: "Esc interrupts" not in shown)
        resized = screen.still()
    with place.terminal("--resume", session_id(place), columns=64, rows=18) as fresh:
        fresh.wait("effort medium")
        assert body(fresh.still()) == body(resized)
    assert text.splitlines()[-1][:20] in "\n".join(resized)


def test_escape_interrupts_and_the_session_goes_on(place: Place) -> None:
    model = place.script({"text": LONG}, {"text": "Again."}, seconds_per_token=0.02)
    with place.terminal("--model", model) as screen:
        screen.wait("›")
        screen.type("tell me\r")
        screen.wait("quick brown")
        began = time.monotonic()
        screen.type("\x1b")
        screen.wait(r"\[cancelled\]")
        assert time.monotonic() - began < 2
        screen.type("and now\r")
        screen.wait("Again")
        screen.wait(lambda shown: "Esc interrupts" not in shown)
        screen.type("half a message\x03")
        screen.wait(lambda shown: "half a message" not in shown)
        screen.type("\x03")
        assert screen.ends() == 0


def test_what_is_typed_meanwhile_steers(place: Place) -> None:
    calls = {"calls": [["shell", {"command": "sleep 2.5"}]]}
    model = place.script(calls, {"text": "I heard you."})
    with place.terminal("--model", model, "--mode", "auto") as screen:
        screen.wait("›")
        screen.type("begin\r")
        screen.wait("running shell")
        screen.type("one more thing\r")
        text = screen.wait("I heard you")
        assert text.index("sleep 2.5") < text.index("› one more thing") < text.index("I heard")


def test_no_text_of_the_model_or_a_file_moves_the_screen(place: Place) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x1b[1;1Hforged\x1b[?1049h\u202egnirts\x9b31m\r\b"
    (place.project / "e\x1b[2Jvil.txt").write_text("x")
    calls = {"text": evil, "calls": [["shell", {"command": f"echo '{evil}'; ls"}]]}
    model = place.script(calls, {"text": "[bold]The end[/bold]"})
    with place.terminal("--model", model, "--mode", "auto") as screen:
        screen.wait("›")
        screen.type("go \x1b[200~pasted\x1b]0;owned\x07\x1b[201~ on\r")
        screen.wait("The end")
        text = "\n".join(screen.still())
        assert screen.screen.title == ""
        assert "etude · script s.json" in text and "[bold]The end[/bold]" in text
        assert "␛[2J" in text and "<U+202E>" in text and "e␛[2Jvil.txt" in text
        for bad in (b"\x1b]0;", b"\x1b[2J", b"\x1b[?1049h", "\u202e".encode(), b"\x08"):
            assert bad not in screen.raw


def test_the_picker_fork_and_modes(place: Place) -> None:
    model = place.script({"text": "First answer."}, {"text": "Second answer."})
    with place.terminal("--model", model) as screen:
        screen.wait("›")
        screen.type("one\r")
        screen.wait("First answer")
        screen.type("two\r")
        screen.wait("Second answer")
        screen.type("/fork 0\r")
        screen.wait(lambda text: text.count("First answer") == 2)
        assert screen.text().count("Second answer") == 1
        screen.type("/mode plan\r")
        screen.wait("· plan ·")
        screen.type("/nonsense\r")
        screen.wait("there is no /nonsense")
        screen.type("/quit\r")
        assert screen.ends() == 0
    assert len(place.sessions()) == 2
    with place.terminal("--resume") as screen:
        screen.wait("Which one")
        assert screen.text().count("one") >= 2
        screen.type("2\r")
        screen.wait("Second answer")
        screen.wait("effort medium")


def test_completion_of_commands_and_files(place: Place) -> None:
    (place.project / "src").mkdir()
    (place.project / "src" / "module.py").write_text("")
    with place.terminal("--model", place.script()) as screen:
        screen.wait("effort medium")
        screen.type("/summ")
        screen.wait("/summarize")
        screen.type("\x03look at @sr")
        screen.wait("src/")
        screen.type("\t")
        screen.wait("look at @src/")
        screen.type("mod\t")
        screen.wait("look at @src/module.py")


def test_a_terminal_that_is_closed_leaves_nothing(place: Place) -> None:
    calls = {"calls": [["shell", {"command": "sleep 987.5"}]]}
    model = place.script(calls)
    with place.terminal("--model", model, "--mode", "auto") as screen:
        screen.wait("›")
        screen.type("begin\r")
        screen.wait("running shell")
        end = time.monotonic() + 20
        while not running(["sleep", "987.5"]) and time.monotonic() < end:
            time.sleep(0.05)
        assert running(["sleep", "987.5"])
        screen.process.terminate()
        screen.ends()
        assert not running(["sleep", "987.5"])
    log = place.sessions()[-1].read_text()
    assert '"interrupted"' in log and '"cancelled"' in log
    other = place.script({"text": "It goes on."}, name="other")
    done = place.run("-p", "on", "--resume", "last", "--model", other)
    assert (done.returncode, done.stdout) == (0, "It goes on.\n"), done.stderr


def test_a_model_that_is_not_there_is_one_sentence(place: Place) -> None:
    with place.terminal("--model", "script:/nowhere.json") as screen:
        assert screen.ends() == 2
        screen.wait("etude: .*/nowhere.json")
        assert "Traceback" not in screen.text()


def test_a_window_of_any_size_is_survived(place: Place) -> None:
    with place.terminal("--model", place.script({"text": LONG})) as screen:
        screen.wait("effort medium")
        for columns, rows in [(1, 1), (2, 3), (7, 2), (1, 40), (300, 1), (80, 24)]:
            screen.resize(columns, rows)
            time.sleep(0.2)
        screen.type("tell me\r")
        screen.wait("29. the quick brown")
        screen.resize(3, 3)
        time.sleep(0.2)
        screen.resize(80, 24)
        screen.wait("29. the quick brown")
        screen.type("/quit\r")
        assert screen.ends() == 0


def test_a_session_in_which_nothing_was_said_is_not_kept(place: Place) -> None:
    with place.terminal("--model", place.script()) as screen:
        screen.wait("effort medium")
        assert len(place.sessions()) == 1
        screen.type("\x04")
        assert screen.ends() == 0
    assert place.sessions() == []


def test_a_model_that_cannot_be_opened_keeps_the_open_session(place: Place) -> None:
    model = place.script({"text": "First answer."}, {"text": "Still here."})
    with place.terminal("--model", model) as screen:
        screen.wait("›")
        screen.type("one\r")
        screen.wait("First answer")
        screen.type("/model no-such-model\r")
        screen.wait("there is no model 'no-such-model'")
        screen.wait(lambda text: "Esc interrupts" not in text)
        assert len(place.sessions()) == 1
        screen.type("two\r")
        screen.wait("Still here")
        screen.type(f"/resume {session_id(place)}\r")
        screen.wait("is open already")
        screen.type("/clear\r")
        screen.wait(lambda text: "session 2" in text and "Still here" not in text)
        other = place.script({"text": "Another."}, name="other")
        screen.type(f"/model {other}\r")
        screen.wait("script other.json · ask")
        screen.type("three\r")
        screen.wait("Another")
        screen.type("/quit\r")
        assert screen.ends() == 0
    assert len(place.sessions()) == 2


class Refusing(BaseHTTPRequestHandler):
    """A service that takes no key."""

    def do_POST(self) -> None:
        self.send_error(401, "No")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_an_error_of_a_service_is_said_once(place: Place) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        words = ["--model", "m", "--url", f"http://{address}/v1", "--context", "9999"]
        with place.terminal(*words, columns=200) as screen:
            screen.wait("effort medium")
            screen.type("hello\r")
            screen.wait(address)
            screen.wait(lambda text: "Esc interrupts" not in text)
            assert "\n".join(screen.still()).count(address) == 1
            screen.type("/quit\r")
            assert screen.ends() == 0
        server.shutdown()


def test_a_half_written_event_is_told_when_a_session_goes_on(place: Place) -> None:
    """Case 12."""
    model = place.script({"text": "First answer."})
    assert place.run("-p", "one", "--model", model).returncode == 0
    log = place.sessions()[-1]
    log.write_bytes(log.read_bytes()[:-9])
    with place.terminal("--continue") as screen:
        text = screen.wait("First answer")
        assert "was only half written" in text.replace("\n", "")


@pytest.mark.slow
def test_history_is_kept_for_oneself(place: Place) -> None:
    model = place.script({"text": "Yes."})
    with place.terminal("--model", model) as screen:
        screen.wait("effort medium")
        screen.type("a line\nand another\r")
        screen.wait("Yes")
    history: Path = place.root / "state" / "history"
    assert "+a line\n+and another" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    with place.terminal("--model", model) as screen:
        screen.wait("effort medium")
        screen.type("\x1b[A")
        screen.wait("› a line\n  and another")
