"""What a killed process leaves is deleted by a later one; what lives is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image
from etude.sandbox.runfolder import sweep
from etude.sandbox.settings import SandboxSettings

PROGRAM = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image
from etude.sandbox.settings import SandboxSettings

async def main():
    sandbox = BubblewrapSandbox(SandboxSettings(run_root=Path(sys.argv[1])))
    for _ in range(3):
        workspace = await sandbox.create(Image(Path(sys.argv[2])))
        await workspace.write("f", b"data")
        await workspace.snapshot()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def start(root: Path, image: Image) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), str(image.root)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def folders(root: Path) -> dict[int, Path]:
    base = root / f"etude-{os.geteuid()}"
    return {int(path.name.split("-")[0]): path for path in base.iterdir() if path.is_dir()}


def test_sweep_after_sigkill(sandbox: BubblewrapSandbox, image: Image, tmp_path: Path) -> None:
    assert sandbox.name == "bubblewrap"  # and it works here
    root = tmp_path / "run"
    dead, living = start(root, image), start(root, image)
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        left = folders(root)
        assert set(left) == {dead.pid, living.pid}
        kept = left[living.pid]
        before = sorted(path.name for path in kept.iterdir())
        noted = left[dead.pid] / "cgroups"
        groups = noted.read_text().splitlines() if noted.exists() else []
        assert all(Path(group).is_dir() for group in groups)
        assert sweep(root) == 1
        assert set(folders(root)) == {living.pid}
        assert sorted(path.name for path in kept.iterdir()) == before
        assert not any(Path(group).exists() for group in groups)
        assert sweep(root) == 0
    finally:
        living.kill()
        living.wait()
    # A new backend sweeps by itself.
    made = BubblewrapSandbox(SandboxSettings(run_root=root))
    asyncio.run(made.create(image))
    assert set(folders(root)) == {os.getpid()}
    made.close()
    assert folders(root) == {}


def test_a_process_that_ends_cleans_up(image: Image, tmp_path: Path) -> None:
    program = PROGRAM.replace("await asyncio.sleep(600)", "")
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(image.root)], check=True, timeout=60
    )
    assert folders(tmp_path) == {}


def test_a_process_that_ends_with_a_running_guest_cleans_up(image: Image, tmp_path: Path) -> None:
    ending = """
    await sandbox.spawn(Image(Path(sys.argv[2])), ["sleep", "6020"])
    for noted in Path(sys.argv[1]).glob("*/*/cgroups"):
        print(noted.read_text())
"""
    program = PROGRAM.replace("    await asyncio.sleep(600)", ending)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(image.root)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("ready\n")
    assert not any(Path(group).exists() for group in done.stdout.split()[1:])
    assert folders(tmp_path) == {}
    assert subprocess.run(["pgrep", "-f", "^sleep 6020$"], check=False).returncode == 1


def test_a_foreign_run_folder_is_refused(image: Image, tmp_path: Path) -> None:
    base = tmp_path / f"etude-{os.geteuid()}"
    base.symlink_to("/usr")
    sandbox = BubblewrapSandbox(SandboxSettings(run_root=tmp_path))
    with pytest.raises(EtudeError, match="private"):
        asyncio.run(sandbox.create(image))
