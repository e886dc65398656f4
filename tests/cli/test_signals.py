"""Whatever a signal meets, the program ends with 130, or as it would have, and no traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ETUDE = "from etude.cli.app import main; main()"


def handles(pid: int, number: int) -> bool:
    """Whether a process catches a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def signalled(program: str, words: list[str], number: int, delays: list[float]) -> tuple[int, str]:
    """Exit code and stderr of a program that gets a signal after each delay, counted from when
    it handles signals at all."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not handles(process.pid, signal.SIGTERM):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    for delay in delays:
        time.sleep(delay)
        if process.poll() is None:
            os.kill(process.pid, number)
    try:
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_any_moment(number: int) -> None:
    rng = random.Random(number)
    ends: set[int] = set()
    for _ in range(12):
        delays = [rng.uniform(0, 0.6), rng.uniform(0, 0.02)]
        code, told = signalled(ETUDE, ["model", "list"], number, delays)
        assert code in (0, 130) and "Traceback" not in told, told
        ends.add(code)
    assert 130 in ends, "no signal met the program; the test shows nothing"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("atexit.register(os.kill, os.getpid(), {number})", 0),
        (
            "threading.Thread(target=time.sleep, args=(20,)).start();"
            " threading.Timer(1, os.kill, (os.getpid(), {number})).start()",
            130,
        ),
    ],
    ids=["when the interpreter ends", "while a thread is waited for"],
)
def test_after_the_work(last: str, code: int, number: int) -> None:
    program = f"import atexit, os, threading, time\n{last.format(number=int(number))}\n{ETUDE}"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith("etude "), "what was printed is not lost"
    assert time.monotonic() - began < 18


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_between_two_handlers(number: int) -> None:
    """A signal while the first one is being answered."""
    program = (
        "import os\nfrom etude.cli import app\n"
        "class Twice(SystemExit):\n"
        "    def __init__(self, *words):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        super().__init__(*words)\n"
        "app.sys.exit = lambda code=0: (_ for _ in ()).throw(Twice(code))\n"
        "app.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "tasks", "show", "/nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr


WORK = """
import asyncio, sys
from etude.cli.running import expect_signals, run

async def work():
    print("up", flush=True)
    try:
        await asyncio.sleep(50)
    finally:
        await asyncio.sleep(float(sys.argv[1]))
        print("closed", flush=True)

expect_signals()
try:
    run(work)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("ignored", [False, True], ids=["", "while SIGINT is ignored"])
@pytest.mark.parametrize(
    ("closing", "signals", "closed"), [("0.1", 1, "closed\n"), ("50", 2, "")], ids=["one", "two"]
)
def test_work_is_ended_and_closed_by_sigterm(
    closing: str, signals: int, closed: str, ignored: bool
) -> None:
    """What a shell starts in the background of a script ignores SIGINT from the beginning. A
    second signal does not wait for what the first one began to close."""
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if ignored else ""
    process = subprocess.Popen(
        [sys.executable, "-c", ignore + WORK, closing],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    for _ in range(signals):
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    out, told = process.communicate(timeout=40)
    assert (process.returncode, out, told) == (130, closed, "")


def test_an_interrupt_that_became_another_error_has_no_traceback() -> None:
    """Python itself makes a RuntimeError of one that meets the making of a class."""
    program = (
        "import os, signal\nfrom etude.cli import app\n"
        "class Name:\n    def __set_name__(self, owner, name):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "@app.app.command()\ndef broken():\n    class Made:\n        name = Name()\n"
        "app.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "broken"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_bug_still_has_its_traceback() -> None:
    program = "from etude.cli import app\n@app.app.command()\ndef broken():\n    1 / 0\napp.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "broken"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
