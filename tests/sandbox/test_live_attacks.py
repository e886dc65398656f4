"""What a hostile guest tries in a live folder on the git outside: ours, and the person's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_live import git, live, make, repository, shell

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.gitfacts import read_facts
from etude.sandbox.gitindex import gitlinks
from etude.sandbox.live import LiveFolder
from etude.sandbox.protocol import Image

__all__ = ["repository"]


def make_evil(folder: Path, marker: Path) -> None:
    """A repository with a sparse index whose folder is missing, and a program that fetches it."""
    make(folder)
    for name in ("kept", "sparse"):
        (folder / name).mkdir()
        (folder / name / "f").write_text(f"{name}\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=folders")
    git(folder, "sparse-checkout", "set", "--cone", "--sparse-index", "kept")
    tree = git(folder, "rev-parse", "HEAD:sparse").strip()
    (folder / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    program = folder / "m.sh"
    program.write_text(f"touch {marker}\n")
    for key, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": str(folder),
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": f"sh {program}",
        "core.fsmonitor": f"sh {program}",
    }.items():
        git(folder, "config", key, value)


def plant_gitlink(repository: Path, path: str, size: int) -> None:
    """Put a submodule in the index under a path that git would refuse: it stands for one of the
    same length that is there."""
    index = repository / ".git" / "index"
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},{'q' * size}")
    data = index.read_bytes().replace(b"q" * size, path.encode())
    index.write_bytes(data)


def test_our_git_runs_nothing_of_a_repository_that_the_guest_made(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    marker, old = tmp_path / "ran", tmp_path / "old"
    make_evil(old, marker)
    git(old, "-c", "core.fsmonitor=false", "ls-files", "--stage", check=False)
    assert marker.exists(), "the attack is real"
    marker.unlink()

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            # As a guest could have made it, with the paths of outside.
            shutil.copytree(old, repository / "evil")
            added = await shell(workspace, "git add evil 2>&1; git ls-files --stage evil")
            assert "160000" in added.stdout
            assert (await shell(workspace, "echo next")).stdout == "next\n"
            assert not marker.exists()
            assert any(t.startswith("evil/.git") for t in await workspace.changed_repositories())
        assert not marker.exists()
        async with live(sandbox, repository) as workspace:  # Now it is known from the start.
            assert (await shell(workspace, "echo next")).stdout == "next\n"
            assert "Read-only" in (await shell(workspace, "echo x > evil/.git/config")).stderr

    asyncio.run(main())
    assert not marker.exists()
    assert read_facts(repository).submodules == (repository / "evil",)
    # The repository as the folder itself: we ask git there, but for nothing that needs objects.
    assert read_facts(old).submodules == ()
    assert not marker.exists()


@pytest.mark.parametrize(
    "path", ["/{outside}", "../outside", "in/../../outside", ".git/x", "way/x"]
)
def test_submodules_lie_inside(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path, path: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "x").mkdir(parents=True)
    (repository / "in").mkdir()
    (repository / ".git" / "x").mkdir()
    (repository / "way").symlink_to(outside)
    path = path.replace("/{outside}", str(outside))
    plant_gitlink(repository, path, len(path))
    assert gitlinks(repository / ".git") == [path]

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            assert (await shell(workspace, "echo fine")).stdout == "fine\n"

    asyncio.run(main())
    assert [each.name for each in outside.rglob("*")] == ["x"]
    assert not (repository / ".git" / "x" / ".git").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ("index.version=2",),
        ("index.version=3",),
        ("index.version=4",),
        ("core.splitIndex=true",),
        ("index.skipHash=true",),
        ("sha256",),
    ],
)
def test_the_index_is_read_as_git_reads_it(
    repository: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    kind = "sha256" if settings == ("sha256",) else "sha1"
    git(folder, "init", "--quiet", f"--object-format={kind}")
    options = [part for each in settings if "=" in each for part in ("-c", each)]
    hashed = "1" * (64 if kind == "sha256" else 40)
    linked = ["a", "a/b" * 40, "deep/er/é", "z" * 130]
    for number in range(12):
        (folder / f"file{number:x}").write_text(str(number))
    git(folder, *options, "add", ".")
    git(folder, *options, "add", "--intent-to-add", ".")
    for path in linked[1:]:
        cache = f"160000,{hashed},{path}"
        git(folder, *options, "update-index", "--add", "--cacheinfo", cache)
    asked = git(folder, *options, "ls-files", "--stage", "-z").split("\0")
    expected = [line.partition("\t")[2] for line in asked if line.startswith("160000")]
    assert len(expected) == 3
    assert sorted(set(gitlinks(folder / ".git"))) == sorted(expected)


@given(st.data())
def test_any_index_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("index")
    version = data.draw(st.integers(0, 5)).to_bytes(4)
    count = data.draw(st.integers(0, 3)).to_bytes(4)
    body = data.draw(st.binary(max_size=300))
    (folder / "index").write_bytes(b"DIRC" + version + count + body)
    with contextlib.suppress(ValueError, FileNotFoundError):
        gitlinks(folder)


def test_a_draft_of_ours_follows_no_link(repository: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("host")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("commondir", "config.worktree"):
        (repository / ".git" / f"{name}.etude-{os.getpid()}").symlink_to(kept)
    live_folder = LiveFolder(repository, scratch)
    live_folder.guarded()
    assert (repository / ".git" / "commondir").read_text() == ".\n"
    assert kept.read_text() == "host"
    live_folder.close()
    inner = make(repository / "sub")
    git(repository, "add", "sub")
    live_folder = LiveFolder(repository, scratch)
    inner.rename(tmp_path / "moved")
    inner.symlink_to(tmp_path / "moved")
    with pytest.raises(EtudeError, match="symbolic link"):
        live_folder.guarded()
    live_folder.close()
    assert not (tmp_path / "moved" / ".git" / "commondir").exists()


def test_links_in_git_s_folder_are_removed(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "bashrc"
    secret.write_text("host\n")
    (repository / ".git" / "mine").symlink_to("refs")
    names = (
        "COMMIT_EDITMSG",
        "MERGE_MSG",
        "packed-refs",
        "logs/HEAD",
        "refs/heads/x",
        "objects/ff",
    )
    attack = "; ".join(f"rm -rf .git/{n}; ln -s {secret} .git/{n}" for n in names)

    def links() -> list[str]:
        git_folder = repository / ".git"
        return sorted(p.name for p in git_folder.rglob("*") if p.is_symlink())

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            assert await workspace.changed_repositories() == []
            await shell(workspace, attack)
            assert len(links()) == len(names) + 1
            await shell(workspace, "true")  # Before each command, as between turns.
            assert links() == ["ff", "mine"]
            told = await workspace.changed_repositories()
            assert links() == ["mine"]
            assert len([each for each in told if "was made a link to" in each]) == len(names)
            await shell(
                workspace, attack + "; ln -sfn /etc .git/mine; ln -s x \"$(printf '\\033[2J')\""
            )
        assert links() == []  # Also those of the last command, at close.

    asyncio.run(main())
    (repository / "n").write_text("n")
    git(repository, "add", "n")
    git(repository, "commit", "--quiet", "--message=person")
    assert secret.read_text() == "host\n"


def test_links_of_before_stay_and_are_told(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    """A session that was killed may have left them; or the person made them."""
    (tmp_path / "bashrc").write_text("host\n")
    (repository / ".git" / "COMMIT_EDITMSG").unlink()
    (repository / ".git" / "COMMIT_EDITMSG").symlink_to(tmp_path / "bashrc")
    (repository / ".git" / "logs" / "up").symlink_to("../../../bashrc")
    (repository / ".git" / "logs" / "within").symlink_to("../refs")

    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            told = sorted(await workspace.changed_repositories())
            assert [each.split(" is a link")[0] for each in told] == [
                str(repository / ".git" / name) for name in ("COMMIT_EDITMSG", "logs/up")
            ]

    asyncio.run(main())
    assert (repository / ".git" / "COMMIT_EDITMSG").is_symlink()


def test_links_in_the_repository_of_a_linked_worktree_are_removed(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    git(repository, "worktree", "add", "--quiet", str(tree))
    attack = (
        "cd $(git rev-parse --git-dir); rm -f index; ln -s /etc/passwd index; "
        "ln -s /etc/passwd COMMIT_EDITMSG; ln -s /etc/passwd ../../refs/heads/x"
    )

    async def main() -> None:
        async with live(sandbox, tree) as workspace:
            await shell(workspace, attack)
            assert len([path for path in repository.rglob("*") if path.is_symlink()]) == 3
            told = await workspace.changed_repositories()
            assert len({each for each in told if "was made a link" in each}) == 3
            assert not [path for path in repository.rglob("*") if path.is_symlink()]

    asyncio.run(main())


def test_operations_that_the_guest_began_are_told(
    sandbox: BubblewrapSandbox, repository: Path
) -> None:
    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            deep = "/".join("d" * 80)
            attack = f"echo x > .git/MERGE_MSG; mkdir -p .git/rebase-merge .git/refs/{deep}"
            await shell(workspace, attack)
            told = await workspace.changed_repositories()
            assert len(told) == 3
            for each in ("MERGE_MSG was made", "rebase-merge was made", "lie too deep"):
                assert any(each in sentence for sentence in told)
        async with live(sandbox, repository) as workspace:
            assert not any("MERGE_MSG" in t for t in await workspace.changed_repositories())

    asyncio.run(main())


def test_a_submodule_of_this_session_is_told(sandbox: BubblewrapSandbox, repository: Path) -> None:
    async def main() -> None:
        async with live(sandbox, repository) as workspace:
            made = "git init -q new; cd new; git commit -q --allow-empty -m x; cd ..; git add new"
            await shell(workspace, made)
            told = await workspace.changed_repositories()
            assert [each.split("/.git was")[0] for each in told] == ["new"]
            # Very deep folders hide nothing and end nothing.
            deep = "for n in $(seq 90); do mkdir -p $d; cd $d; done"
            try:
                await shell(workspace, f"d={'d/' * 30}; {deep}; git init -q")
                assert len(await workspace.changed_repositories()) >= 2
            finally:
                await shell(workspace, "rm -rf d")  # Too deep for pytest to tidy up.
            assert not (repository / "d").exists()

    asyncio.run(main())


def test_bare_repositories_are_told(
    sandbox: BubblewrapSandbox, repository: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    git(plain, "init", "--quiet", "--bare", "kept")
    git(plain, "init", "--quiet", "--bare", "hooked")
    (plain / "hooked" / "hooks" / "update").write_text("old")
    bare = ("HEAD", "objects", "refs")

    async def main() -> None:
        await asyncio.sleep(0.05)
        async with live(sandbox, plain) as workspace:
            assert await workspace.changed_repositories() == []
            attack = (
                "git init -q --bare x; mv x/* .; rm -r x; git init -q --bare deep/er; "
                "mkdir c; cp HEAD c; echo .. > c/commondir; echo new > hooked/hooks/update"
            )
            await shell(workspace, attack)
            assert all((plain / name).exists() for name in bare)
            told = await workspace.changed_repositories()
            assert [each.split(" was made")[0] for each in told] == [".", "c", "deep/er", "hooked"]
        with pytest.raises(EtudeError, match="bare git repository"):
            await sandbox.create(Image(plain, live=True))

    asyncio.run(main())
