"""Views with fewer rights: what they forbid, whatever is tried."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import ended

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import ExecResult, Image, Limits, Rights, WorkspaceError
from etude.sandbox.workspace import BubblewrapWorkspace

SECRET = "hunter2-very-secret"
HIDDEN = ("top", "d/e/inner", "vault")


class Opener(Protocol):
    def __call__(
        self, limits: Limits | None = None, backend: BubblewrapSandbox = ...
    ) -> AbstractAsyncContextManager[BubblewrapWorkspace]: ...


async def shell(workspace: BubblewrapWorkspace, script: str) -> ExecResult:
    return await workspace.exec(["sh", "-c", script], timeout=30)


@pytest.fixture(params=["copy", "live"])
def secrets(request: pytest.FixtureRequest, image: Image) -> Image:
    for name in (*HIDDEN[:2], "vault/deep/key"):
        path = image.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)
    return Image(image.root, live=request.param == "live")


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_a_readonly_view(sandbox: BubblewrapSandbox, secrets: Image) -> None:
    before = files(secrets.root)

    async def main() -> None:
        workspace = await sandbox.create(secrets)
        view = workspace.view(Rights(readonly=True))
        result = await shell(view, "echo x > f")
        assert result.exit_code != 0
        assert "Read-only file system" in result.stderr
        attempts = "rm a.txt; mv d m; chmod 700 a.txt; touch a.txt; ln a.txt b; mkdir n; cat a.txt"
        assert (await shell(view, attempts)).stdout == "alpha\n"
        with pytest.raises(PermissionError):
            await view.write("a.txt", b"x")
        assert await view.read("a.txt") == b"alpha\n"
        assert (await shell(view, "echo kept > /tmp/t; cat /tmp/t")).stdout == "kept\n"
        assert files(secrets.root) == before
        # The workspace itself is as free as before, also while a command of the view runs.
        waiting = asyncio.ensure_future(shell(view, "sleep 1; echo y > f; cat f"))
        await asyncio.sleep(0.3)
        assert (await shell(workspace, "echo x > f; cat /tmp/t")).stdout == "kept\n"
        late = await waiting
        assert late.stdout == "x\n"
        assert "Read-only" in late.stderr
        job = await view.start(["sh", "-c", "echo z > f"])
        await ended(view, job)
        assert "Read-only" in (await workspace.output(job))[0]
        with pytest.raises(PermissionError):
            await view.restore("any")
        await workspace.close()

    asyncio.run(main())


ATTACKS = [
    "cat top d/e/inner vault/deep/key",
    "cp -r . /tmp/copy; cat /tmp/copy/top /tmp/copy/d/e/inner",
    "ln top t2; cat t2; ln d/e/inner i2; cat i2; ln -s top t3; cat t3; ln -s vault v; ls v",
    "mv top moved; cat moved; rm -f top; cp a.txt top; cat top",
    "mv d/e/inner d/x; cat d/x; rm -rf d; mv d/e d/f; mv d m; cat m/e/inner; mkdir d; ls d",
    "chmod 777 top d/e/inner vault; cat top; umount top; mount -t tmpfs none vault; ls vault/deep",
    "mv vault v2; ls v2/deep; rmdir vault; rm -rf vault; echo x > vault/new; cat vault/new",
    "cd d/e && cat ../../top inner; cat /proc/self/cwd/inner; cat /proc/self/root/workspace/top",
    "cat /proc/1/root/workspace/top; cat /proc/[0-9]*/root/workspace/top",
    'python3 -c \'import os; d = os.open(".", os.O_PATH); print(os.open("top", 0, dir_fd=d))\'',
    'python3 -c \'import os; os.rename("a.txt", "top"); print(open("top").read())\'',
    "tar cf /tmp/t.tar . ; tar xf /tmp/t.tar -C /tmp; cat /tmp/top; git hash-object top",
    "grep -r hunter /workspace /tmp",
]


def test_hidden_paths_stay_hidden(sandbox: BubblewrapSandbox, secrets: Image) -> None:
    async def main() -> None:
        workspace = await sandbox.create(secrets)
        view = workspace.view(Rights(hidden=(*HIDDEN, "none", "a.txt/none")))
        for attack in ATTACKS:
            first = await shell(view, attack)
            second = await shell(view, ATTACKS[0] + "; grep -rs hunter . /tmp")
            for result in (first, second):
                assert SECRET not in result.stdout + result.stderr, attack
            # Nothing of it was removed or changed either.
            assert (await workspace.read("top")).decode() == SECRET, attack
            assert (await workspace.read("d/e/inner")).decode() == SECRET, attack
            assert (await shell(workspace, "find vault")).stdout.split() == [
                "vault",
                "vault/deep",
                "vault/deep/key",
            ], attack
            assert (await shell(workspace, "find . -name inner")).stdout == "./d/e/inner\n", attack
        await workspace.close()

    asyncio.run(main())


def test_hidden_paths_by_the_workspace_s_own_operations(
    sandbox: BubblewrapSandbox, secrets: Image
) -> None:
    async def main() -> None:
        workspace = await sandbox.create(secrets)
        view = workspace.view(Rights(hidden=("./top",))).view(Rights(hidden=HIDDEN[1:]))
        for path in HIDDEN[:2]:
            with pytest.raises(PermissionError):
                await view.read(path)
            with pytest.raises(PermissionError):
                await view.write(path, b"x")
        with pytest.raises(PermissionError):
            await view.write("vault/n", b"x")
        with pytest.raises(FileNotFoundError):
            await view.read("vault/deep/key")
        assert await view.list("vault") == []
        # In a live folder that is no repository an empty one stands where one could be made.
        names = [name for name in await view.list() if name != ".git/"]
        assert names == ["a.txt", "d/", "top", "vault/"]
        await workspace.write("top", b"changed")
        await workspace.write("vault/n", b"changed")
        await workspace.write("shown", b"changed")
        if not secrets.live:
            assert set((await view.diff()).files) == {"shown"}
            assert set((await workspace.diff()).files) == {"shown", "top", "vault/n"}
        fork = await view.fork()
        with pytest.raises(PermissionError):
            await fork.read("top")
        assert await fork.read("shown") == b"changed"
        await fork.close()
        await workspace.close()

    asyncio.run(main())


def test_a_hidden_link_hides_what_it_leads_to(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            await shell(
                workspace, "ln -s d/x link; ln -s /etc/passwd out; ln -s loop loop; ln -s . here"
            )
            view = workspace.view(Rights(hidden=("link", "out", "loop", "here/a.txt")))
            result = await shell(view, "cat d/x link a.txt; cat out > /dev/null && echo out")
            assert result.stdout == "out\n"
            assert result.stderr.count("Permission denied") == 3

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a/..", "", ".", "x\0"])
def test_paths_that_lead_elsewhere_are_refused(opened: Opener, path: str) -> None:
    async def main() -> None:
        async with opened() as workspace:
            with pytest.raises(ValueError, match="inside the workspace"):
                workspace.view(Rights(hidden=(path,)))

    asyncio.run(main())


def test_views_share_one_life(opened: Opener) -> None:
    async def main() -> None:
        async with opened() as workspace:
            one, other = workspace.view(Rights()), workspace.view(Rights(readonly=True))
            await one.write("n", b"1")
            await one.close()
            with pytest.raises(WorkspaceError, match="view"):
                await one.read("n")
            assert await other.read("n") == b"1"
            assert await workspace.read("n") == b"1"
            await workspace.close()
            with pytest.raises(WorkspaceError, match="closed"):
                await other.read("n")

    asyncio.run(main())


NAMES = st.sampled_from(
    ("top", "d", "d/e", "d/e/inner", "vault", "vault/deep", "m", "m/e", "a.txt", "/tmp/t", "d/x")
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("mv -T", "ln -T", "ln -sT", "cp -rT", "rm -rf", "mkdir -p", "mv -fT")),
        NAMES,
        NAMES,
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_no_sequence_of_steps_uncovers_or_removes_a_secret(
    sandbox: BubblewrapSandbox, image: Image, steps: list[tuple[str, str, str]]
) -> None:
    for name in HIDDEN[:2]:
        (image.root / name).write_text(SECRET)

    async def main() -> None:
        workspace = await sandbox.create(image)
        view = workspace.view(Rights(hidden=HIDDEN))
        for program, one, other in steps:
            operands = one if program in ("rm -rf", "mkdir -p") else f"{one} {other}"
            await shell(view, f"{program} {operands}")
        found = await shell(view, "grep -rsl hunter . /tmp; cat top d/e/inner")
        assert found.stdout == ""
        for name in HIDDEN[:2]:
            assert (await workspace.read(name)).decode() == SECRET
        await workspace.close()

    asyncio.run(main())
