"""What a repository says its tests need: extras, dependency groups, requirement files, tox."""

from __future__ import annotations

import configparser
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

TEST_GROUPS = ("test", "tests", "testing", "unittest", "unit-test", "pytest")
DEV_GROUPS = ("dev", "develop", "development")
"""Looked at only where no group is named after tests: these often bring linters and docs."""
_FILES = re.compile(
    r"^(?:(?:requirements?|reqs?)[-_./])?(?:test|tests|testing|dev)[-_./]?(?:requirements?|reqs?)?"
    r"\.(?:txt|in)$"
)
_FOLDERS = ("", "requirements", "requirement", "reqs", "tests", "test", "ci")


def declared_requirements(root: Path) -> list[str]:
    """Requirements of the tests that the tree itself states, best effort, in PEP 508 form."""
    found: list[str] = []
    project = root / "pyproject.toml"
    if project.is_file():
        # pip refuses a project with a broken file, with a message of its own.
        with suppress(tomllib.TOMLDecodeError, UnicodeDecodeError):
            found += _from_pyproject(tomllib.loads(project.read_text("utf-8")))
    for folder in _FOLDERS:
        base = root / folder
        if base.is_dir():
            for path in sorted(base.iterdir()):
                name = path.name if folder in ("", "ci") else f"requirements-{path.name}"
                if path.is_file() and (_FILES.match(path.name) or _FILES.match(name)):
                    found += _from_file(path, depth=0)
    found += _from_tox(root / "tox.ini")
    return list(dict.fromkeys(found))


def extra_names(metadata: str) -> list[str]:
    """Extras of an installed distribution (the text of its METADATA) that are about tests."""
    message = HeaderParser().parsestr(metadata)
    return _choose([str(value) for value in message.get_all("Provides-Extra", [])])


def _choose(names: Iterable[str]) -> list[str]:
    normal = {re.sub(r"[-_.]+", "-", name).lower(): name for name in names}
    tests = [normal[name] for name in TEST_GROUPS if name in normal]
    return tests or [normal[name] for name in DEV_GROUPS if name in normal]


def _from_pyproject(data: Mapping[str, Any]) -> list[str]:
    groups: dict[str, list[Any]] = data.get("dependency-groups", {})
    found = [r for name in _choose(groups) for r in _group(groups, name, frozenset())]
    tool = data.get("tool", {})
    pdm = tool.get("pdm", {}).get("dev-dependencies", {})
    found += [str(r) for name in _choose(pdm) for r in pdm[name] if not str(r).startswith("-e")]
    envs = tool.get("hatch", {}).get("envs", {})
    for name in _choose([*envs, *(("dev",) if "default" in envs else ())]):
        if name in envs:
            found += [str(r) for r in envs[name].get("dependencies", [])]
    poetry = tool.get("poetry", {})
    tables = {k: v.get("dependencies", {}) for k, v in poetry.get("group", {}).items()}
    tables.setdefault("dev", poetry.get("dev-dependencies", {}))
    found += [r for name in _choose(tables) for r in tables[name] if r != "python"]
    return [r for r in found if "{" not in r]


def _group(groups: Mapping[str, list[Any]], name: str, seen: frozenset[str]) -> list[str]:
    """Requirements of one dependency group, includes resolved (PEP 735)."""
    found: list[str] = []
    for item in groups.get(name, []):
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict) and "include-group" in item:
            included = str(item["include-group"])
            if included not in seen:
                found += _group(groups, included, seen | {name})
    return found


def _from_file(path: Path, depth: int) -> list[str]:
    """Lines of a requirements file; `-r` is followed, other options and local paths are not."""
    found: list[str] = []
    for raw in path.read_text("utf-8", errors="replace").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw).split(" --hash", 1)[0].strip(" \\\t")
        include = re.match(r"^(?:-r|--requirement)[ =]*(.+)$", line)
        if include and depth < 3:
            other = path.parent / include[1]
            if other.is_file() and other.resolve().is_relative_to(path.parent.parent.resolve()):
                found += _from_file(other, depth + 1)
        elif re.match(r"^[A-Za-z0-9]", line) and not line.startswith("--"):
            found.append(line)
    return found


def _from_tox(path: Path) -> list[str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(path, "utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return []
    found: list[str] = []
    for line in parser.get("testenv", "deps", fallback="").splitlines():
        text = line.split("#", 1)[0].strip()
        if text.startswith("-r"):
            other = path.parent / text[2:].strip().replace("{toxinidir}/", "")
            if other.is_file() and other.resolve().is_relative_to(path.parent.resolve()):
                found += _from_file(other, depth=0)
        elif re.match(r"^[A-Za-z0-9]", text) and "{" not in text:
            bare = re.match(r"^[A-Za-z0-9_,!-]+:\s+(.+)$", text)  # "py39: mock" names a factor
            found.append(bare[1] if bare else text)
    return found
