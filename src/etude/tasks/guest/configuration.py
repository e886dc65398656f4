"""The repository's own test configuration, read while it is pristine; stands alone."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any, cast

ROOT = "/workspace"
KEPT_FLAGS = (
    "--doctest-modules",
    "--doctest-glob",
    "--import-mode",
    "--doctest-ignore-import-errors",
)
"""What of a repository's own `addopts` decides which tests there are; the rest is presentation."""
UNWANTED_PLUGINS = frozenset(
    [
        *("pytest_cov", "xdist", "pytest_randomly", "pytest_random_order", "flaky", "testmon"),
        *("pytest_rerunfailures", "pytest_forked", "pytest_sugar", "pytest_html", "pytest_picked"),
        *("pytest_jsonreport", "pytest_benchmark"),
    ]
)
"""Plugins that change which tests run, how often, in what order or process."""
CONFIG_FILES = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")


def read_config() -> tuple[str, list[str]]:
    """The file with the repository's pytest settings (or /dev/null) and the flags kept of it."""
    for name in CONFIG_FILES:
        path = Path(ROOT, name)
        if not path.is_file():
            continue
        options = toml_options(path) if name.endswith(".toml") else ini_options(path, name)
        if options is None:
            continue
        addopts = options.get("addopts", "")
        words = addopts if isinstance(addopts, list) else str(addopts).split()
        return str(path), kept_flags([str(word) for word in cast("list[Any]", words)])
    return "/dev/null", []


def toml_options(path: Path) -> dict[str, Any] | None:
    """`[tool.pytest]` or `[tool.pytest.ini_options]` of a TOML file."""
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        return None
    with path.open("rb") as file:
        table = toml.load(file).get("tool", {}).get("pytest")
    if table is None:
        return None
    return table.get("ini_options", table)


def ini_options(path: Path, name: str) -> dict[str, Any] | None:
    """The pytest section of an ini file; `pytest.ini` counts even without one."""
    parser = configparser.RawConfigParser()
    parser.read(path, encoding="utf-8")
    section = "tool:pytest" if name == "setup.cfg" else "pytest"
    if parser.has_section(section):
        return dict(parser.items(section))
    return {} if name.endswith("pytest.ini") else None


def kept_flags(words: list[str]) -> list[str]:
    """The flags of `addopts` that decide which tests exist."""
    kept: list[str] = []
    for at, word in enumerate(words):
        if word.split("=")[0] not in KEPT_FLAGS:
            continue
        kept.append(word)
        if word in ("--doctest-glob", "--import-mode") and at + 1 < len(words):
            kept.append(words[at + 1])
    return kept


def plugin_names() -> list[str]:
    """Entry points of pytest plugins that the environment, not the repository, provides."""
    found: list[str] = []
    for distribution in importlib.metadata.distributions():
        place = os.path.realpath(str(distribution.locate_file("")))
        if place == ROOT or place.startswith(ROOT + "/"):
            continue
        for entry in distribution.entry_points:
            module = entry.value.split(":")[0].split(".")[0]
            inside = Path(ROOT, module).exists()
            if entry.group == "pytest11" and module not in UNWANTED_PLUGINS and not inside:
                importlib.import_module(entry.value.split(":")[0])
                found.append(entry.name)
    return sorted(set(found))
