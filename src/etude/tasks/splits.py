"""Splitting by function: what is held out is held out whole, wherever it is repeated."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from etude.tasks.holes import Function, FunctionNode, SourceFile
from etude.tasks.repository import Repository
from etude.tasks.settings import MakerSettings
from etude.tasks.task import Split


def read_sources(root: Path, paths: Iterable[str]) -> dict[str, SourceFile]:
    """The files that are UTF-8 and parse as Python of this interpreter; the others are left out
    (no task can be made from them). Texts keep their line endings."""
    found: dict[str, SourceFile] = {}
    for path in paths:
        try:
            found[path] = SourceFile(path, (root / path).read_bytes().decode("utf-8"))
        except (SyntaxError, ValueError):
            continue
    return found


def split_functions(functions: Sequence[Function], settings: MakerSettings) -> dict[str, Split]:
    """`Function.name` → split, by a hash of the seed and the name.

    Independent of which other functions exist, except that functions with the same code (names,
    docstrings, decorators and annotations aside) or the same name in one file share a split:
    otherwise a held-out answer could be read in training text.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for function in functions:
        groups[_code(function.node)].append(function.name)
    parent = {function.name: function.name for function in functions}

    def find(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for names in groups.values():
        for name in names[1:]:
            first, second = sorted((find(names[0]), find(name)))
            parent[second] = first
    return {name: _draw(find(name), settings) for name in parent}


def _draw(name: str, settings: MakerSettings) -> Split:
    digest = hashlib.sha256(f"{settings.seed}:{name}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < settings.heldout_fraction:
        return Split.HELDOUT
    if share < settings.heldout_fraction + settings.warmup_fraction:
        return Split.WARMUP
    return Split.PRACTICE


class _Plain(ast.NodeTransformer):
    """Drops what does not matter to the code: docstrings, decorators, annotations, names of
    functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: FunctionNode) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.name, node.decorator_list, node.returns = "_", [], None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def _code(node: FunctionNode) -> str:
    return ast.dump(_Plain().visit(copy.deepcopy(node)))


def heldout_spans(
    repository: Repository, settings: MakerSettings
) -> Mapping[str, list[tuple[int, int]]]:
    """Path → first and last line (1-based, inclusive, decorators included) of every held-out
    function of the source files: what pretraining text must not contain. Every function counts,
    not only those that gave a task."""
    functions = all_functions(read_sources(repository.root, repository.source_files))
    splits = split_functions(functions, settings)
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for function in functions:
        if splits[function.name] is Split.HELDOUT:
            spans[function.path].append(function.lines)
    return {path: sorted(lines) for path, lines in spans.items()}


def all_functions(sources: Mapping[str, SourceFile]) -> list[Function]:
    """Outermost functions of all files, in order of path and line."""
    return [f for _, source in sorted(sources.items()) for f in source.functions]
