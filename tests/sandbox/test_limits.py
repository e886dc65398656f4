"""Guests that take more than they may."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path

import pytest

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.limits import remove_groups, tree_usage
from etude.sandbox.protocol import ExecResult, Image, Limits, WorkspaceError
from etude.sandbox.registry import open_sandbox
from etude.sandbox.settings import SandboxSettings

MB = 1 << 20
HOG = "x = b'x' * (1 << 30); print('survived')"
TREE_HOG = """
import os, time
children = []
for _ in range(6):
    children.append(os.fork())
    if children[-1] == 0:
        x = b"x" * (60 << 20)
        time.sleep(60)
time.sleep(2.5)
print(sum(os.waitpid(child, os.WNOHANG) == (0, 0) for child in children), flush=True)
"""
BOMB = """
import os, time
begun = time.monotonic()
while time.monotonic() - begun < 1.5:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.fixture(params=["grouped", "ungrouped"])
def backend(request: pytest.FixtureRequest) -> BubblewrapSandbox:
    name = "sandbox" if request.param == "grouped" else "ungrouped"
    return request.getfixturevalue(name)


def run(
    backend: BubblewrapSandbox, image: Image, code: str, limits: Limits, timeout: float = 30
) -> ExecResult:
    async def main() -> ExecResult:
        workspace = await backend.create(image, limits)
        try:
            return await workspace.exec(["python3", "-c", code], timeout=timeout)
        finally:
            await workspace.close()

    return asyncio.run(main())


def test_a_memory_hog_ends(backend: BubblewrapSandbox, image: Image) -> None:
    result = run(backend, image, HOG, Limits(memory_bytes=200 * MB))
    assert result.exit_code != 0
    assert "survived" not in result.stdout


def test_a_tree_of_small_hogs_ends(backend: BubblewrapSandbox, image: Image) -> None:
    result = run(backend, image, TREE_HOG, Limits(memory_bytes=200 * MB))
    # Either all of it was killed, or the kernel killed children until the rest had room.
    assert result.exit_code == 137 or int(result.stdout) <= 3


def test_a_fork_bomb_is_held(backend: BubblewrapSandbox, image: Image) -> None:
    begun = time.monotonic()
    before = tree_usage(os.getpid()).processes
    result = run(backend, image, BOMB, Limits(processes=32), timeout=15)
    assert time.monotonic() - begun < 40
    # Either the kernel refused the 33rd process or the tree was killed for it.
    assert result.exit_code in (0, 137)
    assert tree_usage(os.getpid()).processes <= before


def test_the_number_of_processes_is_exact_with_control_groups(
    sandbox: BubblewrapSandbox, image: Image
) -> None:
    code = """
import os, time
count = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
        if count > 100:
            break
except BlockingIOError:
    pass
print(count)
"""
    result = run(sandbox, image, code, Limits(processes=20))
    if "processes" in result.stderr or result.stdout == "101\n":
        pytest.skip("no control groups here")
    assert result.stdout == "20\n"


def test_a_large_file_is_cut_off(backend: BubblewrapSandbox, image: Image) -> None:
    code = "open('big', 'wb').write(bytes(20 << 20))"
    result = run(backend, image, code, Limits(disk_bytes=5 * MB))
    assert result.exit_code != 0
    assert "File too large" in result.stderr or "changes" in result.stderr


def test_many_files_end_a_command_and_deleting_mends(
    backend: BubblewrapSandbox, image: Image
) -> None:
    async def main() -> None:
        workspace = await backend.create(image, Limits(disk_bytes=8 * MB))
        slow = await workspace.exec(
            ["sh", "-c", "for i in $(seq 40); do head -c 1M /dev/zero > f$i; sleep 0.1; done"],
            timeout=60,
        )
        assert slow.exit_code == 137
        assert "8 MB" in slow.stderr
        assert slow.seconds < 30
        assert (await workspace.exec(["sh", "-c", "rm f*"], timeout=30)).exit_code == 0
        fast = await workspace.exec(
            ["sh", "-c", "for i in 1 2 3; do head -c 4M /dev/zero > g$i; done"], timeout=60
        )
        assert fast.exit_code in (122, 137)
        assert "8 MB" in fast.stderr
        with pytest.raises(PermissionError):
            await workspace.write("h", bytes(9 * MB))
        await workspace.close()

    asyncio.run(main())


def test_scratch_space_is_capped(sandbox: BubblewrapSandbox, image: Image) -> None:
    code = """
for place in ("/dev/shm/f", "/home/agent/f"):
    try:
        with open(place, "wb") as file:
            file.write(bytes(100 << 20))
        print("survived")
    except OSError as error:
        print(error.strerror)
"""
    result = run(sandbox, image, code, Limits())
    assert result.stdout == "No space left on device\n" * 2


def test_endless_output_costs_no_memory(sandbox: BubblewrapSandbox, image: Image) -> None:
    code = "import os\nblock = b'y' * 65536\nwhile True: os.write(1, block)"
    result = run(sandbox, image, code, Limits(output_bytes=2000), timeout=1)
    assert result.timed_out
    assert result.truncated
    assert len(result.stdout) < 2200


def test_folders_nested_too_deep_are_an_error_and_can_be_deleted(
    sandbox: BubblewrapSandbox, image: Image
) -> None:
    code = """
import os
for _ in range(3000):
    os.mkdir("dddddddddd")
    os.chdir("dddddddddd")
"""

    async def main() -> Path:
        workspace = await sandbox.create(image)
        with pytest.raises(WorkspaceError, match="deep"):
            await workspace.exec(["python3", "-c", code], timeout=60)
        with pytest.raises(WorkspaceError, match="deep"):
            await workspace.diff()
        await workspace.close()
        return workspace.layer

    assert not asyncio.run(main()).exists()


def test_no_space_is_the_sandbox_s_failure(image: Image, tmp_path: Path) -> None:
    settings = SandboxSettings(run_root=tmp_path / "run", min_free_bytes=1 << 60)

    async def main() -> None:
        with pytest.raises(EtudeError, match="MB are free"):
            await BubblewrapSandbox(settings).create(image)
        with pytest.raises(EtudeError, match="no sandbox: only"):
            await open_sandbox(settings=settings)

    asyncio.run(main())


def test_bad_backends_get_one_sentence(tmp_path: Path) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho 'bwrap: Unknown option --overlay-src' >&2; exit 1\n")
    denied = tmp_path / "denied"
    denied.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n"
    )
    for program in (old, denied):
        program.chmod(0o755)

    async def sentence(settings: SandboxSettings, name: str = "bubblewrap") -> str:
        with pytest.raises(EtudeError) as caught:
            await open_sandbox(name, settings)
        return str(caught.value)

    async def main() -> None:
        assert "not installed" in await sentence(SandboxSettings(bwrap=tmp_path / "none"))
        assert "0.11" in await sentence(SandboxSettings(bwrap=old))
        assert "unprivileged_userns_clone" in await sentence(SandboxSettings(bwrap=denied))
        assert "choose one of" in await sentence(SandboxSettings(), "docker")

    asyncio.run(main())


def test_removing_groups_that_are_not_there(tmp_path: Path) -> None:
    remove_groups([tmp_path / "none"])
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove_groups([tmp_path / "a"])
    assert not (tmp_path / "a").exists()


def test_no_zombies_pile_up(sandbox: BubblewrapSandbox, image: Image) -> None:
    """Guests' inits outlive bubblewrap by an instant: they fall to us, and we collect them."""

    def ours() -> set[str]:
        found: set[str] = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == str(os.getpid()) and state == "Z":
                found.add(path.parent.name)
        return found

    subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(subreaper), 0, 0, 0)
    assert subreaper.value == 1
    # Other tests kill processes of ours whose guests then fall to us as well.
    before = ours()
    for _ in range(3):
        run(sandbox, image, "import os; os.fork()", Limits())
    assert ours() <= before
