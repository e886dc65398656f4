"""What a guest must not be able to see, reach or change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import ExecResult, Image

Run = Callable[[str], ExecResult]


@pytest.fixture
def run(sandbox: BubblewrapSandbox, image: Image) -> Run:
    def runner(script: str) -> ExecResult:
        async def main() -> ExecResult:
            workspace = await sandbox.create(image)
            try:
                return await workspace.exec(["sh", "-c", script], timeout=60)
            finally:
                await workspace.close()

        return asyncio.run(main())

    return runner


def python(code: str) -> str:
    return f"python3 - <<'END'\n{code}\nEND"


@pytest.fixture
def listener() -> Generator[int]:
    """A server on the host's loopback that greets everyone."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connection.sendall(b"hello")
            connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5)


def test_no_network(run: Run, listener: int) -> None:
    with socket.create_connection(("127.0.0.1", listener)) as client:
        assert client.recv(5) == b"hello"
    result = run(
        python(f"""
import socket
for address in (("127.0.0.1", {listener}), ("1.1.1.1", 53), ("169.254.169.254", 80)):
    try:
        socket.create_connection(address, timeout=3)
        print("reached", address)
    except OSError as error:
        print("refused")
print(sorted(name for _, name in socket.if_nameindex()))
""")
    )
    assert result.stdout == "refused\nrefused\nrefused\n['lo']\n"


def test_abstract_sockets_of_the_host_are_out_of_reach(run: Run) -> None:
    name = f"\0etude-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        result = run(python(code))
    assert "ConnectionRefusedError" in result.stderr


def test_no_privileges_and_none_to_regain(run: Run) -> None:
    lines = run("cat /proc/self/status").stdout.splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Uid"].split() == ["1000"] * 4
    assert run("unshare -Ur true || echo refused").stdout == "refused\n"
    assert run("unshare -m true || echo refused").stdout == "refused\n"


@pytest.mark.parametrize(
    "path",
    [
        "/etude-test",
        "/usr/etude-test",
        "/etc/etude-test",
        "/etc/passwd",
        "/dev/etude-test",
        "/proc/sys/kernel/domainname",
        "/proc/sys/vm/swappiness",
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/1/oom_score_adj",
        f"{sys.base_prefix}/etude-test",
    ],
)
def test_the_system_is_read_only(run: Run, path: str) -> None:
    result = run(
        f"mount -o remount,rw / ; mount -o remount,rw /usr; mount -o remount,rw /proc; "
        f'(echo 60 > "{path}") && echo written'
    )
    assert result.stdout == ""
    if not path.startswith("/proc/"):
        assert not path.endswith("etude-test") or not Path(path).exists()


def test_the_host_s_secrets_are_invisible(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_TEST_SECRET", "hunter2")
    secret = tmp_path / "id_ed25519"
    secret.write_text("hunter2")
    home = Path.home()
    result = run(
        python(f"""
import glob, json, os
def names(path):
    try:
        return sorted(os.listdir(path))
    except OSError:
        return None
environments = []
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        environments.append(open(path, "rb").read().decode())
    except PermissionError:
        environments.append("")  # Process 1 is the sandbox's own.
print(json.dumps({{
    "own": dict(os.environ), "environments": environments, "home": names({str(home)!r}),
    "secret": os.path.exists({str(secret)!r}), "etc": names("/etc"), "root": names("/"),
    "run": names("/run"), "sys": names("/sys"), "var": names("/var"), "tmp": names("/tmp"),
    "working": names({str(Path.cwd())!r}), "shadow": os.path.exists("/etc/shadow"),
}}))
""")
    )
    seen = json.loads(result.stdout)
    assert "hunter2" not in result.stdout
    # PWD and _ are the shell's own; Python adds LC_CTYPE where the locale makes it.
    assert set(seen["own"]) <= {"PATH", "HOME", "LANG", "PWD", "OLDPWD", "_", "SHLVL", "LC_CTYPE"}
    top = Path(sys.base_prefix)
    visible = {top.relative_to(home).parts[0]} if top.is_relative_to(home) else set[str]()
    assert set(seen["home"] or []) <= visible
    assert not seen["secret"]
    assert not seen["shadow"]
    assert seen["run"] is None
    assert seen["sys"] is None
    assert seen["var"] is None
    assert seen["tmp"] == []
    assert seen["working"] is None


def test_processes_of_the_host_are_invisible_and_out_of_reach(run: Run) -> None:
    with subprocess.Popen(["sleep", "6010"]) as victim:
        result = run(
            python(f"""
import os, signal, sys
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit())[-1] < 50)
for pid in ({victim.pid}, {os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, signal.SIGKILL)
        print("killed", pid)
    except OSError:
        print("refused")
# It hits the guest's own shell, with which everything ends.
sys.stdout.flush()
try:
    os.kill(-1, signal.SIGTERM)
except OSError:
    pass
""")
        )
        assert victim.poll() is None
        victim.send_signal(signal.SIGKILL)
    assert result.stdout.startswith("True\nrefused\nrefused\nrefused\n")


def test_descriptors_of_ours_do_not_leak_in(run: Run) -> None:
    names = run("ls -l /proc/self/fd/ /proc/1/fd/").stdout
    targets = {line.split(" -> ")[1] for line in names.splitlines() if " -> " in line}
    assert all(target.startswith(("pipe:", "/proc/", "anon_inode:[eventfd]")) for target in targets)


def test_hostile_links_resolve_inside(
    sandbox: BubblewrapSandbox, image: Image, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("host")

    async def main() -> None:
        workspace = await sandbox.create(image)
        await workspace.exec(
            [
                "sh",
                "-c",
                f"ln -s {outside}/secret s; ln -s {outside} o; ln -s /etc/shadow h; "
                f"ln -s ../../../../../../../../{outside} up; rm -r d; ln -s {outside} d",
            ],
            timeout=20,
        )
        for path in ("s", "o/secret", "h", "up/secret", "d/x", "../../../etc/shadow"):
            with pytest.raises(FileNotFoundError):
                await workspace.read(path)
        for path in ("s", "o/new", "up/new", "d/x"):
            with pytest.raises(OSError, match=r"secret|new|d/x|s: "):
                await workspace.write(path, b"guest")
        with pytest.raises(FileNotFoundError):
            await workspace.list("o")
        diff = await workspace.diff()
        assert diff.files == {"d/x": None, "d/e/z": None}
        assert diff.special == ("d", "h", "o", "s", "up")
        await workspace.close()

    asyncio.run(main())
    assert (outside / "secret").read_text() == "host"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_guest_dies_with_its_parent(tmp_path: Path, image: Image) -> None:
    program = f"""
import asyncio
from pathlib import Path
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image
async def main():
    workspace = await BubblewrapSandbox().create(Image(Path({str(image.root)!r})))
    await workspace.exec(["sh", "-c", "(setsid sleep 6011 &) ; sleep 6011"], timeout=600)
asyncio.run(main())
"""

    def sleepers() -> list[str]:
        found = subprocess.run(
            ["pgrep", "-f", "sleep 601[1]"], capture_output=True, text=True, check=False
        )
        return [
            pid
            for pid in found.stdout.split()
            if Path(f"/proc/{pid}/comm").exists()
            and Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
        ]

    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        _until(lambda: len(sleepers()) == 2)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not sleepers())


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    ticks = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        ticks.wait(0.05)
    raise AssertionError("did not happen in time")
