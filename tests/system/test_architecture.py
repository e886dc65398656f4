"""The architecture as a test: layers, no cycles, no torch where none is needed, small files."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "etude"
LAYERS = {
    0: {"errors", "records", "store", "progress", "machine", "recipes"},
    1: {"sandbox", "models", "weights", "reward"},
    2: {"inference"},
    3: {"agent"},
    4: {"tasks"},
    5: {"training"},
    6: {"rl", "evaluation"},
    7: {"pipeline"},
    8: {"cli"},
}
LAYER_OF = {package: layer for layer, packages in LAYERS.items() for package in packages}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Packages of Etude that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "etude":
                names = [f"etude.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "etude" and len(parts) > 1:
                yield parts[1]


def test_every_module_belongs_to_a_layer() -> None:
    assert {package(path) for path in modules()} == set(LAYER_OF)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_come_from_below(path: Path) -> None:
    own = package(path)
    for other in imported(path):
        assert other == own or LAYER_OF[other] < LAYER_OF[own] or LAYER_OF[own] == 0, (
            f"{own} (layer {LAYER_OF[own]}) imports {other} (layer {LAYER_OF[other]})"
        )


def test_layer_zero_has_no_cycle() -> None:
    """Layer 0 modules may import one another; following the imports must end."""
    graph = {
        path.stem: {name for name in imported(path) if name in LAYERS[0]}
        for path in modules()
        if package(path) in LAYERS[0] and path.parent == SOURCE
    }
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert leaves, f"cycle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


def test_files_and_functions_are_small() -> None:
    for path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= 500, f"{path} has over 500 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 80, f"{path}: {node.name} has {length} lines"


def test_reading_a_recipe_or_any_settings_imports_no_torch() -> None:
    settings = [
        "etude." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("settings.py")
    ]
    program = (
        "import sys, importlib\n"
        f"for name in {[*settings, 'etude.cli.app', 'etude.pipeline.recipe']!r}:\n"
        "    importlib.import_module(name)\n"
        "from etude.pipeline.recipe import Recipe, presets\n"
        "[Recipe.preset(name) for name in presets()]\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_importing_the_command_line_is_quick() -> None:
    """Under 0.3 s beyond an empty interpreter, the best of five: other load only adds."""

    def best(program: str) -> float:
        times: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
            times.append(time.perf_counter() - began)
        return min(times)

    assert best("import etude.cli.app") - best("pass") < 0.3
