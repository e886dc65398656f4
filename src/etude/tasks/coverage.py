"""Which tests run which lines, and which lines run at import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from etude.errors import EtudeError
from etude.sandbox.protocol import Sandbox
from etude.tasks.repository import Repository

_RESULT = ".etude-coverage.json"
_IMPORT = -1
_SLOWDOWN = 20.0
"""Tracing has been seen to cost up to four times the suite; the deadline is generous."""


@dataclass(frozen=True)
class CoverageMap:
    """`lines[path][line]` holds the tests that ran a line; lines that no test ran are absent.
    `import_time[path]` holds the lines that ran outside of any test, at import."""

    lines: Mapping[str, Mapping[int, frozenset[str]]]
    import_time: Mapping[str, frozenset[int]]

    def tests_of(self, path: str, first: int, last: int) -> frozenset[str]:
        """Tests that ran any of the lines from `first` to `last`, inclusive."""
        known = self.lines.get(path, {})
        return frozenset().union(*(known.get(n, frozenset()) for n in range(first, last + 1)))

    def at_import(self, path: str, first: int, last: int) -> bool:
        """Whether any of the lines from `first` to `last` ran at import."""
        return not self.import_time.get(path, frozenset()).isdisjoint(range(first, last + 1))


async def measure(repository: Repository, sandbox: Sandbox) -> CoverageMap:
    """Run the repository's tests once under coverage in the sandbox, a context per test.

    The result is kept beside the repository's record and read from there the next time. Raises
    EtudeError when the measurement fails.
    """
    kept = repository.root.parent / "coverage.json"
    if kept.is_file():
        return _parse(kept.read_bytes(), repository)
    package = resources.files("etude.tasks")
    script = package.joinpath("coverage_guest.py").read_text("utf-8")
    runner = package.joinpath("guest", "configuration.py").read_text("utf-8")
    workspace = await sandbox.create(repository.image())
    try:
        result = await workspace.exec(
            [repository.python, "-s", "-B", "-c", script, runner, _RESULT],
            cwd="/",
            timeout=60.0 + _SLOWDOWN * repository.suite_seconds,
            # The default core of newer interpreters knows no contexts per line.
            env={"COVERAGE_CORE": "ctrace", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                 "PYTHONHASHSEED": "0"},
            stdin="".join(f"{test}\n" for test in repository.tests).encode(),
        )  # fmt: skip
        try:
            data = await workspace.read(_RESULT)
        except FileNotFoundError:
            reason = "it did not end in time" if result.timed_out else result.stderr.strip()[-300:]
            raise EtudeError(
                f"{repository.source}: its tests could not be run under coverage ({reason})."
            ) from None
    finally:
        await workspace.close()
    found = _parse(data, repository)
    _keep(kept, data)
    return found


def _keep(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def _parse(data: bytes, repository: Repository) -> CoverageMap:
    raw = json.loads(data)
    stable, ids = set(repository.tests), list(raw["tests"])
    known = set(repository.source_files)
    lines: dict[str, dict[int, frozenset[str]]] = {}
    imported: dict[str, frozenset[int]] = {}
    for path, rows in raw["files"].items():
        if path in known:
            imported[path] = frozenset(int(n) for n, tests in rows.items() if _IMPORT in tests)
            lines[path] = {
                int(n): frozenset(ids[t] for t in tests if t != _IMPORT and ids[t] in stable)
                for n, tests in rows.items()
            }
    return CoverageMap(lines, imported)
