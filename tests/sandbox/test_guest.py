"""Long-lived guests, builds, and the backend under an ordinary user."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image, Limits, WorkspaceError
from etude.sandbox.system import installer

ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"


def test_a_guest_answers_until_killed(sandbox: BubblewrapSandbox, image: Image) -> None:
    async def main() -> None:
        guest = await sandbox.spawn(image, ["python3", "-c", ECHO])
        for word in (b"one\n", b"two\n"):
            await guest.write(word)
            assert await guest.readline(20) == word.upper()
        with pytest.raises(TimeoutError):
            await guest.readline(0.05)
        await guest.write(b"last")
        guest.end_input()
        assert await guest.readline(20) == b"LAST"
        assert await guest.readline(20) == b""
        await guest.kill()
        await guest.kill()
        with pytest.raises(WorkspaceError):
            await guest.write(b"x")

    asyncio.run(main())


def test_a_guest_works_on_a_copy(sandbox: BubblewrapSandbox, image: Image) -> None:
    async def main() -> None:
        script = "echo changed > a.txt; echo why >&2; sleep 0.2; cat a.txt; exec sleep 600"
        guest = await sandbox.spawn(image, ["sh", "-c", script])
        assert await guest.readline(20) == b"changed\n"
        assert guest.stderr_tail() == "why\n"
        waiting = asyncio.ensure_future(guest.readline(60))
        await asyncio.sleep(0.05)
        await guest.kill()
        with pytest.raises(WorkspaceError, match="killed"):
            await waiting

    asyncio.run(main())
    assert (image.root / "a.txt").read_text() == "alpha\n"


def test_a_guest_that_cannot_start_or_ends(sandbox: BubblewrapSandbox, image: Image) -> None:
    async def main() -> None:
        missing = await sandbox.spawn(image, ["no-such-program"])
        assert await missing.readline(20) == b""
        assert "no-such-program" in missing.stderr_tail()
        await missing.kill()
        brief = await sandbox.spawn(image, ["sh", "-c", "exit 3"])
        assert await brief.readline(20) == b""
        with pytest.raises(WorkspaceError, match="ended early"):
            await brief.write(bytes(1 << 20))
        await brief.kill()
        assert brief.exit_code == 3

    asyncio.run(main())


def test_a_guest_that_floods_is_held_back(sandbox: BubblewrapSandbox, image: Image) -> None:
    async def main() -> None:
        code = "import os\nline = b'y' * 999 + b'\\n'\nwhile True: os.write(1, line)"
        guest = await sandbox.spawn(image, ["python3", "-c", code])
        await asyncio.sleep(1)
        for _ in range(20_000):
            assert len(await guest.readline(20)) == 1000
        await guest.kill()
        endless = await sandbox.spawn(image, ["cat", "/dev/zero"])
        with pytest.raises(WorkspaceError, match="8 MB"):
            await endless.readline(30)
        await endless.kill()

    asyncio.run(main())


def test_a_guest_over_its_disk_is_killed(sandbox: BubblewrapSandbox, image: Image) -> None:
    async def main() -> None:
        script = "for i in 1 2 3 4; do head -c 900K /dev/zero > f$i; done; exec sleep 600"
        guest = await sandbox.spawn(image, ["sh", "-c", script], limits=Limits(disk_bytes=1 << 20))
        with pytest.raises(WorkspaceError, match="1 MB"):
            await guest.readline(30)
        await guest.kill()

    asyncio.run(main())


def test_build_writes_only_where_it_may(
    sandbox: BubblewrapSandbox, image: Image, tmp_path: Path
) -> None:
    target = tmp_path / "env"
    target.mkdir()
    lines: list[str] = []
    script = """
        echo begun; echo built > /env/f; echo lost > a.txt; echo warn >&2
        (echo x > /usr/x) 2>/dev/null || echo refused; ls -d /root/.* /home/*/.* 2>/dev/null
        printf end
    """

    async def main() -> None:
        result = await sandbox.build(
            image,
            ["sh", "-c", script],
            writable={target: "/env"},
            network=False,
            timeout=60,
            log=lines.append,
        )
        assert result.exit_code == 0
        assert result.stdout.startswith("begun\nrefused\n")

    asyncio.run(main())
    assert (target / "f").read_text() == "built\n"
    assert (image.root / "a.txt").read_text() == "alpha\n"
    assert {"begun", "refused", "warn", "end"} <= set(lines)


def test_an_environment_is_built_and_used(
    sandbox: BubblewrapSandbox, image: Image, tmp_path: Path
) -> None:
    """`python -m venv` inside a build makes what a workspace without network then runs."""
    target = tmp_path / "env"
    target.mkdir()

    async def main() -> None:
        made = await sandbox.build(
            image,
            [sys.base_prefix + "/bin/python3", "-m", "venv", "--without-pip", "/env"],
            writable={target: "/env"},
            network=True,
            timeout=100,
        )
        assert made.exit_code == 0, made.stderr
        workspace = await sandbox.create(Image(image.root, {target: "/env"}))
        result = await workspace.exec(
            ["/env/bin/python", "-c", "import sys; print(sys.prefix)"], timeout=60
        )
        assert result.stdout == "/env\n"
        await workspace.close()

    asyncio.run(main())


def test_the_installer_keeps_its_sources_and_the_home_stays_hidden(tmp_path: Path) -> None:
    home, wheels, index = tmp_path / "home", tmp_path / "wheels", tmp_path / "index" / "simple"
    for folder in (home / ".config" / "pip", wheels, index):
        folder.mkdir(parents=True)
    config = home / ".config" / "pip" / "pip.conf"
    config.write_text(f"[global]\nfind-links = {wheels}\nextra-index-url = file://{index}\n")
    arguments, env = installer(
        {"PIP_TIMEOUT": "9", "HTTPS_PROXY": "http://p:1", "SECRET": "s", "HOME": str(home)}, home
    )
    assert env == {
        "PIP_TIMEOUT": "9",
        "HTTPS_PROXY": "http://p:1",
        "PIP_CONFIG_FILE": "/etc/pip-user.conf",
    }
    sources = arguments[1::3]
    assert set(arguments[0::3]) == {"--ro-bind"}
    assert str(wheels) in sources
    assert str(index.parent) in sources
    assert str(config) in sources
    assert not any(home.is_relative_to(source) for source in sources)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_can_use_it(image: Image, request: pytest.FixtureRequest) -> None:
    """Root's tests prove nothing for others: run a little history as `nobody`."""
    program = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.registry import open_sandbox
from etude.sandbox.protocol import Image, Limits, Rights
from etude.sandbox.settings import SandboxSettings

async def main():
    sandbox = await open_sandbox(settings=SandboxSettings(run_root=Path(sys.argv[1])))
    workspace = await sandbox.create(Image(Path(sys.argv[2])), Limits(processes=20))
    script = "rm -r d; mkdir d; echo n > d/n; chmod 0 d; echo s > s; chmod 0 s; rm a.txt"
    assert (await workspace.exec(["sh", "-c", script], timeout=60)).exit_code == 0
    fork = await workspace.fork()
    for each in (workspace, fork):
        files = (await each.diff()).files
        assert files == {"a.txt": None, "d/e/z": None, "d/x": None, "d/n": b"n\\n", "s": b"s\\n"}
    bomb = "for i in $(seq 40); do sleep 5 & done; wait"
    result = await fork.exec(["sh", "-c", bomb], timeout=30)
    assert "fork" in result.stderr or "processes" in result.stderr, result
    view = fork.view(Rights(readonly=True, hidden=("d",)))
    tried = await view.exec(["sh", "-c", "ls d; echo x > f; cat /proc/1/maps"], timeout=60)
    assert tried.stdout == "" and "Read-only" in tried.stderr, tried
    job = await fork.start(["sh", "-c", "echo from the job > j; sleep 600"])
    while not (await fork.exec(["cat", "j"], timeout=60)).stdout:
        await asyncio.sleep(0.01)
    left = await fork.exec(["sh", "-c", "sleep 600 &"], timeout=60, keep=True)
    assert [each.running for each in await fork.jobs()] == [True, True]
    await workspace.close()
    await fork.close()
    live = await sandbox.create(Image(Path(sys.argv[2]), live=True))
    made = await live.exec(["sh", "-c", "echo y > made; git init; mkdir .git/hooks"], timeout=60)
    assert made.stderr.count("Read-only") >= 1, made
    assert (Path(sys.argv[2]) / "made").read_text() == "y\\n"
    await live.close()
    assert not (Path(sys.argv[2]) / ".git").exists()
    sandbox.close()
    print("fine")

asyncio.run(main())
"""
    nobody = 65534
    interpreter = next(
        (
            candidate
            for candidate in (Path(sys.executable), Path("/usr/bin/python3"))
            if _works_for(candidate, nobody)
        ),
        None,
    )
    if interpreter is None:
        pytest.skip("no Python of this version that an ordinary user may run")
    # The test's own folder is closed to others, as are its parents.
    place = Path(tempfile.mkdtemp(prefix="etude-test-"))
    request.addfinalizer(lambda: shutil.rmtree(place))
    shutil.copytree(image.root, place / "image")
    (place / "run").mkdir()
    for path in (place, *place.rglob("*")):
        os.chown(path, nobody, nobody)
    done = subprocess.run(
        [str(interpreter), "-c", program, str(place / "run"), str(place / "image")],
        check=False,
        user=nobody,
        group=nobody,
        extra_groups=[],
        env={
            "PYTHONPATH": _path(),
            "PATH": "/usr/bin:/bin",
            "HOME": "/nonexistent",
            "ETUDE_STATE": str(place / "state"),
        },
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "fine\n", done.stderr


def _path() -> str:
    """Our source and our packages, not this interpreter's own library."""
    return os.pathsep.join(
        path for path in sys.path if "site-packages" in path or path.endswith("/src")
    )


def _works_for(interpreter: Path, user: int) -> bool:
    try:
        found = subprocess.run(
            [str(interpreter), "-c", "import sys; print(sys.version_info[:2])"],
            check=False,
            user=user,
            group=user,
            extra_groups=[],
            env={"PATH": "/usr/bin:/bin"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=30,
        )
    except PermissionError:
        return False
    return found.stdout.strip() == str(sys.version_info[:2])
