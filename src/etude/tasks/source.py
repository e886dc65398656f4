"""Fetching the source of a repository: a folder, a git URL or a source release of PyPI.

Nothing of a fetched repository runs on the host: a source release is downloaded by pip *inside*
the sandbox, since pip runs a project's build backend to learn its metadata.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image
from etude.tasks.settings import PrepareSettings

JUNK_FOLDERS = frozenset({
    ".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox",
    ".nox", ".venv", "venv", ".hypothesis", ".eggs", "node_modules", ".idea", ".vscode",
})  # fmt: skip
"""Folders that are history, caches or environments, wherever they stand."""
JUNK_SUFFIXES = (".pyc", ".pyo")
_TOP_LEVEL_JUNK = re.compile(r"^(build|dist|htmlcov|\.coverage.*)$")
_PYPI = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*?)\s*(?:==\s*([A-Za-z0-9.!+_-]+))?$")
_GIT_SCHEMES = ("http://", "https://", "ssh://", "git://", "file://", "git+", "git@")
_SDIST = re.compile(r"^(?P<name>.+)-(?P<version>[0-9][^-]*)\.(?:tar\.(?:gz|bz2|xz)|zip|tgz)$")


@dataclass(frozen=True)
class FetchedSource:
    """A clean copy of a source tree. `key` is the hash of its files; `version` is empty when the
    source does not say it; `links` are the symbolic links that were left out."""

    name: str
    version: str
    root: Path
    key: str
    source: str
    links: tuple[str, ...] = ()


def check(source: str) -> None:
    """Raise EtudeError when `source` cannot be one: an unknown folder or a misspelt release."""
    if not source.strip():
        raise EtudeError("name a repository: a folder, a git URL or pypi:NAME")
    if source.startswith("pypi:"):
        _release(source)
    elif not source.startswith(_GIT_SCHEMES) and not Path(source).expanduser().is_dir():
        raise EtudeError(f"{source}: no such folder; give a folder, a git URL or pypi:NAME.")


async def fetch(
    source: str, cache: Path, sandbox: BubblewrapSandbox, settings: PrepareSettings
) -> FetchedSource:
    """Copy `source` into `cache`, without history, caches and build artefacts.

    A source release that is already in the cache is not downloaded again, so `pypi:NAME` works
    offline afterwards. Raises EtudeError when there is no such source or it holds no Python file.
    """
    check(source)
    folder = cache / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    if source.startswith("pypi:"):
        return await _fetch_release(source, folder, sandbox, settings)
    with tempfile.TemporaryDirectory(dir=folder, prefix="tmp-") as scratch:
        if source.startswith(_GIT_SCHEMES):
            target = Path(scratch) / "clone"
            name, origin = await asyncio.to_thread(_clone, source, target, settings)
        else:
            origin = Path(source).expanduser()
            name = origin.resolve().name
        return _store((source, name, ""), origin, folder, settings)


def _clone(source: str, target: Path, settings: PrepareSettings) -> tuple[str, Path]:
    """Clone the tip of the default branch. Returns (name, folder)."""
    git = shutil.which("git")
    if git is None:
        raise EtudeError(f"{source}: git is not installed; install it or give a folder instead.")
    url = source.removeprefix("git+")
    # In English, so that the line with the reason can be found.
    english = {"LC_ALL": "C.UTF-8", "LANGUAGE": "C"}
    unattended = {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    environment = {**os.environ, **english, **unattended}
    argv = [git, "-c", "core.hooksPath=/dev/null", "clone", "--quiet", "--depth", "1",
            "--single-branch", "--no-tags", "--", url, str(target)]  # fmt: skip
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=settings.fetch_timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EtudeError(
            f"{source}: git clone did not end within {settings.fetch_timeout:.0f} s."
        ) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["git clone failed"]
        reason = next((line for line in lines if line.startswith("fatal:")), lines[-1])
        raise EtudeError(f"{source}: not a repository that git can clone ({reason.strip()}).")
    name = url.rstrip("/").removesuffix(".git").replace(":", "/").rsplit("/", 1)[-1]
    return name or "repository", target


def _release(source: str) -> tuple[str, str | None]:
    """(name, version or None) of a `pypi:` source."""
    match = _PYPI.match(source.removeprefix("pypi:").strip())
    if match is None:
        raise EtudeError(f"{source}: write pypi:NAME or pypi:NAME==VERSION.")
    return match[1], match[2]


async def _fetch_release(
    source: str, folder: Path, sandbox: BubblewrapSandbox, settings: PrepareSettings
) -> FetchedSource:
    name, version = _release(source)
    requirement = f"{name}=={version}" if version else name
    downloads = folder / "releases" / re.sub(r"[^A-Za-z0-9.]+", "_", requirement).lower()
    archives = _archives(downloads)
    if not archives:
        await _download(source, requirement, downloads, sandbox, settings)
        archives = _archives(downloads)
    if len(archives) != 1:
        raise EtudeError(f"{source}: no source release of {requirement} could be found.")
    found = _SDIST.match(archives[0].name)
    with tempfile.TemporaryDirectory(dir=folder, prefix="tmp-") as scratch:
        tree = _unpack(source, archives[0], Path(scratch), settings)
        named = (source, name, found["version"] if found else "")
        return _store(named, tree, folder, settings)


def _archives(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []


async def _download(
    source: str,
    requirement: str,
    target: Path,
    sandbox: BubblewrapSandbox,
    settings: PrepareSettings,
) -> None:
    """Let pip fetch the source release into `target`, inside the sandbox."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="tmp-") as scratch:
        empty, out = Path(scratch) / "empty", Path(scratch) / "out"
        empty.mkdir()
        out.mkdir()
        # Only this project from source: what its build needs may come as wheels.
        name = requirement.split("==", 1)[0]
        argv = [*pip_command(), "download", "--no-deps", "--no-binary", name,
                "--no-cache-dir", "--dest", "/out", requirement]  # fmt: skip
        result = await sandbox.build(
            pip_image(empty),
            argv,
            writable={out: "/out"},
            network=True,
            timeout=settings.fetch_timeout,
            log=None,
        )
        if result.timed_out:
            raise EtudeError(
                f"{source}: the download did not end within {settings.fetch_timeout:.0f} s."
            )
        if result.exit_code != 0 and not _archives(out):
            raise EtudeError(
                f"{source}: pip could not download a source release of {requirement} "
                f"({pip_error(result.stderr)})."
            )
        if not target.exists():
            out.rename(target)


def pip_command() -> list[str]:
    """How to run pip inside a sandbox made from `pip_image`."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def pip_image(root: Path) -> Image:
    """An image with this program's own environment, for its pip, shown read-only."""
    prefix = Path(sys.prefix)
    return Image(root=root, readonly={prefix: str(prefix)})


def pip_error(text: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no message"])[-1].rstrip(".")[:300]


def _unpack(source: str, archive: Path, target: Path, settings: PrepareSettings) -> Path:
    """Unpack an archive whose members cannot leave `target`. Returns its one top folder."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                _check_size(source, (m.file_size for m in packed.infolist()), settings)
                packed.extractall(target)
        else:
            with tarfile.open(archive) as packed:
                members = packed.getmembers()
                _check_size(source, (m.size for m in members), settings)
                packed.extractall(target, members, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise EtudeError(f"{source}: {archive.name} is not a sound archive ({error}).") from error
    tops = [entry for entry in target.iterdir() if entry.is_dir()]
    return tops[0] if len(tops) == 1 else target


def _check_size(source: str, sizes: Iterator[int], settings: PrepareSettings) -> None:
    listed = list(sizes)
    if sum(listed) > settings.max_source_bytes or len(listed) > settings.max_files:
        raise EtudeError(
            f"{source}: too large ({sum(listed) >> 20} MiB in {len(listed)} files; the limits are "
            f"{settings.max_source_bytes >> 20} MiB and {settings.max_files})."
        )


def _store(
    named: tuple[str, str, str], origin: Path, folder: Path, settings: PrepareSettings
) -> FetchedSource:
    """Copy the clean part of `origin` into `folder`, under the hash of its content; `named` are
    source, name and version."""
    source, name, version = named
    files = list(clean_files(origin))
    _check_size(source, ((origin / f).lstat().st_size for f in files), settings)
    if not any(f.suffix == ".py" for f in files):
        raise EtudeError(f"{source}: holds no Python files; Etude makes tasks from Python only.")
    key = hash_tree(origin, files)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "repository"
    root = folder / f"{slug}-{key[:16]}"
    if not root.exists():
        copy = Path(tempfile.mkdtemp(dir=folder, prefix="tmp-"))
        try:
            for file in files:
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(origin / file, copy / file)
            copy.chmod(0o755)
            copy.rename(root)
        except OSError as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise EtudeError(f"{source}: could not be copied to {folder} ({error}).") from error
    links = tuple(shown(link) for link in dropped_links(origin))
    return FetchedSource(name, version, root, key, source, links)


def clean_files(root: Path) -> Iterator[Path]:
    """Regular files of a tree relative to it, sorted, without history, caches, artefacts and runs.

    Links are left out: one that leads out of the tree would show the host's files to the guest.
    """
    for path in _entries(root):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(root)


def dropped_links(root: Path) -> Iterator[Path]:
    """The symbolic links that `clean_files` leaves out, relative to the root."""
    for path in _entries(root):
        if path.is_symlink():
            yield path.relative_to(root)


def shown(path: Path) -> str:
    """A path as text that can be printed and stored, whatever bytes are in its name."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _entries(root: Path) -> Iterator[Path]:
    """Files, and links to files and folders, that are no junk."""
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        top = relative == Path()
        linked = {f for f in folders if Path(folder, f).is_symlink()}
        folders[:] = sorted(
            f
            for f in folders
            if f not in JUNK_FOLDERS
            and not f.endswith(".egg-info")
            and not (top and _TOP_LEVEL_JUNK.search(f))
            and not (Path(folder, f) / "pyvenv.cfg").exists()
            and not (Path(folder, f) / "run.db").exists()
        )
        for name in sorted([*names, *linked.intersection(folders)]):
            if name.endswith(JUNK_SUFFIXES) or (top and _TOP_LEVEL_JUNK.search(name)):
                continue
            yield Path(folder, name)
        folders[:] = [f for f in folders if f not in linked]


def hash_tree(root: Path, files: list[Path]) -> str:
    """SHA-256 over the paths, executable bits and bytes of `files`."""
    digest = hashlib.sha256()
    for file in files:
        path = root / file
        executable = path.stat().st_mode & 0o100 != 0
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        # A name is bytes: not every one is UTF-8.
        digest.update(os.fsencode(file.as_posix()))
        digest.update(f"\0{executable:d}\0{content}\n".encode())
    return digest.hexdigest()
