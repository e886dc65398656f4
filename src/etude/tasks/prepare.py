"""Preparing a repository: clean tree, environment, and the tests that pass every time.

All of the repository's code (its build backend, its tests) runs inside the sandbox.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.errors import EtudeError
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import WORKSPACE_ROOT, Image
from etude.tasks.repository import Repository
from etude.tasks.requirements import declared_requirements, extra_names
from etude.tasks.runner import SuiteResult, SuiteRunner
from etude.tasks.settings import PrepareSettings
from etude.tasks.source import (
    FetchedSource,
    clean_files,
    fetch,
    pip_command,
    pip_error,
    pip_image,
    shown,
)

PREPARATION = 2
"""Part of every key: raise it when preparation changes what it leaves behind."""
RECORD = "repository.json"
_TEST_NAME = re.compile(r"^(test_.*|.*_test|tests?|conftest)\.py$")
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_NO_SOURCE_FOLDERS = frozenset(
    {"doc", "docs", "example", "examples", "bench", "benchmark", "benchmarks", "scripts", "tools"}
)
_NO_SOURCE_NAMES = frozenset({"setup.py", "conftest.py", "noxfile.py", "versioneer.py"})

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Failed)(?::|$)")
_MAX_REASON = 300
"""Characters."""
_NAMED = 3
"""How many names of a longer list a person is told."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Means:
    """What preparation works with, passed along."""

    sandbox: BubblewrapSandbox
    settings: PrepareSettings
    say: Progress


async def prepare(
    source: str,
    *,
    cache: Path,
    sandbox: BubblewrapSandbox,
    settings: PrepareSettings | None = None,
    progress: Progress | None = None,
) -> Repository:
    """Fetch `source`, install it with its tests' requirements and find the tests that pass.

    The result is kept in `cache` under a key of content and preparation; a second call returns
    it at once. A test counts when it passed three times: as is, in another order and under
    another hash seed. Raises EtudeError, one sentence each, when there is no such source, when
    it cannot be installed, when there are no tests or none passes.
    """
    settings = settings or PrepareSettings()
    say = progress or _silent
    cache = cache.expanduser().resolve()
    try:
        say(f"fetching {source}")
        fetched = await fetch(source, cache, sandbox, settings)
        if fetched.links:
            say(f"left out {_listed(fetched.links, 'symbolic link')}")
        key = _key(fetched, settings)
        folder = cache / "repositories" / key
        folder.mkdir(parents=True, exist_ok=True)
        async with _locked(folder / "lock", settings.install_timeout + 4 * settings.suite_timeout):
            known = _load(folder)
            if known is not None:
                return known
            return await _prepare(fetched, key, folder, _Means(sandbox, settings, say))
    except OSError as error:
        raise EtudeError(
            f"{source}: could not be prepared in {cache} ({error.strerror or error})."
        ) from error


def _silent(_: str) -> None:
    """Progress that nobody reads."""


def _listed(names: Sequence[str], what: str) -> str:
    """`3 symbolic links: a, b, c`, with three names at most."""
    more = ", …" if len(names) > _NAMED else ""
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} {what}{plural}: {', '.join(names[:_NAMED])}{more}"


def _key(fetched: FetchedSource, settings: PrepareSettings) -> str:
    parts = [PREPARATION, fetched.key, fetched.version, sys.version, sys.base_prefix,
             settings.extra_requirements]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _load(folder: Path) -> Repository | None:
    """The finished preparation in `folder`, or None where there is none or it was damaged."""
    record = folder / RECORD
    if not record.is_file():
        return None
    try:
        repository = Repository.model_validate_json(record.read_bytes())
    except ValueError:
        return None
    whole = repository.root == folder / "root" and (repository.env / "bin" / "python").exists()
    return repository if whole and repository.root.is_dir() else None


@asynccontextmanager
async def _locked(path: Path, timeout: float) -> AsyncGenerator[None]:
    """Hold an exclusive lock on `path`: two processes never prepare into one folder."""
    with path.open("w") as handle:
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise EtudeError(
                        f"{path.parent} has been locked by another process for {timeout:.0f} s; "
                        "end that process and try again."
                    ) from None
                await asyncio.sleep(0.2)
        yield


async def _prepare(
    fetched: FetchedSource,
    key: str,
    folder: Path,
    means: _Means,
) -> Repository:
    say = means.say
    root, env = folder / "root", folder / "env"
    for old in (root, env):
        if old.exists():
            await asyncio.to_thread(shutil.rmtree, old)
    await asyncio.to_thread(shutil.copytree, fetched.root, root)
    say("installing the repository and what its tests need")
    await _install(fetched, root, env, means)
    files = python_files(root)
    copies = await asyncio.to_thread(remove_copies, root, env, files)
    if copies:
        say(f"removed {len(copies)} installed copies of the repository's files: {copies[0]} …")
    await _compile(root, env, means)
    test_files = tuple(f for f in files if is_test_file(f))
    draft = Repository(
        key=key, name=fetched.name, source=fetched.source, root=root, env=env,
        source_files=tuple(f for f in files if _is_source_file(f)), test_files=test_files,
        tests=(), suite_seconds=0.0,
    )  # fmt: skip
    say("running the tests three times")
    tests, seconds = await stable_tests(draft, means.sandbox, means.settings, say)
    repository = draft.model_copy(update={"tests": tests, "suite_seconds": seconds})
    partial = folder / f"{RECORD}.partial"
    partial.write_text(repository.model_dump_json(indent=1))
    partial.replace(folder / RECORD)
    say(f"{len(tests)} tests pass every time ({seconds:.1f} s a run)")
    return repository


def python_files(root: Path) -> list[str]:
    """The Python files of a tree. One whose name is no UTF-8 stays in the tree, but no task can
    name it: prompts and records are text."""
    return [f.as_posix() for f in clean_files(root) if f.suffix == ".py" and _is_text(f.as_posix())]


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _compile(root: Path, env: Path, means: _Means) -> None:
    """Compile what was installed: the environment is read-only later, and every grading guest
    would compile pytest again. Best effort: some packages ship files that do not compile."""
    await means.sandbox.build(
        Image(root),
        [str(env / "bin" / "python"), "-s", "-m", "compileall", "-q", "-j", "0",
         str(_site_packages(env))],
        writable={env: str(env)},
        network=False,
        timeout=means.settings.install_timeout,
    )  # fmt: skip


def is_test_file(path: str) -> bool:
    """Whether a path names tests or their helpers."""
    parts = path.split("/")
    return bool(_TEST_NAME.match(parts[-1])) or not _TEST_FOLDERS.isdisjoint(parts[:-1])


def _is_source_file(path: str) -> bool:
    parts = path.split("/")
    return not (
        is_test_file(path)
        or parts[-1] in _NO_SOURCE_NAMES
        or (len(parts) > 1 and parts[0] in _NO_SOURCE_FOLDERS)
    )


async def _install(fetched: FetchedSource, root: Path, env: Path, means: _Means) -> None:
    """Make the virtual environment `env` with the project editable from `/workspace`.

    What the build leaves in `root` beside extension modules is removed again. Requirements of
    the tests are best effort (the tests themselves tell whether enough was there); the project
    and pytest are not.
    """
    await asyncio.to_thread(_make_venv, env)
    build = _Build(fetched, root, env, means)
    packaged = any((root / name).is_file() for name in ("pyproject.toml", "setup.py", "setup.cfg"))
    project = ["-e", WORKSPACE_ROOT] if packaged else []
    error = await build.pip([*project, "pytest", "coverage", *means.settings.extra_requirements])
    if error is not None:
        raise EtudeError(
            f"{fetched.source}: the repository could not be installed in a fresh environment "
            f"({error})."
        )
    if not packaged:
        (_site_packages(env) / "workspace.pth").write_text(
            f"{WORKSPACE_ROOT}/src\n{WORKSPACE_ROOT}\n"
        )
    needed = await asyncio.to_thread(_test_requirements, root, env, fetched.name)
    if needed and await build.pip(needed) is not None:
        for one in needed:
            error = await build.pip([one])
            if error is not None:
                means.say(f"could not install {one} for the tests ({error})")
    await asyncio.to_thread(_purge, root, env)


class _Build:
    """pip, run inside the sandbox with network, for one environment."""

    def __init__(self, fetched: FetchedSource, root: Path, env: Path, means: _Means) -> None:
        self._source, self._root, self._env = fetched.source, root, env
        self._sandbox, self._settings = means.sandbox, means.settings
        # Without history, version plug-ins (setuptools-scm and its like) must be told.
        version = fetched.version or "0.0.0"
        self._variables = {
            "SETUPTOOLS_SCM_PRETEND_VERSION": version,
            "PBR_VERSION": version,
            "PDM_BUILD_SCM_VERSION": version,
            "UV_DYNAMIC_VERSIONING_BYPASS": version,
            "POETRY_DYNAMIC_VERSIONING_BYPASS": version,
            "SETUPTOOLS_ENABLE_FEATURES": "",
        }

    async def pip(self, requirements: Iterable[str]) -> str | None:
        """Install. None when it worked, else the line that says why not."""
        python = str(self._env / "bin" / "python")
        argv = [*pip_command(), "--python", python, "install", "--no-cache-dir",
                "--no-compile", "--use-pep517", "--quiet", *requirements]  # fmt: skip
        image = pip_image(self._root)
        result = await self._sandbox.build(
            Image(image.root, image.readonly, {**image.env, **self._variables}),
            argv,
            writable={self._env: str(self._env), self._root: WORKSPACE_ROOT},
            network=True,
            timeout=self._settings.install_timeout,
            log=None,
        )
        if result.timed_out:
            raise EtudeError(
                f"{self._source}: the installation did not end within "
                f"{self._settings.install_timeout:.0f} s."
            )
        return None if result.exit_code == 0 else pip_error(result.stderr)


def _make_venv(env: Path) -> None:
    """A virtual environment without pip (this program's own pip fills it)."""
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(env)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise EtudeError(
            f"{env}: a virtual environment could not be made "
            f"({pip_error(done.stderr or done.stdout)})."
        )


def _site_packages(env: Path) -> Path:
    found = sorted((env / "lib").glob("python*/site-packages"))
    return found[0]


def _test_requirements(root: Path, env: Path, name: str) -> list[str]:
    """Declared requirements of the tests, plus the project's own extras named after tests."""
    found = declared_requirements(root)
    own = {_normal(name)}
    for link in _site_packages(env).glob("*.dist-info/direct_url.json"):
        if json.loads(link.read_bytes()).get("url", "").startswith(f"file://{WORKSPACE_ROOT}"):
            metadata = (link.parent / "METADATA").read_text("utf-8", errors="replace")
            own.add(_normal(link.parent.name.rsplit("-", 2)[0]))
            extras = extra_names(metadata)
            found += _extra_requirements(metadata, extras)
    parsed = [(r, re.match(r"^([A-Za-z0-9][A-Za-z0-9._-]*)", r)) for r in found]
    return list(dict.fromkeys(r for r, m in parsed if m and _normal(m[1]) not in own))


def _extra_requirements(metadata: str, extras: list[str]) -> list[str]:
    """Requirements behind `extra == "…"` markers of METADATA, the marker's other parts kept."""
    found: list[str] = []
    for line in metadata.split("\n\n", 1)[0].splitlines():
        match = re.match(r"^Requires-Dist: (.+?)\s*;\s*(.+)$", line)
        if match:
            wanted = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", match[2])
            if wanted and _normal(wanted[1]) in {_normal(e) for e in extras}:
                rest = re.sub(r"""(\s+and\s+)?\(?extra\s*==\s*['"][^'"]+['"]\)?""", "", match[2])
                rest = rest.strip()
                found.append(f"{match[1]} ; {rest}" if rest and "extra" not in rest else match[1])
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _purge(root: Path, env: Path) -> None:
    """Remove what the build left: caches, build folders, egg-info. Extension modules stay."""
    kept = {root / file for file in clean_files(root)}
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(folder, name)
            if path not in kept:
                path.unlink()
        if Path(folder) != root and not any(Path(folder).iterdir()):
            Path(folder).rmdir()
    for cache in list(env.rglob("__pycache__")):
        shutil.rmtree(cache)


def remove_copies(root: Path, env: Path, files: Iterable[str]) -> list[str]:
    """Delete files of the environment that repeat a source file of the repository.

    Such a copy (vendored by another package, or left by an installer) would show the answers.
    Compared without white space; files under 200 characters say nothing. Returns their paths
    relative to the environment.
    """
    own = {_fingerprint(root / f) for f in files if not is_test_file(f)} - {None}
    removed: list[str] = []
    for path in sorted(_site_packages(env).rglob("*.py")):
        if path.is_file() and not path.is_symlink() and _fingerprint(path) in own:
            path.unlink()
            removed.append(path.relative_to(env).as_posix())
    return removed


def _fingerprint(path: Path) -> str | None:
    data = b"".join(path.read_bytes().split())
    return hashlib.sha256(data).hexdigest() if len(data) >= 200 else None


async def stable_tests(
    repository: Repository,
    sandbox: BubblewrapSandbox,
    settings: PrepareSettings,
    say: Progress,
) -> tuple[tuple[str, ...], float]:
    """Ids that pass as is, in random order and under another hash seed, and seconds of one run.

    Raises EtudeError when there are no tests, when they do not end, or when none passes.
    """
    timeout = settings.suite_timeout
    async with SuiteRunner(repository, sandbox, workers=settings.workers) as runner:
        first = await runner.run({}, None, timeout=timeout)
        _check_ended(repository, first, timeout)
        tests = _passed(repository, first)
        _tell_uncollected(first, say)
        others = await asyncio.gather(
            runner.run({}, tests, timeout=timeout, order_seed=settings.order_seed),
            runner.run({}, tests, timeout=timeout, hash_seed=settings.hash_seed),
        )
    for other in others:
        _check_ended(repository, other, timeout)
    stable = [t for t in tests if all(o.outcomes.get(t) == "passed" for o in others)]
    if not stable:
        raise EtudeError(
            f"{repository.source}: its {len(tests)} tests pass once but not in another order or "
            "under another hash seed; such tests cannot grade anything."
        )
    if len(stable) < len(tests):
        say(f"left out {len(tests) - len(stable)} tests that do not pass every time")
    return tuple(stable), first.seconds


def _check_ended(repository: Repository, result: SuiteResult, timeout: float) -> None:
    if result.timed_out:
        raise EtudeError(f"{repository.source}: its tests did not end within {timeout:.0f} s.")


def _tell_uncollected(result: SuiteResult, say: Progress) -> None:
    """Name the test files that pytest could not read, with the reason of the first."""
    failed = sorted(result.collection_errors)
    if failed:
        reason = _reason(result.collection_errors[failed[0]])
        names = [shown(Path(name)) for name in failed]
        say(f"pytest could not collect {_listed(names, 'test file')} ({reason})")


def _reason(output: str) -> str:
    """What pytest says was wrong, in one line, with the place of a bad syntax; empty if nothing."""
    lines = [line.removeprefix("INTERNALERROR>").rstrip() for line in output.splitlines()]
    # A traceback's own lines, marked by pytest, tell more than the source lines between them.
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    marked = marked or [line.strip() for line in lines if line.strip()]
    if not marked:
        return ""
    errors = [line for line in marked if _EXCEPTION.match(line)]
    reason = errors[-1] if errors else pip_error(output)
    places = re.findall(r'File "([^"]+)", line (\d+)', "\n".join(marked))
    if places and reason.startswith(("SyntaxError", "IndentationError", "TabError")):
        file, number = places[-1]
        reason = f"{file.removeprefix(f'{WORKSPACE_ROOT}/')}, line {number}: {reason}"
    return reason[:_MAX_REASON]


def _passed(repository: Repository, result: SuiteResult) -> list[str]:
    source, known = repository.source, set(repository.source_files)
    # A doctest stands in the very file that tasks edit, so it cannot grade that file.
    outcomes = {t: o for t, o in result.outcomes.items() if t.split("::", 1)[0] not in known}
    passed = sorted(t for t, outcome in outcomes.items() if outcome == "passed" and _is_text(t))
    if passed:
        return passed
    missing = re.findall(r"No module named '([^']+)'", result.tail)
    if missing:
        raise EtudeError(
            f"{source}: its tests need the module {missing[0]}, which its requirements for tests "
            "do not name; list it in a recipe under [prepare] extra_requirements."
        )
    reason = _reason(result.tail)
    if result.collection_errors:
        failed = sorted(result.collection_errors)
        named = _listed([shown(Path(file)) for file in failed], "test file")
        reason = f"pytest could not collect {named}; {_reason(result.collection_errors[failed[0]])}"
    elif not outcomes and not _EXCEPTION.search(reason):
        raise EtudeError(
            f"{source}: has no tests that pytest finds; Etude needs tests to grade by"
            + (f" ({reason})." if reason else ".")
        )
    raise EtudeError(
        f"{source}: none of its tests passes before anything was changed, so they cannot grade "
        f"anything ({reason})."
    )
