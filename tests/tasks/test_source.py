"""Fetching: what is copied, what is left out, and one clear sentence for each bad source."""

import asyncio
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.tasks.settings import PrepareSettings
from etude.tasks.source import FetchedSource, fetch


def fetch_now(source: str, cache: Path, **settings: int) -> FetchedSource:
    return asyncio.run(fetch(source, cache, BubblewrapSandbox(), PrepareSettings(**settings)))


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir()}


def test_a_folder_is_copied_without_history_caches_artefacts_and_links(tmp_path: Path) -> None:
    root = write(tmp_path / "proj", pkg__a_py="x = 1\n", docs__build__b_py="")
    for junk in (".git/config", "pkg/__pycache__/a.pyc", ".venv/x.py", "build/lib/pkg/a.py",
                 "dist/p.whl", "proj.egg-info/PKG-INFO", "src/q.egg-info/x", ".coverage",
                 ".mypy_cache/c.py", "myenv/pyvenv.cfg", "myenv/lib/pkg.py",
                 "pkg/old.pyc"):  # fmt: skip
        (root / junk).parent.mkdir(parents=True, exist_ok=True)
        (root / junk).write_text("junk")
    (root / "PKG-INFO").write_text("Name: proj")
    (root / "host").symlink_to("/etc/passwd")
    (root / "hostdir").symlink_to("/etc")
    (root / "build").joinpath("link").symlink_to("/etc")
    found = fetch_now(str(root), tmp_path / "cache")
    assert names(found.root) == {"pkg/a.py", "docs/build/b.py", "PKG-INFO"}
    assert found.name == "proj"
    assert found.links == ("host", "hostdir")
    again = fetch_now(str(root), tmp_path / "other")
    assert (again.key, again.root.name) == (found.key, found.root.name)
    (root / "pkg/a.py").write_text("x = 2\n")
    assert fetch_now(str(root), tmp_path / "cache").key != found.key
    assert not [p for p in (tmp_path / "cache" / "sources").iterdir() if p.name.startswith("tmp-")]


def test_names_that_are_no_utf8_are_part_of_the_tree(tmp_path: Path) -> None:
    root = write(tmp_path / "proj", m_py="x = 1\n")
    odd = os.fsdecode(b"caf\xe9.txt")
    (root / odd).write_text("one")
    (root / os.fsdecode(b"l\xefnk")).symlink_to("/etc")
    found = fetch_now(str(root), tmp_path / "cache")
    assert names(found.root) == {"m.py", odd}
    assert found.links == ("l\\xefnk",)
    (root / odd).rename(root / os.fsdecode(b"caf\xe8.txt"))
    assert fetch_now(str(root), tmp_path / "cache").key != found.key


def git(folder: Path, *arguments: str) -> None:
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
                "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": "/dev/null"}  # fmt: skip
    subprocess.run(["git", *arguments], cwd=folder, check=True, env={**os.environ, **identity})


def test_a_git_url_gives_the_tip_of_the_default_branch(tmp_path: Path) -> None:
    origin = write(tmp_path / "origin", m_py="old = 1\n")
    git(origin, "init", "-q", "-b", "trunk")
    git(origin, "add", ".")
    git(origin, "commit", "-q", "-m", "one")
    (origin / "m.py").write_text("new = 1\n")
    git(origin, "commit", "-q", "-am", "two")
    found = fetch_now(f"file://{origin}", tmp_path / "cache")
    assert names(found.root) == {"m.py"}
    assert (found.root / "m.py").read_text() == "new = 1\n"
    assert found.name == "origin"


def test_a_git_source_cannot_pass_options_or_run_commands(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for source in (f"git+--upload-pack=touch {mark}", f"git+ext::sh -c touch% {mark}"):
        with pytest.raises(EtudeError, match="not a repository that git can clone"):
            fetch_now(source, tmp_path / "cache")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "no such folder; give a folder, a git URL or pypi:NAME"),
        ("file:///no/such/repo", "'/no/such/repo' does not appear to be a git repository"),
        ("", "name a repository: a folder, a git URL or pypi:NAME"),
        ("pypi:../evil", "write pypi:NAME or pypi:NAME==VERSION"),
        ("pypi:", "write pypi:NAME or pypi:NAME==VERSION"),
        ("pypi:a --index-url=x", "write pypi:NAME or pypi:NAME==VERSION"),
    ],
)
def test_bad_sources_get_one_sentence(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EtudeError) as error:
        fetch_now(source, tmp_path / "cache")
    assert message in str(error.value) and source in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_python_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "p", readme="hello")
    with pytest.raises(EtudeError, match="holds no Python files"):
        fetch_now(str(tmp_path / "p"), tmp_path / "cache")


def test_a_folder_over_the_limit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "p", m_py="x = 1\n" * 1000)
    with pytest.raises(EtudeError, match="too large"):
        fetch_now(str(tmp_path / "p"), tmp_path / "cache", max_source_bytes=100)


def archive(cache: Path, name: str, members: dict[str, bytes]) -> None:
    folder = cache / "sources" / "releases" / name
    folder.mkdir(parents=True)
    with tarfile.open(folder / f"{name}-1.5.tar.gz", "w:gz") as packed:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            packed.addfile(info, io.BytesIO(data))


def test_a_release_in_the_cache_needs_no_network_and_knows_its_version(tmp_path: Path) -> None:
    archive(tmp_path, "small", {"small-1.5/m.py": b"x = 1\n", "small-1.5/PKG-INFO": b"Name: small"})
    found = fetch_now("pypi:small", tmp_path)
    assert (found.name, found.version) == ("small", "1.5")
    assert names(found.root) == {"m.py", "PKG-INFO"}


def test_an_archive_cannot_write_outside(tmp_path: Path) -> None:
    archive(tmp_path, "evil", {"../../../escaped.py": b"x = 1\n"})
    with pytest.raises(EtudeError, match="not a sound archive"):
        fetch_now("pypi:evil", tmp_path)
    assert not list(tmp_path.rglob("escaped.py"))


@pytest.mark.slow
def test_a_release_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="could not download a source release"):
        fetch_now("pypi:toolz==0.0.0.1", tmp_path)
