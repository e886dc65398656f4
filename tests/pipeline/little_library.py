"""A small real library with tests, written to a folder: enough functions for every split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Corner:
    """A cache folder, a repository, a model and a recipe that takes seconds with them."""

    cache: Path
    source: Path
    recipe: Path


_FUNCTIONS = {
    "double": ("x", "x * 2", [("3", "6"), ("0", "0")]),
    "increment": ("x", "x + 1", [("3", "4"), ("-1", "0")]),
    "square": ("x", "x * x", [("3", "9"), ("-2", "4")]),
    "negate": ("x", "0 - x", [("3", "-3"), ("-2", "2")]),
    "first": ("items", "items[0]", [("[4, 5]", "4"), ("'ab'", "'a'")]),
    "last": ("items", "items[len(items) - 1]", [("[4, 5]", "5"), ("'ab'", "'b'")]),
    "size": ("items", "len(items) + 0", [("[4, 5]", "2"), ("''", "0")]),
    "total": ("items", "sum(items) + 0", [("[4, 5]", "9"), ("[]", "0")]),
    "largest": ("items", "max(items)", [("[4, 5]", "5"), ("[7]", "7")]),
    "smallest": ("items", "min(items)", [("[4, 5]", "4"), ("[7]", "7")]),
    "shout": ("text", "text.upper()", [("'a'", "'A'"), ("'bC'", "'BC'")]),
    "whisper": ("text", "text.lower()", [("'A'", "'a'"), ("'bC'", "'bc'")]),
    "backwards": ("text", "text[::-1]", [("'ab'", "'ba'"), ("'a'", "'a'")]),
    "twice": ("text", "text + text", [("'ab'", "'abab'"), ("''", "''")]),
    "is_even": ("x", "x % 2 == 0", [("2", "True"), ("3", "False")]),
    "is_positive": ("x", "x > 0", [("2", "True"), ("-3", "False")]),
    "halve": ("x", "x // 2", [("4", "2"), ("5", "2")]),
    "absolute": ("x", "x if x > 0 else 0 - x", [("4", "4"), ("-5", "5")]),
}


def write_repository(folder: Path) -> Path:
    """Write the library; returns the folder."""
    package = folder / "smallib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "smallib"\nversion = "1.0"\n'
        '[tool.setuptools]\npackages = ["smallib"]\n'
    )
    code, tests = [], ["import pytest\n\nfrom smallib import core\n"]
    for name, (argument, body, cases) in _FUNCTIONS.items():
        code.append(
            f'def {name}({argument}):\n    """Return the {name} of `{argument}`."""\n'
            f"    result = {body}\n    return result\n"
        )
        rows = ", ".join(f"({given}, {wanted})" for given, wanted in cases)
        tests.append(
            f'@pytest.mark.parametrize(("given", "wanted"), [{rows}])\n'
            f"def test_{name}(given, wanted):\n    assert core.{name}(given) == wanted\n"
        )
    (package / "core.py").write_text("\n\n".join(code))
    (folder / "tests").mkdir()
    (folder / "tests" / "test_core.py").write_text("\n\n".join(tests))
    return folder
