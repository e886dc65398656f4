"""Background jobs, commands side by side, and the guest that they share."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import ended, until

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.jobs import Tail
from etude.sandbox.protocol import ExecResult, Image, Limits, WorkspaceError
from etude.sandbox.workspace import BubblewrapWorkspace

PRIVILEGES = r"""
grep -E '^(Cap|NoNewPrivs)' /proc/self/status | tr -d '\t' | tr '\n' ' '
unshare -Ur true 2>/dev/null && echo namespaces
nsenter -t 1 -m true 2>/dev/null && echo entered
readlink /proc/1/exe && echo program
cat /proc/1/environ /proc/1/maps 2>/dev/null && echo memory
mount -o remount,rw / 2>/dev/null && echo mounts
kill -9 1; kill -TERM 1
(echo 1 > /proc/sys/kernel/core_pattern) 2>/dev/null && echo kernel
ls /proc | grep -c '^[0-9]'
"""
NONE = "0" * 16
CLEAN = (
    f"CapInh:{NONE} CapPrm:{NONE} CapEff:{NONE} CapBnd:{NONE} CapAmb:{NONE} NoNewPrivs:1 "
    # Process 1, the shell, and the pipe's two.
    "4\n"
)


class Opener(Protocol):
    def __call__(
        self, limits: Limits | None = None, backend: BubblewrapSandbox = ...
    ) -> AbstractAsyncContextManager[BubblewrapWorkspace]: ...


async def shell(
    workspace: BubblewrapWorkspace, script: str, timeout: float = 30.0, *, keep: bool = False
) -> ExecResult:
    return await workspace.exec(["sh", "-c", script], timeout=timeout, keep=keep)


def running(*words: str) -> list[int]:
    """Host ids of processes with exactly these arguments."""
    wanted = "".join(f"{word}\0" for word in words).encode()
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes() == wanted:
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def joiners_of(parent: int) -> list[int]:
    """The joiners that a process started, oldest first."""
    found = subprocess.run(
        ["pgrep", "-P", str(parent), "-f", "joiner.py"], check=True, capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def until_running(*words: str) -> None:
    await until(lambda: running(*words))


def test_a_server_is_started_and_asked(opened: Opener) -> None:
    server = (
        "import http.server as s\ns.test(s.SimpleHTTPRequestHandler, port=8123, bind='127.0.0.1')"
    )
    client = (
        "import time, urllib.request as u\n"
        "for _ in range(200):\n"
        "    try:\n        print(u.urlopen('http://127.0.0.1:8123/new').read()); break\n"
        "    except OSError: time.sleep(0.05)\n"
    )

    async def main() -> None:
        async with opened() as workspace:
            job = await workspace.start(["python3", "-u", "-c", server], cwd="d")
            await workspace.write("d/new", b"later than the server")
            asked = await workspace.exec(["python3", "-c", client], timeout=30)
            assert asked.stdout == "b'later than the server'\n"
            (state,) = await workspace.jobs()
            assert (state.id, state.running, state.exit_code) == (job, True, None)
            assert state.command.startswith("python3 -u -c ")
            assert "GET /new" in (await workspace.output(job))[0]
            await workspace.stop(job)
            await workspace.stop(job)
            (state,) = await workspace.jobs()
            assert (state.running, state.exit_code) == (False, 137)

    asyncio.run(main())


def test_output_is_read_in_pieces(opened: Opener) -> None:
    script = (
        "echo one; echo two >&2; read x < /tmp/go; "
        r"printf 'gr\303'; sleep 0.3; printf '\274n'; exit 3"
    )

    async def main() -> None:
        async with opened() as workspace:
            await shell(workspace, "mkfifo /tmp/go")
            job = await workspace.start(["sh", "-c", script])
            text, at = "", 0
            while text.count("\n") < 2:
                piece, at = await workspace.output(job, at)
                text += piece
                await asyncio.sleep(0.01)
            assert (text, at) == ("one\ntwo\n", 8)
            assert await workspace.output(job, at) == ("", at)
            await shell(workspace, "echo > /tmp/go")
            while (await workspace.jobs())[0].running:
                piece, at = await workspace.output(job, at)
                text += piece
                await asyncio.sleep(0.005)
            piece, at = await workspace.output(job, at)
            assert text + piece == "one\ntwo\ngrün"
            assert at == 13
            state = await ended(workspace, job)
            assert state.exit_code == 3
            assert 0.2 < state.seconds < 30
            assert await workspace.output(job) == ("one\ntwo\ngrün", 13)
            with pytest.raises(KeyError):
                await workspace.output("none")
            with pytest.raises(KeyError):
                await workspace.stop("none")

    asyncio.run(main())


@given(
    pieces=st.lists(st.text(max_size=7).map(str.encode), max_size=12),
    limit=st.integers(1, 20),
    offset=st.integers(-2, 90),
)
def test_a_tail_against_the_whole(pieces: list[bytes], limit: int, offset: int) -> None:
    tail, data = Tail(limit), b"".join(pieces)
    for piece in pieces:
        tail.feed(piece)
    text, after = tail.since(offset, whole=True)
    assert after == len(data)
    begin = min(max(offset, 0, len(data) - limit), len(data))
    dropped = begin - max(offset, 0)
    note = f"[... {dropped} bytes dropped ...]\n" if dropped > 0 else ""
    assert text == note + data[begin:].decode(errors="replace")


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), min_size=160, max_size=160))
def test_reading_along_gives_the_whole_text(text: str, cuts: list[int]) -> None:
    tail, data, found, at = Tail(1000), text.encode(), "", 0
    for cut in cuts:
        tail.feed(data[:cut])
        data = data[cut:]
        piece, at = tail.since(at, whole=not data)
        found += piece
    assert found == text


def test_what_a_command_leaves_becomes_a_job_if_wanted(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            begun = time.monotonic()
            result = await shell(workspace, "sleep 6101 & echo done", keep=True)
            assert time.monotonic() - begun < 2
            assert (result.stdout, result.exit_code, result.job) == ("done\n", 0, "1")
            (state,) = await workspace.jobs()
            assert state.running
            assert state.command == "sh -c 'sleep 6101 & echo done'"
            await until_running("sleep", "6101")
            later = await shell(
                workspace, "(sleep 0.3; echo later; echo why >&2) & echo first; exit 4", keep=True
            )
            assert (later.stdout, later.exit_code) == ("first\n", 4)
            assert (await ended(workspace, later.job)).exit_code == 4
            text, _ = await workspace.output(later.job)
            assert sorted(text.split()) == ["later", "why"]
            assert (await shell(workspace, "true", keep=True)).job == ""
            assert (await shell(workspace, "sleep 6102 &")).job == ""
            assert not running("sleep", "6102")
            cut = await shell(workspace, "setsid sleep 6102 & sleep 6102", timeout=0.3, keep=True)
            assert cut.timed_out
            assert cut.job == ""
            assert not running("sleep", "6102")
        assert not running("sleep", "6101")

    asyncio.run(main())


def test_a_job_dies_as_a_whole(opened: Opener) -> None:
    script = (
        'trap "" TERM HUP; (setsid sh -c \'trap "" TERM; exec sleep 6103\' &) ; exec sleep 6103'
    )

    async def main() -> None:
        async with opened() as workspace:
            stopped = await workspace.start(["sh", "-c", script])
            await until(lambda: len(running("sleep", "6103")) == 2)
            await workspace.stop(stopped)
            assert not running("sleep", "6103")
            await workspace.start(["sh", "-c", script])
            await until_running("sleep", "6103")
        assert not running("sleep", "6103")
        with pytest.raises(WorkspaceError, match="closed"):
            await workspace.jobs()

    asyncio.run(main())


def test_jobs_die_with_the_process(tmp_path: Path, image: Image) -> None:
    program = f"""
import asyncio
from pathlib import Path
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image
async def main():
    workspace = await BubblewrapSandbox().create(Image(Path({str(image.root)!r})))
    await workspace.start(["setsid", "sleep", "6104"])
    await workspace.exec(["sh", "-c", "setsid sleep 6104 & sleep 6104"], timeout=600)
asyncio.run(main())
"""

    async def count(wanted: int) -> None:
        await until(lambda: len(running("sleep", "6104")) == wanted)

    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        asyncio.run(count(3))
        (joiner,) = joiners_of(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    asyncio.run(count(0))
    # Dead it may still wait to be collected: then it has no command line.
    line = Path(f"/proc/{joiner}/cmdline")
    asyncio.run(until(lambda: not line.exists() or not line.read_bytes()))


def test_commands_run_side_by_side_and_see_only_themselves(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            job = await workspace.start(["sh", "-c", PRIVILEGES + "sleep 6105"])
            await until_running("sleep", "6105")
            begun = time.monotonic()
            results = await asyncio.gather(
                *(shell(workspace, f"sleep 1; echo {n} > f{n}; ls /proc") for n in range(3))
            )
            assert time.monotonic() - begun < 2.9
            for result in results:
                assert len([name for name in result.stdout.split() if name.isdigit()]) == 3
            assert (await shell(workspace, "cat f0 f1 f2")).stdout == "0\n1\n2\n"
            assert (await workspace.output(job))[0].endswith(CLEAN)
            assert (await shell(workspace, PRIVILEGES)).stdout == CLEAN
            assert (await workspace.jobs())[0].running

    asyncio.run(main())


def test_a_job_that_cannot_run_and_one_over_its_limits(opened: Opener) -> None:
    hog = "x = b'x' * (300 << 20); import time; time.sleep(60)"

    async def main() -> None:
        async with opened(Limits(memory_bytes=200 << 20, disk_bytes=4 << 20)) as workspace:
            missing = await workspace.start(["no-such-program"])
            assert (await ended(workspace, missing)).exit_code == 127
            assert "no-such-program" in (await workspace.output(missing))[0]
            large = await workspace.start(["python3", "-c", hog])
            assert (await ended(workspace, large)).exit_code != 0
            filling = "for i in $(seq 9); do head -c 1M /dev/zero > f$i; done; sleep 60"
            full = await workspace.start(["sh", "-c", filling])
            assert (await ended(workspace, full)).exit_code == 137
            assert "4 MB" in (await workspace.output(full))[0]
            assert (await shell(workspace, "rm f*; echo fine")).stdout == "fine\n"

    asyncio.run(main())


def test_jobs_and_commands_share_one_ceiling(opened: Opener) -> None:
    code = "x = b'x' * (120 << 20); open('{name}', 'w'); import time; time.sleep({seconds})"

    async def main() -> None:
        async with opened(Limits(memory_bytes=200 << 20)) as workspace:
            alone = await workspace.exec(
                ["python3", "-c", code.format(name="n", seconds=0)], timeout=30
            )
            assert alone.exit_code == 0
            await workspace.start(["python3", "-c", code.format(name="held", seconds=60)])
            await until((workspace.layer / "upper" / "held").exists)
            both = await workspace.exec(
                ["python3", "-c", code.format(name="n", seconds=1)], timeout=30
            )
            state = (await workspace.jobs())[0]
            assert both.exit_code != 0 or not state.running

    asyncio.run(main())


def test_files_are_copied_when_no_job_changes_them(opened: Opener) -> None:
    script = (
        "i=0; while true; do i=$((i+1)); echo $i > n; "
        "ln -sf /etc n2; rm -f n2; mkdir n2; rmdir n2; done"
    )

    async def main() -> None:
        async with opened() as workspace:
            kept = await workspace.snapshot()
            for operation in (
                workspace.snapshot,
                workspace.fork,
                workspace.diff,
                lambda: workspace.restore(kept),
            ):
                job = await workspace.start(["sh", "-c", script])
                made = await operation()
                assert not (await workspace.jobs())[int(job) - 1].running
                if isinstance(made, BubblewrapWorkspace):
                    assert await made.jobs() == []
                    await made.close()
            assert (await workspace.diff()).files == {}

    asyncio.run(main())


def test_a_guest_that_died_is_replaced(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            await workspace.write("n", b"kept")
            await workspace.start(["sleep", "6106"])
            await until_running("sleep", "6106")
            # The command that waits in the guest that stays, and its process 1 above it.
            os.kill(parent_of(running("/bin/cat")[-1]), signal.SIGKILL)
            assert not (await ended(workspace, "1")).running
            assert (await workspace.read("n")) == b"kept"
            assert (await shell(workspace, "echo again")).stdout == "again\n"

    asyncio.run(main())


def test_a_porter_that_died_is_replaced(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            await workspace.start(["sleep", "6108"])
            await until_running("sleep", "6108")
            # Above the command its process 1, above that the porter.
            porter = parent_of(parent_of(running("sleep", "6108")[0]))
            os.kill(porter, signal.SIGKILL)
            await until(lambda: not Path(f"/proc/{porter}").exists())
            assert (await shell(workspace, "echo again")).stdout == "again\n"
            assert (await workspace.jobs())[0].running
        assert not running("sleep", "6108")

    asyncio.run(main())


def test_being_cancelled_or_closed_while_the_guest_starts_leaves_nothing(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            await shell(workspace, "true")
        joiner = joiners_of(os.getpid())[-1]
        before = len(list(Path("/proc/self/fd").iterdir()))
        zombies = children_of(os.getpid())
        for step in range(24):
            async with opened() as workspace:
                task = asyncio.ensure_future(shell(workspace, "sleep 6109"))
                await asyncio.sleep(step * 0.003)
                if step % 2:
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert (await shell(workspace, "echo again")).stdout == "again\n"
                else:
                    await workspace.close()
                    with pytest.raises(WorkspaceError, match="closed"):
                        await task
        await until(lambda: not children_of(joiner))
        assert children_of(os.getpid()) == zombies
        assert not running("sleep", "6109")
        assert len(list(Path("/proc/self/fd").iterdir())) <= before

    asyncio.run(main())


def test_the_joiner_is_replaced(image: Image) -> None:
    async def main() -> None:
        backend = BubblewrapSandbox()
        workspace = await backend.create(image)
        job = await workspace.start(["sleep", "6107"])
        joiner = joiners_of(os.getpid())[-1]
        os.kill(joiner, signal.SIGKILL)
        await until(lambda: ") Z " in Path(f"/proc/{joiner}/stat").read_text())
        assert (await shell(workspace, "echo again")).stdout == "again\n"
        assert (await workspace.jobs())[0].running
        await workspace.stop(job)
        await workspace.close()
        backend.close()

    asyncio.run(main())
