"""The workspace contract, on real guests."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.process import Capture
from etude.sandbox.protocol import ExecResult, Image, Limits, WorkspaceError
from etude.sandbox.workspace import BubblewrapWorkspace


class Opener(Protocol):
    def __call__(
        self, limits: Limits | None = None, backend: BubblewrapSandbox = ...
    ) -> AbstractAsyncContextManager[BubblewrapWorkspace]: ...


async def shell(
    workspace: BubblewrapWorkspace, script: str, timeout: float = 30.0, stdin: bytes = b""
) -> ExecResult:
    return await workspace.exec(["sh", "-c", script], timeout=timeout, stdin=stdin)


def alive(marker: str) -> list[str]:
    """Host processes whose command line holds `marker`."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker.encode() in line:
            found.append(process.name)
    return found


async def until_alive(marker: str) -> None:
    for _ in range(1000):
        if alive(marker):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{marker} never ran")


def test_exit_codes_and_streams(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            result = await shell(workspace, "echo out; echo err >&2; exit 7")
            assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
            assert (await shell(workspace, "kill -9 $$")).exit_code == 137
            assert (await shell(workspace, "kill -15 $$")).exit_code == 143
            missing = await workspace.exec(["no-such-program"], timeout=10)
            assert missing.exit_code == 127
            assert "no-such-program" in missing.stderr
            assert (await workspace.exec(["/workspace/a.txt"], timeout=10)).exit_code == 126
            nowhere = await workspace.exec(["true"], timeout=10, cwd="nowhere")
            assert nowhere.exit_code == 126
            assert (await workspace.exec(["pwd"], timeout=10, cwd="d/e")).stdout == (
                "/workspace/d/e\n"
            )

    asyncio.run(main())


def test_words_of_the_sandbox_cannot_be_forged(opened: Opener) -> None:
    """A guest that prints what bubblewrap prints when it fails is still only a command."""

    async def main() -> None:
        async with opened() as workspace:
            for words in ("bwrap: execvp x: No such file or directory", "bwrap: Can't chdir to x"):
                assert (await shell(workspace, f'echo "{words}" >&2; exit 1')).exit_code == 1

    asyncio.run(main())


def test_stdin_is_fed_whole_and_may_be_ignored(opened: Opener) -> None:
    data = os.urandom(3 << 20)

    async def main() -> None:
        async with opened() as workspace:
            assert (await shell(workspace, "wc -c", stdin=data)).stdout.strip() == str(len(data))
            assert (await shell(workspace, "exec true", stdin=data)).exit_code == 0
            assert (await shell(workspace, "cat")).stdout == ""

    asyncio.run(main())


def test_a_grandchild_with_the_pipe_does_not_block(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            begun = time.monotonic()
            result = await shell(workspace, "sleep 6001 & (setsid sleep 6001 &) ; echo done")
            assert result.stdout == "done\n"
            assert time.monotonic() - begun < 2
            assert not alive("sleep\x006001")

    asyncio.run(main())


def test_the_whole_tree_is_dead_at_the_timeout(opened: Opener) -> None:
    script = 'trap "" TERM INT HUP; (setsid sh -c \'trap "" TERM; sleep 6002\' &) ; sleep 6002'

    async def main() -> None:
        async with opened() as workspace:
            result = await shell(workspace, f"echo begun; {script}", timeout=0.5)
            assert result.timed_out
            assert result.exit_code == 137
            assert result.stdout == "begun\n"
            assert 0.4 < result.seconds < 5
            assert not alive("sleep\x006002")
            assert (await shell(workspace, "echo again")).stdout == "again\n"

    asyncio.run(main())


def test_the_whole_tree_is_dead_when_cancelled(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            task = asyncio.ensure_future(shell(workspace, "(setsid sleep 6003 &) ; sleep 6003"))
            await until_alive("sleep\x006003")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not alive("sleep\x006003")
            assert (await shell(workspace, "echo again")).stdout == "again\n"

    asyncio.run(main())


def test_cancelling_at_any_moment_leaves_nothing(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            await shell(workspace, "true")
            before = len(list(Path("/proc/self/fd").iterdir()))
            for step in range(12):
                task = asyncio.ensure_future(shell(workspace, "sleep 6004"))
                await asyncio.sleep(step * 0.003)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert not alive("sleep\x006004")
            assert not alive("6004")
            assert (await shell(workspace, "echo again")).stdout == "again\n"
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1

    asyncio.run(main())


def test_close_kills_what_runs(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            task = asyncio.ensure_future(shell(workspace, "sleep 6005"))
            await until_alive("sleep\x006005")
            await workspace.close()
            with pytest.raises(WorkspaceError, match="closed"):
                await task
            assert not alive("sleep\x006005")
            with pytest.raises(WorkspaceError, match="closed"):
                await workspace.read("a.txt")
            await workspace.close()

    asyncio.run(main())


def test_output_is_cut_in_the_middle(opened: Opener) -> None:
    async def main() -> None:
        async with opened(Limits(output_bytes=1000)) as workspace:
            result = await shell(workspace, "echo first; head -c 5000000 /dev/zero; echo last")
            assert result.truncated
            assert result.stdout.startswith("first\n")
            assert result.stdout.endswith("last\n")
            assert "bytes cut" in result.stdout
            assert len(result.stdout) < 1100

    asyncio.run(main())


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 25])
@pytest.mark.parametrize("step", [1, 3, 25])
def test_capture_keeps_head_and_tail(size: int, step: int) -> None:
    data = bytes(range(65, 65 + size))
    capture = Capture(10)
    for at in range(0, size, step):
        capture.feed(data[at : at + step])
    if size <= 10:
        assert capture.bytes() == data
        assert not capture.truncated
    else:
        marker = f"\n[... {size - 10} bytes cut ...]\n".encode()
        assert capture.bytes() == data[:5] + marker + data[-5:]
        assert capture.truncated


def test_files(opened: Opener, image: Image) -> None:
    data = bytes(range(256)) * 5000

    async def main() -> None:
        async with opened() as workspace:
            assert await workspace.read("a.txt") == b"alpha\n"
            await workspace.write("new/deep/f.bin", data)
            assert await workspace.read("/workspace/new/deep/f.bin") == data
            await workspace.write("a.txt", b"")
            assert await workspace.read("d/../a.txt") == b""
            await workspace.write("-rf", b"dash")
            assert await workspace.read("-rf") == b"dash"
            await workspace.write("it's $(odd)\n name", b"odd")
            assert await workspace.list() == sorted(
                ["-rf", "a.txt", "d/", "it's $(odd)\n name", "new/"]
            )
            assert await workspace.list("d") == ["e/", "x"]
            await workspace.write("/tmp/scratch", b"kept")
            assert (await shell(workspace, "cat /tmp/scratch")).stdout == "kept"

    asyncio.run(main())
    assert (image.root / "a.txt").read_text() == "alpha\n"
    assert sorted(path.name for path in image.root.iterdir()) == ["a.txt", "d"]


def test_file_errors_are_the_guest_s(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            await shell(workspace, "mkfifo pipe; ln -s loop loop; mkdir locked; chmod 0 locked")
            for path, expected in (
                ("none", FileNotFoundError),
                ("", FileNotFoundError),
                ("nul\0", FileNotFoundError),
                ("loop", FileNotFoundError),
                ("d", IsADirectoryError),
                ("a.txt/x", NotADirectoryError),
                ("pipe", PermissionError),
                ("/dev/zero", PermissionError),
                ("locked/x", PermissionError),
            ):
                with pytest.raises(expected):
                    await workspace.read(path)
            for path, expected in (
                ("d", IsADirectoryError),
                ("a.txt/x", NotADirectoryError),
                ("a.txt/x/y", NotADirectoryError),
                ("pipe", PermissionError),
                ("/usr/x", PermissionError),
                ("/x", PermissionError),
            ):
                with pytest.raises(expected):
                    await workspace.write(path, b"data")
            for path, expected in (
                ("none", FileNotFoundError),
                ("a.txt", NotADirectoryError),
                ("locked", PermissionError),
            ):
                with pytest.raises(expected):
                    await workspace.list(path)

    asyncio.run(main())


def test_diff_of_every_kind(opened: Opener, image: Image) -> None:
    (image.root / "link").symlink_to("a.txt")
    (image.root / "away").symlink_to("/etc")
    (image.root / "dd").mkdir()
    (image.root / "dd" / "f").write_text("f")
    script = """
        echo ex > d/x                # rewritten, same bytes
        chmod 700 a.txt              # another mode only
        rm -r d/e; mkdir d/e; echo new > d/e/n      # opaque folder
        rm link; echo now-a-file > link
        rm away; mkdir away; echo in > away/passwd  # a folder where the image has a link
        rm -r dd; echo file > dd     # a file where the image has a folder
        ln -s /root made-link; mkfifo pipe; mkdir empty
        python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
        echo secret > locked; chmod 0 locked; mkdir shut; echo i > shut/i; chmod 0 shut
    """

    async def main() -> None:
        async with opened() as workspace:
            assert (await workspace.diff()).files == {}
            assert (await shell(workspace, script)).stderr == ""
            expected = {
                "away/passwd": b"in\n",
                "d/e/n": b"new\n",
                "d/e/z": None,
                "dd": b"file\n",
                "dd/f": None,
                "link": b"now-a-file\n",
                "locked": b"secret\n",
                "shut/i": b"i\n",
            }
            special = ("away", "made-link", "pipe", "sock")
            diff = await workspace.diff()
            assert diff.files == expected
            assert diff.special == special
            fork = await workspace.fork()
            again = await fork.diff()
            await fork.close()
            assert again.files == expected
            assert again.special == ("away", "made-link", "pipe")

    asyncio.run(main())


def test_a_diff_over_the_limit_is_refused(opened: Opener) -> None:
    async def main() -> None:
        async with opened(Limits(disk_bytes=1 << 20)) as workspace:
            # Sparse: no disk, but a gigabyte to read.
            await shell(workspace, "for i in 1 2 3; do truncate -s 1M f$i; done")
            with pytest.raises(WorkspaceError, match="limit"):
                await workspace.diff()

    asyncio.run(main())


def test_unknown_snapshot_and_missing_image(
    opened: Opener, sandbox: BubblewrapSandbox, tmp_path: Path
) -> None:
    async def main() -> None:
        async with opened() as workspace:
            with pytest.raises(KeyError):
                await workspace.restore("none")
        with pytest.raises(WorkspaceError, match="does not exist"):
            await sandbox.create(Image(tmp_path / "none"))

    asyncio.run(main())


def test_readonly_folders_and_environment(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "f").write_text("tool")
    image = Image(tmp_path / "root", {tmp_path / "tool": "/opt/tool"}, {"COLOUR": "red"})

    async def main() -> None:
        workspace = await sandbox.create(image)
        result = await workspace.exec(
            ["sh", "-c", "cat /opt/tool/f; echo $COLOUR$SIZE; echo x > /opt/tool/f"],
            timeout=20,
            env={"SIZE": "big"},
        )
        assert result.stdout == "toolredbig\n"
        assert "Read-only" in result.stderr
        await workspace.close()

    asyncio.run(main())


def test_fifty_workspaces_at_once(opened: Opener) -> None:
    async def one(number: int) -> str:
        async with opened() as workspace:
            await workspace.write("n", f"{number}\n".encode())
            # All wait for one another's writes, so that all are there at once.
            await barrier.wait()
            return (await shell(workspace, "cat n a.txt", timeout=60)).stdout

    async def main() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(50)))

    barrier = _Barrier(50)
    assert asyncio.run(main()) == [f"{number}\nalpha\n" for number in range(50)]


class _Barrier:
    """Lets nobody pass until all have arrived."""

    def __init__(self, parties: int) -> None:
        self._missing = parties
        self._open = asyncio.Event()

    async def wait(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._open.set()
        await asyncio.wait_for(self._open.wait(), 90)
