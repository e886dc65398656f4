"""A person's own folder as the workspace: changes land there, and nothing that runs later."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from patience import ended

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Diff, ExecResult, Image, Limits, Rights, WorkspaceError
from etude.sandbox.workspace import BubblewrapWorkspace


def git(folder: Path, *arguments: str, check: bool = True) -> str:
    """The person's own git, outside."""
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "protocol.file.allow=always", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "GIT_EDITOR": "false"},
        capture_output=True,
        text=True,
        check=check,
        timeout=60,
    )
    return done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(
        '[user]\n\tname = Ada \\"L\\" Byron\n\temail = ada@example.org\n'
    )
    return make(tmp_path / "project")


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.txt").write_text("alpha\n")
    git(folder, "init", "--quiet", "--template=")
    git(folder, "add", "a.txt")
    git(folder, "commit", "--quiet", "--message=first")
    return folder


@asynccontextmanager
async def live(
    sandbox: BubblewrapSandbox, root: Path, limits: Limits | None = None
) -> AsyncGenerator[BubblewrapWorkspace]:
    workspace = await sandbox.create(Image(root, live=True), limits)
    try:
        yield workspace
    finally:
        await workspace.close()


async def shell(workspace: BubblewrapWorkspace, script: str) -> ExecResult:
    return await workspace.exec(["sh", "-c", script], timeout=60)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_changes_land_at_once_and_only_there(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    root, outside = tmp_path / "project", tmp_path / "outside"
    for folder in (root / "d", outside):
        folder.mkdir(parents=True)
    (outside / "kept").write_text("host")
    (root / "out").symlink_to(outside)
    (root / "last").symlink_to(outside / "kept")
    (root / "dangling").symlink_to(outside / "new")
    (root / "up").symlink_to("../outside")
    (root / "gone").write_text("gone")

    async def main() -> None:
        async with live(sandbox, root) as workspace:
            await workspace.write("d/n", b"new")
            assert (root / "d" / "n").read_bytes() == b"new"
            assert (root / "d" / "n").stat().st_uid == os.getuid()
            await shell(workspace, "rm gone; echo x > made; chmod 750 made")
            assert not (root / "gone").exists()
            assert (root / "made").stat().st_mode & 0o777 == 0o750
            (root / "seen").write_text("from outside")
            assert await workspace.read("seen") == b"from outside"
            for path in ("out/kept", "last", "dangling", "up/kept", "../outside/kept"):
                with pytest.raises(OSError, match="No such file"):
                    await workspace.read(path)
                with pytest.raises(OSError, match=r"No such file|File exists|Permission|Read-only"):
                    await workspace.write(path, b"guest")
            await shell(workspace, "rm -rf out/* up/* last/. ../etc/*; echo x > dangling")
            await shell(workspace, f"mkdir -p {outside}; echo x > {outside}/new; rm -rf {outside}")
            assert await workspace.diff() == Diff({})
            with pytest.raises(WorkspaceError, match="snapshots"):
                await workspace.snapshot()
            with pytest.raises(WorkspaceError, match="snapshots"):
                await workspace.restore("any")
        assert names(outside) == ["kept"]
        assert (outside / "kept").read_text() == "host"
        assert ".git" not in names(root)

    asyncio.run(main())


def test_a_fork_of_a_live_workspace_is_a_copy(sandbox: BubblewrapSandbox, repository: Path) -> None:
    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            await workspace.write("n", b"live")
            await workspace.start(["sleep", "600"])
            fork = await workspace.fork()
            assert await fork.read("n") == b"live"
            await fork.write("n", b"tried")
            await shell(fork, "rm a.txt")
            assert (await fork.diff()).files == {"n": b"tried", "a.txt": None}
            kept = await fork.snapshot()
            await fork.restore(kept)
            await fork.close()
            assert (repository / "n").read_bytes() == b"live"
            assert (repository / "a.txt").exists()
            assert (await workspace.jobs())[0].running

    asyncio.run(main())


def test_git_works_inside_and_outside(sandbox: BubblewrapSandbox, repository: Path) -> None:
    before = names(repository / ".git")

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            script = (
                "echo beta > b.txt; echo more >> a.txt; git status --short && git diff --stat && "
                "git add -A && git commit -qm 'by the agent' && git switch -qc side && "
                "git mv b.txt c.txt && git commit -qam moved && git switch -q master && "
                "git merge -q side && git stash list && git log --format='%s %an %ae'"
            )
            result = await shell(workspace, script)
            assert (result.exit_code, result.stderr) == (0, "")
            line = 'Ada "L" Byron ada@example.org'
            assert result.stdout.endswith(f"moved {line}\nby the agent {line}\nfirst {line}\n")
            # The person's git sees the same, while the stand-ins are there too.
            assert git(repository, "status", "--short") == ""
            assert git(repository, "log", "--format=%s").split("\n")[0] == "moved"
            assert git(repository, "fsck") == ""
            git(repository, "switch", "--quiet", "side")
            assert (await shell(workspace, "git branch --show-current")).stdout == "side\n"
            view = workspace.view(Rights(readonly=True))
            assert (await shell(view, "git status --short; git log -1 --format=%s")).stdout == (
                "moved\n"
            )
            assert (await shell(view, "git commit --allow-empty -m x")).exit_code != 0

    asyncio.run(main())
    # Nothing of ours stays.
    kinds = {name.split("/")[0] for name in names(repository / ".git")}
    made = {"COMMIT_EDITMSG", "ORIG_HEAD", "logs"}
    assert kinds - made == {name.split("/")[0] for name in before} - made


ATTACKS = {
    "hook": "mkdir -p $G/hooks; printf '#!/bin/sh\n$X\n' > $G/hooks/post-checkout; "
    "cp $G/hooks/post-checkout $G/hooks/pre-commit; chmod +x $G/hooks/*",
    "config": "git config core.fsmonitor '$X'; printf '[core]\nfsmonitor = $X\n' >> $G/config",
    "replaced config": "printf '[core]\nfsmonitor = $X\n' > $G/c; cp $G/c $G/e; "
    "mv -f $G/c $G/config; rm -f $G/config; mv $G/e $G/config",
    "worktree config": "printf '[core]\nfsmonitor = $X\n' > $G/config.worktree; "
    "rm -f $G/config.worktree; printf '[core]\nfsmonitor = $X\n' > $G/config.worktree",
    "common folder": "mkdir evil; cp -r $G/objects $G/refs $G/HEAD evil/; "
    "printf '[core]\nrepositoryformatversion = 0\nfsmonitor = $X\n' > evil/config; "
    "rm -f $G/commondir; echo ../evil > $G/commondir; echo ../evil > x; mv -f x $G/commondir",
    "whole folder": "cp -r .git evil; printf '[core]\nfsmonitor = $X\n' > evil/config; "
    "mv .git old; rm -rf .git; mv evil .git; mv -T evil .git; ln -sfn evil .git; "
    "cp evil/config .git/config",
    "attributes": "mkdir -p $G/info; echo '* filter=x' > $G/info/attributes; "
    "git config filter.x.clean '$X'",
    "modules": "mkdir -p $G/modules/m; printf '[core]\nfsmonitor = $X\n' > $G/modules/m/config",
    "hard link": "ln $G/config c; printf '[core]\nfsmonitor = $X\n' >> c; ln $G/hooks/x y",
    "exchange": "python3 -c 'import ctypes,os; "
    'os.mkdir("e"); ctypes.CDLL(None).renameat2(-100, b"e", -100, b".git/hooks", 2)\'',
}


def guarded_state(root: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in ("config", "hooks", "info", "modules", "worktrees", "commondir"):
        path = root / ".git" / name
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                found[str(file.relative_to(root))] = file.read_bytes()
    return found


@pytest.mark.parametrize("attack", ATTACKS)
def test_git_s_own_files_never_become_code(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path, attack: str
) -> None:
    mark = tmp_path / "ran"
    script = ATTACKS[attack].replace("$G", ".git").replace("$X", f"touch {mark}; false")
    before = guarded_state(repository)

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            await shell(workspace, script)
            during = guarded_state(repository)
            assert during.pop(".git/commondir") == b".\n"
            assert during == before
            git(repository, "status", check=False)
            job = await workspace.start(["sh", "-c", script])
            await ended(workspace, job)
            assert (await workspace.output(job))[1] > 0

    asyncio.run(main())
    assert guarded_state(repository) == before
    for command in (("status",), ("commit", "--allow-empty", "-mx"), ("switch", "-c", "new")):
        git(repository, *command, check=False)
    git(repository, "add", "-A", check=False)
    assert not mark.exists()


def test_the_attacks_are_real(repository: Path, tmp_path: Path) -> None:
    """Done outside, without a guard, most of them run what they wrote; else they prove nothing."""
    ran: set[str] = set()
    for number, attack in enumerate(ATTACKS):
        folder = make(tmp_path / f"victim{number}")
        mark = tmp_path / f"ran{number}"
        script = ATTACKS[attack].replace("$G", ".git").replace("$X", f"touch {mark}; false")
        subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, check=False)
        (folder / "n").touch()
        for command in (("status",), ("add", "-A"), ("commit", "-mx"), ("switch", "-c", "new")):
            git(folder, *command, check=False)
        if mark.exists():
            ran.add(attack)
    assert ran >= set(ATTACKS) - {"modules", "exchange", "worktree config"}


def test_a_folder_that_is_no_repository_stays_none(
    sandbox: BubblewrapSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "plain"
    root.mkdir()

    async def main() -> None:
        async with live(sandbox, root) as workspace:
            result = await shell(workspace, "git init . ; mkdir .git/hooks; rm -rf .git; mv .git x")
            assert "Read-only" in result.stderr
            assert [path.name for path in root.iterdir()] == [".git"]
            # The person may make it one at any time: from then on it is guarded as such.
            git(root, "init", "--quiet", "--template=")
            before = guarded_state(root)
            assert (await shell(workspace, "git status --short && echo fine")).stdout == "fine\n"
            await shell(workspace, ATTACKS["config"].replace("$G", ".git"))
            assert guarded_state(root) == {**before, ".git/commondir": b".\n"}
        assert sorted(path.name for path in (root / ".git").iterdir()) == [
            "HEAD",
            "config",
            "objects",
            "refs",
        ]

    asyncio.run(main())


def test_stand_ins_stay_while_another_session_needs_them(
    sandbox: BubblewrapSandbox, repository: Path
) -> None:
    async def main() -> None:
        one = await sandbox.create(Image(repository, live=True))
        async with live(sandbox, repository) as other:
            await one.close()
            assert (repository / ".git" / "commondir").exists()
            assert (await shell(other, "echo x > .git/commondir")).exit_code != 0
        assert not (repository / ".git" / "commondir").exists()

    asyncio.run(main())


KILLED = """
import os, signal, sys
from pathlib import Path
from etude.sandbox.live import LiveFolder
folder = LiveFolder(Path(sys.argv[1]), Path(sys.argv[2]))
folder.guarded()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_session_left_goes_with_the_next_one(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    """Exactly what it made and nobody used since: the person's own empty folders stay."""
    (repository / ".git" / "branches").mkdir()
    before = names(repository)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", KILLED, str(repository), str(scratch)]
    done = subprocess.run(command, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    left = set(names(repository)) - set(before)
    assert {".git/config.worktree", ".git/modules", ".git/remotes", ".git/worktrees"} <= left
    (repository / ".git" / "remotes" / "old").write_text("URL: x\n")
    (repository / ".git" / "info" / "exclude").write_text("*.log\n")

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            assert (await shell(workspace, "git status --short")).exit_code == 0

    asyncio.run(main())
    used = [".git/info", ".git/info/exclude", ".git/remotes", ".git/remotes/old"]
    assert names(repository) == sorted([*before, *used])
    assert not list((tmp_path / ".local" / "state" / "etude" / "live").iterdir())


def test_the_person_s_own_change_of_git_s_files_ends_what_it_unprotects(
    sandbox: BubblewrapSandbox, repository: Path
) -> None:
    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            waiting = asyncio.ensure_future(shell(workspace, "sleep 30"))
            await asyncio.sleep(0.5)
            git(repository, "config", "alias.x", "status")
            result = await waiting
            assert result.exit_code == 137
            assert "replaced from outside" in result.stderr
            assert (await shell(workspace, "echo y >> .git/config")).exit_code != 0
            assert (await shell(workspace, "git config alias.x")).stdout == "status\n"

    asyncio.run(main())


@pytest.mark.parametrize("as_job", [False, True])
def test_a_hidden_file_that_is_replaced_from_outside_ends_what_would_see_it(
    sandbox: BubblewrapSandbox, repository: Path, as_job: bool
) -> None:
    """An editor saves by renaming; what started before looks at that place until it is killed."""
    (repository / ".env").write_text("old")
    # Long enough for the watch, which looks at intervals.
    script = "while sleep 5; do cat .env; done"

    async def main() -> None:
        async with live(sandbox, repository) as whole:
            view = whole.view(Rights(hidden=(".env",)))
            job = await view.start(["sh", "-c", script]) if as_job else ""
            waiting = None if as_job else asyncio.ensure_future(shell(view, script))
            await asyncio.sleep(0.5)
            (repository / "draft").write_text("secret")
            (repository / "draft").rename(repository / ".env")
            if waiting is not None:
                result = await waiting
                assert result.exit_code == 137 and "replaced from outside" in result.stderr
                assert "secret" not in result.stdout
            else:
                deadline = time.monotonic() + 20
                while any(each.running for each in await view.jobs()):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)
                assert "secret" not in (await view.output(job))[0]
            assert "secret" not in (await shell(view, "cat .env")).stdout

    asyncio.run(main())


def test_what_the_configuration_names_is_guarded(
    sandbox: BubblewrapSandbox, repository: Path
) -> None:
    for name in ("tools/hooks/pre-commit", "tools/clean.sh", "shared.ini", "free.txt"):
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[alias]\n\tx = status\n" if name == "shared.ini" else "#!/bin/sh\ncat\n")
    git(repository, "config", "core.hooksPath", "tools/hooks")
    git(repository, "config", "filter.x.clean", "sh ./tools/clean.sh --fast")
    git(repository, "config", "include.path", "../shared.ini")

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            for name in (
                "tools/hooks/pre-commit",
                "tools/hooks/new",
                "tools/clean.sh",
                "shared.ini",
            ):
                result = await shell(workspace, f"echo x > {name}; rm -f {name}; mv {name} y")
                assert "Read-only" in result.stderr
            moved = (
                "mv tools t; rm -rf tools; mv tools/hooks tools/h; mkdir -p tools/hooks; ls tools"
            )
            assert (await shell(workspace, moved)).stdout == "clean.sh\nhooks\n"
            assert (await shell(workspace, "echo x > tools/new; echo y > free.txt")).exit_code == 0
        (repository / "shared.ini").unlink()
        with pytest.raises(EtudeError, match=r"shared\.ini, which does not exist"):
            await sandbox.create(Image(repository, live=True))

    asyncio.run(main())


def test_a_linked_worktree(sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    git(repository, "worktree", "add", "--quiet", "-b", "side", str(tree))
    main_git = repository / ".git"
    other = git(repository, "rev-parse", "master")

    async def main() -> None:
        async with live(sandbox, tree) as workspace:
            result = await shell(
                workspace, "echo n > n; git add n && git commit -qm side && git status --short"
            )
            assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
            before = {path: path.read_bytes() for path in main_git.rglob("*") if path.is_file()}
            attack = (
                "G=/repository.git; W=$G/worktrees/tree; echo x > .git; rm -f .git; mv .git g; "
                "for f in $G/config $G/hooks/pre-commit $G/HEAD $G/index $G/commondir "
                "$W/commondir $W/gitdir $W/config.worktree; do echo x > $f; rm -f $f; done; "
                "git config core.fsmonitor false; git worktree prune --expire=now; "
                "echo '[core]' > /tmp/c; mv -f /tmp/c $W/commondir"
            )
            assert "Read-only" in (await shell(workspace, attack)).stderr
            after = {path: path.read_bytes() for path in main_git.rglob("*") if path.is_file()}
            assert after == before

    asyncio.run(main())
    assert git(tree, "log", "--format=%s") == "side\nfirst\n"
    assert git(tree, "status", "--short") == ""
    assert git(repository, "rev-parse", "master") == other
    assert not (main_git / "commondir").exists()
    assert "tree" in git(repository, "worktree", "list")


def test_a_submodule_inside_and_as_the_folder(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    inner = make(tmp_path / "library")
    git(repository, "submodule", "--quiet", "add", str(inner), "libs/sub")
    git(repository, "commit", "--quiet", "-m", "with a submodule")
    sub = repository / "libs" / "sub"
    modules = repository / ".git" / "modules" / "libs" / "sub"
    config = (modules / "config").read_bytes()

    async def outer() -> None:
        async with live(sandbox, repository) as workspace:
            shown = await shell(workspace, "git status --short; git -C libs/sub log --format=%s")
            assert (shown.stdout, shown.stderr) == ("first\n", "")
            attack = (
                "rm -f libs/sub/.git; mkdir libs/sub/.git; mv libs l; mv -T libs/sub libs/s; "
                "rm -rf libs/s libs; git -C libs/sub config core.fsmonitor 'touch /tmp/x'; "
                "echo x > .git/modules/libs/sub/config; ls -d libs/sub"
            )
            assert (await shell(workspace, attack)).stdout == "libs/sub\n"
        assert (modules / "config").read_bytes() == config

    async def within() -> None:
        async with live(sandbox, sub) as workspace:
            script = (
                "echo m >> a.txt; git status --short && git commit -qam more && "
                "git log -1 --format=%s"
            )
            result = await shell(workspace, script)
            assert (result.stdout, result.stderr) == (" M a.txt\nmore\n", "")
            attack = "git config core.fsmonitor false; echo x > /repository.git/config; rm -f .git"
            assert "fatal" not in (await shell(workspace, attack)).stdout
        assert (modules / "config").read_bytes() == config

    asyncio.run(outer())
    assert (sub / ".git").is_file()
    asyncio.run(within())
    assert git(sub, "log", "-1", "--format=%s") == "more\n"
    assert git(repository, "status", "--short").strip() == "M libs/sub"


def test_a_git_file_that_anyone_wrote_opens_nothing(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    forged = tmp_path / "forged"
    forged.mkdir()
    (forged / ".git").write_text(f"gitdir: {repository}/.git\n")

    async def main() -> None:
        async with live(sandbox, forged) as workspace:
            result = await shell(workspace, "ls /repository.git; git log; echo x > .git")
            assert result.stdout == ""
            assert "Read-only" in result.stderr

    asyncio.run(main())


def test_a_bare_repository_inside(sandbox: BubblewrapSandbox, repository: Path) -> None:
    """`.git` may lead to a repository in the folder itself, a usual layout for worktrees."""
    (repository / ".git").rename(repository / ".bare")
    (repository / ".git").write_text("gitdir: ./.bare\n")

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            script = "echo n > n; git add n && git commit -qm n && git log -1 --format=%s"
            assert (await shell(workspace, script)).stdout == "n\n"
            attack = (
                "echo x > .bare/config; echo x > .bare/hooks/pre-commit; mv .bare b; rm -f .git; "
                "rm -f .bare/commondir; git config core.fsmonitor false"
            )
            assert "Read-only" in (await shell(workspace, attack)).stderr

    config = (repository / ".bare" / "config").read_bytes()
    asyncio.run(main())
    assert (repository / ".bare" / "config").read_bytes() == config
    assert git(repository, "log", "-1", "--format=%s") == "n\n"


def test_new_repositories_in_subfolders_are_told(
    sandbox: BubblewrapSandbox, repository: Path
) -> None:
    make(repository / "old")
    make(repository / "vendored")

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            assert await workspace.changed_repositories() == []
            await shell(
                workspace,
                "git init -q deep/new; git -C old config core.fsmonitor x; touch -d 2001-01-01 "
                "old/.git/config deep/new/.git deep/new/.git/*; mkdir p; echo 'gitdir: x' > p/.git",
            )
            told = await workspace.changed_repositories()
            assert [each.split("/.git was")[0] for each in told] == ["deep/new", "old", "p"]

    time.sleep(0.05)
    asyncio.run(main())


def test_folders_that_cannot_be_made_safe(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    async def refused(root: Path) -> str:
        with pytest.raises(EtudeError) as caught:
            await sandbox.create(Image(root, live=True))
        return str(caught.value)

    async def main() -> None:
        assert "home folder" in await refused(tmp_path)
        assert "home folder" in await refused(Path("/"))
        (repository / "hooks").mkdir()
        (repository / ".git" / "hooks").symlink_to("../hooks")
        assert "symbolic link" in await refused(repository)
        (repository / ".git" / "hooks").unlink()
        (repository / ".git").rename(tmp_path / "elsewhere")
        (repository / ".git").symlink_to(tmp_path / "elsewhere")
        assert "symbolic link" in await refused(repository)
        tool = Image(repository, {tmp_path / "elsewhere": "/workspace/tool"}, live=True)
        with pytest.raises(WorkspaceError, match="inside a live folder"):
            await sandbox.create(tool)

    asyncio.run(main())
    assert sorted(path.name for path in repository.iterdir()) == [".git", "a.txt", "hooks"]


def test_a_large_file_is_cut_off_and_a_large_folder_is_not_measured(
    sandbox: BubblewrapSandbox, repository: Path
) -> None:
    (repository / "large").write_bytes(bytes(8 << 20))

    async def main() -> None:
        async with live(sandbox, repository, Limits(disk_bytes=4 << 20)) as workspace:
            result = await shell(workspace, "head -c 6M /dev/zero > big; rm big; echo fine")
            assert result.stdout == "fine\n"
            assert "limit" in result.stderr

    asyncio.run(main())
