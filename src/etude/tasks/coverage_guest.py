"""Runs the suite under coverage with a context per test. Read as text and run in the sandbox by
the repository's interpreter (Python >= 3.9, with coverage and pytest); imported by nothing.

argv: the text of `guest.configuration` (which knows how the repository's pytest is configured) and
the file to write; the ids of the tests come on standard input, one a line. Writes JSON:
{"files": {path: {line: [test index or -1, ...]}}, "tests": [id, ...]}; -1 is import time.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import coverage  # pyright: ignore[reportMissingImports] - only in the guest's environment
import pytest

ROOT = "/workspace"


class Contexts:
    """Switches the context of the measurement round every test, set-up and tear-down included."""

    def __init__(self, measurement: Any) -> None:
        self.measurement = measurement
        self.known: list[str] = []

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Hook round one test."""
        self.measurement.switch_context(str(len(self.known)))
        self.known.append(item.nodeid)
        yield
        self.measurement.switch_context("")


def main() -> None:
    """Measure and write."""
    runner = types.ModuleType("guest_configuration")
    exec(sys.argv[1], runner.__dict__)
    target = sys.argv[2]
    tests = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    os.chdir(ROOT)
    sys.argv = ["pytest"]
    config, flags = runner.read_config()
    options = ["-c", config, "--rootdir", ROOT, "-o", "addopts=", "-p", "no:cacheprovider", "-q"]
    options += ["--continue-on-collection-errors", "--assert=plain", *flags]
    for name in runner.plugin_names():
        options += ["-p", name]
    measurement = coverage.Coverage(data_file=None, config_file=False, include=[ROOT + "/*"])
    plugin = Contexts(measurement)
    measurement.start()
    pytest.main([*options, *tests], plugins=[plugin])
    measurement.stop()
    data = measurement.get_data()
    files: dict[str, dict[int, list[int]]] = {}
    for path in data.measured_files():
        contexts = data.contexts_by_lineno(path)
        files[os.path.relpath(path, ROOT)] = {
            line: sorted(int(name) if name else -1 for name in names)
            for line, names in contexts.items()
        }
    with open(target, "w") as handle:  # noqa: PTH123
        json.dump({"files": files, "tests": plugin.known}, handle)


main()
