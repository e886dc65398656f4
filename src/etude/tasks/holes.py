"""Feature deletion by syntax tree: what can be taken out of a function, and how.

A `Hole` is a span of a file. Deleting it puts a marker there that raises when it is evaluated;
the answer is one `edit` call that puts the original text back, byte for byte.
"""

from __future__ import annotations

import ast
import bisect
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from etude.tasks.settings import MakerSettings
from etude.tasks.task import Edit, Rung

MARKERS = ("MISSING", "MISSING_CODE", "MISSING_PART", "TODO_MISSING", "XX_MISSING_XX")
"""Names put where something was removed; the first that the file does not contain is used.
Evaluating it raises NameError."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NO_STATEMENTS = (
    *_SCOPES, ast.Pass, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Break,
    ast.Continue,
)  # fmt: skip
_TRIVIAL = (ast.Name, ast.Constant, ast.Starred, ast.JoinedStr, ast.FormattedValue, ast.Slice)


@dataclass(frozen=True)
class Function:
    """A function or method that is not nested in another function.

    `first_line` counts decorators in; lines are 1-based and inclusive. `node` is its tree.
    """

    path: str
    qualname: str
    first_line: int
    def_line: int
    last_line: int
    node: FunctionNode = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """`path::qualname`, the unit of splitting."""
        return f"{self.path}::{self.qualname}"

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line, decorators included."""
        return self.first_line, self.last_line


@dataclass(frozen=True)
class Hole:
    """A removable span `[start, end)` in characters of the file's text.

    `lines` are the first and last line of the statement it belongs to (for coverage), `kind`
    says what it is (`assignment`, `condition`, `return`, `argument`, `statement`, `body`, …),
    `def_line` the line of the innermost enclosing `def`. `function_lines` are the first and last
    line of the outermost function.
    """

    path: str
    function: str
    rung: Rung
    kind: str
    start: int
    end: int
    lines: tuple[int, int]
    def_line: int
    function_lines: tuple[int, int]


@dataclass(frozen=True)
class Deletion:
    """A file with a hole in it, and the edit that fills it."""

    text: str
    answer: Edit
    marker: str
    position: int
    """Index of the marker in `text`."""


class SourceFile:
    """The text of one Python file, its tree, and positions of the tree as indices of the text.

    Raises SyntaxError or ValueError when the text is no Python that this interpreter reads.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.tree = ast.parse(text)
        # ast counts lines as the tokenizer does: at \n, \r and \r\n only, never at \f or \x85.
        self._starts = [0, *(m.end() for m in re.finditer(r"\r\n|\r|\n", text))]

    def index(self, line: int, column: int) -> int:
        """Index in the text of a 1-based line and a column in UTF-8 bytes."""
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        row = self.text[start:end]
        if row.isascii():
            return start + column
        return start + len(row.encode()[:column].decode())

    def line(self, index: int) -> int:
        """1-based line of an index in the text."""
        return bisect.bisect_right(self._starts, index)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """`[start, end)` of a node in characters."""
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError("the node carries no position")
        return (
            self.index(node.lineno, node.col_offset),
            self.index(node.end_lineno, node.end_col_offset),
        )

    def row(self, line: int) -> str:
        """A 1-based line with its line ending."""
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        return self.text[self._starts[line - 1] : end]

    @property
    def rows(self) -> int:
        """Number of lines, a last empty one not counted."""
        return len(self._starts) - (self._starts[-1] == len(self.text))

    @cached_property
    def functions(self) -> list[Function]:
        """Outermost functions and methods, in order; those nested in a function go with it."""
        return list(outermost_functions(self.path, self.tree.body))


def outermost_functions(
    path: str, body: Sequence[ast.stmt], prefix: str = ""
) -> Iterator[Function]:
    """Functions and methods in a block of statements that no other function encloses."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield Function(
                path=path, qualname=prefix + node.name, first_line=first,
                def_line=node.lineno, last_line=node.end_lineno or node.lineno, node=node,
            )  # fmt: skip
        elif isinstance(node, ast.ClassDef):
            yield from outermost_functions(path, node.body, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            for name in ("body", "orelse", "finalbody"):
                yield from outermost_functions(path, getattr(node, name, []), prefix)
            for handler in getattr(node, "handlers", []):
                yield from outermost_functions(path, handler.body, prefix)


def find_holes(source: SourceFile, function: Function, settings: MakerSettings) -> list[Hole]:
    """Every hole of a function, of all rungs, in order of the text, each span once per rung."""
    finder = _Finder(source, function, settings)
    finder.scope(function.node)
    unique = {(h.rung, h.start, h.end): h for h in reversed(finder.holes)}
    return sorted(unique.values(), key=lambda h: (h.start, h.end, h.rung))


class _Finder:
    """Walks the statements of one function."""

    def __init__(self, source: SourceFile, function: Function, settings: MakerSettings) -> None:
        self.source, self.function, self.settings = source, function, settings
        self.holes: list[Hole] = []
        self.def_line = function.def_line

    def scope(self, node: FunctionNode) -> None:
        """Holes of a function's body, and the body as a whole."""
        outer, self.def_line = self.def_line, node.lineno
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if body:
            self._body(body)
            self.block(body)
        self.def_line = outer

    def _body(self, body: Sequence[ast.stmt]) -> None:
        start, end = self.source.span(body[0])[0], self.source.span(body[-1])[1]
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        # Decorators of a nested function stand before its own position.
        if isinstance(body[0], _SCOPES) and body[0].decorator_list:
            start = self.source.span(body[0].decorator_list[0])[0] - 1
            if self.source.text[start] != "@":
                return
            first = body[0].decorator_list[0].lineno
        if last - first + 1 <= self.settings.max_body_lines and not all(
            isinstance(s, _NO_STATEMENTS) for s in body
        ):
            self._add(Rung.BODY, "body", start, end, (first, last))

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Holes of a list of statements, nested blocks and functions included."""
        for node in body:
            self._statement(node)
            for kind, expression in _slots(node):
                self._expression(kind, expression, node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.scope(node)
            elif isinstance(node, ast.Match):
                for case in node.cases:
                    self.block(case.body)
            elif not isinstance(node, ast.ClassDef):
                for name in ("body", "orelse", "finalbody"):
                    self.block(getattr(node, name, []))
                for handler in getattr(node, "handlers", []):
                    self.block(handler.body)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, _NO_STATEMENTS):
            return
        last = node.end_lineno or node.lineno
        start, end = self.source.span(node)
        lone_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (
            not lone_constant
            and end - start >= 6
            and last - node.lineno + 1 <= self.settings.max_statement_lines
        ):
            self._add(Rung.STATEMENT, "statement", start, end, (node.lineno, last))

    def _expression(self, kind: str, node: ast.expr, owner: ast.stmt) -> None:
        for part, inner in _parts(kind, node):
            start, end = self.source.span(inner)
            size = end - start
            if (
                inner.lineno == inner.end_lineno
                and not isinstance(inner, _TRIVIAL)
                and self.settings.min_chars <= size <= self.settings.max_chars
            ):
                # Lines of the owner's header up to the hole: what runs when the hole runs.
                self._add(Rung.EXPRESSION, part, start, end, (owner.lineno, inner.lineno))

    def _add(self, rung: Rung, kind: str, start: int, end: int, lines: tuple[int, int]) -> None:
        self.holes.append(
            Hole(
                path=self.function.path, function=self.function.qualname, rung=rung, kind=kind,
                start=start, end=end, lines=lines, def_line=self.def_line,
                function_lines=self.function.lines,
            )
        )  # fmt: skip


def _slots(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The expressions that a statement evaluates itself, with what they are to it."""
    match node:
        case ast.Assign() | ast.AugAssign():
            yield "assignment", node.value
        case ast.AnnAssign() if node.value is not None:
            yield "assignment", node.value
        case ast.If() | ast.While() | ast.Assert():
            yield "condition", node.test
        case ast.Return() if node.value is not None:
            yield "return", node.value
        case ast.For() | ast.AsyncFor():
            yield "iterable", node.iter
        case ast.Raise() if node.exc is not None:
            yield "raise", node.exc
        case ast.With() | ast.AsyncWith():
            for item in node.items:
                yield "context", item.context_expr
        case ast.Expr():
            yield "call", node.value
        case _:
            return


_INSIDE: dict[type[ast.expr], tuple[tuple[str, str], ...]] = {
    ast.Call: (("argument", "args"), ("argument", "keywords")),
    ast.BoolOp: (("operand", "values"),),
    ast.Compare: (("operand", "left"), ("operand", "comparators")),
    ast.BinOp: (("operand", "left"), ("operand", "right")),
    ast.UnaryOp: (("operand", "operand"),),
    ast.IfExp: (("operand", "body"), ("condition", "test"), ("operand", "orelse")),
    ast.Lambda: (("return", "body"),),
    ast.Tuple: (("element", "elts"),),
    ast.List: (("element", "elts"),),
    ast.Subscript: (("operand", "value"), ("operand", "slice")),
}
"""What an expression holds: kind of hole, field of the syntax tree."""
_KEYWORDS = (ast.Yield, ast.YieldFrom, ast.Await)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def _parts(kind: str, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """An expression and those inside it that make holes of their own."""
    if isinstance(node, _KEYWORDS):
        # The keyword stays: without it the function would change its nature.
        if node.value is not None:
            yield from _parts("yield", node.value)
        return
    # A negative number says nothing; an expression statement is the statement rung; the span of
    # a generator that is a call's only argument takes the call's parentheses with it.
    small = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    bare = kind == "argument" and isinstance(node, ast.GeneratorExp)
    if kind != "call" and not small and not bare:
        yield kind, node
    if isinstance(node, _COMPREHENSIONS):
        inside = _comprehension(node)
    else:
        inside = [
            (part, child.value if isinstance(child, ast.keyword) else child)
            for part, name in _INSIDE.get(type(node), ())
            for child in _as_list(getattr(node, name))
        ]
    for part, inner in inside:
        yield from _parts(part, inner)


def _as_list(value: ast.expr | list[ast.expr | ast.keyword]) -> list[ast.expr | ast.keyword]:
    return value if isinstance(value, list) else [value]


def _comprehension(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
) -> list[tuple[str, ast.expr]]:
    elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    found = [("element", element) for element in elements]
    for generator in node.generators:
        found.append(("iterable", generator.iter))
        found += [("condition", test) for test in generator.ifs]
    return found


def delete(source: SourceFile, hole: Hole) -> Deletion | None:
    """Take the hole out of the file.

    None when that is not exactly the hole: the remaining file must compile, differ in the one
    place only (compared as syntax trees) and hold the marker once.
    """
    text = source.text
    marker = next((m for m in MARKERS if m not in text), None)
    if marker is None:
        return None
    removed = text[hole.start : hole.end]
    old = marker if hole.rung is not Rung.BODY else f'raise NotImplementedError("{marker}")'
    deleted = text[: hole.start] + old + text[hole.end :]
    try:
        tree = ast.parse(deleted)
        compile(tree, hole.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    if not _differs_only_there(source, hole, old, tree):
        return None
    return Deletion(deleted, Edit(path=hole.path, old=old, new=removed), marker, hole.start)


def apply_edit(text: str, edit: Edit) -> str:
    """The text after an edit. Raises ValueError when `old` does not stand exactly once."""
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.path}: `old` stands {text.count(edit.old)} times, not once")
    return text.replace(edit.old, edit.new)


class _Without(ast.NodeTransformer):
    """Replaces the node, or the run of statements, at a span by what stands there now."""

    def __init__(self, source: SourceFile, hole: Hole, new: ast.stmt) -> None:
        self.source, self.hole, self.new = source, hole, new
        self.done = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Replace on the way down; blocks of statements are replaced as runs."""
        if self.hole.rung is Rung.EXPRESSION:
            if isinstance(node, ast.expr) and self._at(node, node) and _loads(node):
                self.done += 1
                return self.new.value if isinstance(self.new, ast.Expr) else node
            return super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block: object = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, self._block(block))
        return super().generic_visit(node)

    def _block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        for first in range(len(block)):
            for last in range(len(block) - 1, first - 1, -1):
                if self._at(block[first], block[last]):
                    self.done += 1
                    return [*block[:first], self.new, *block[last + 1 :]]
        return block

    def _at(self, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> bool:
        start = self.source.span(first)[0]
        if isinstance(first, _SCOPES) and first.decorator_list:
            start = self.source.span(first.decorator_list[0])[0] - 1
        return start == self.hole.start and self.source.span(last)[1] == self.hole.end


def _loads(node: ast.expr) -> bool:
    context = getattr(node, "ctx", None)
    return context is None or isinstance(context, ast.Load)


def _differs_only_there(source: SourceFile, hole: Hole, old: str, tree: ast.Module) -> bool:
    """Whether the function, as it stands in `tree`, is the pristine one with the marker put at
    the hole's place. Text outside the function is the same, so only the function is compared."""
    lines = hole.function_lines
    pristine = next((f for f in source.functions if f.lines == lines), None)
    found = [f for f in outermost_functions(hole.path, tree.body) if f.first_line == lines[0]]
    if pristine is None or len(found) != 1:
        return False
    transformer = _Without(source, hole, ast.parse(old).body[0])
    expected = transformer.visit(copy.deepcopy(pristine.node))
    return transformer.done == 1 and ast.dump(expected) == ast.dump(found[0].node)


_WHAT = {
    Rung.EXPRESSION: "an expression is missing, marked {marker}. Put it back.",
    Rung.STATEMENT: "a statement is missing, marked {marker}. Put it back.",
    Rung.BODY: 'the body of {function} is missing, marked {old}. Write it.',
}  # fmt: skip


def prompt(hole: Hole, deletion: Deletion, settings: MakerSettings) -> str:
    """What a colleague would say, with a window of the file round the hole.

    The window holds whole lines, always the hole's own and the `def` line of its function, and
    at most `max_window_chars` characters. It never leaves the function: the next one may be held
    out.
    """
    what = _WHAT[hole.rung].format(
        marker=deletion.marker, function=hole.function, old=deletion.answer.old
    )
    return f"{hole.path}: {what}\n\n{window(hole, deletion, settings)}"


def window(hole: Hole, deletion: Deletion, settings: MakerSettings) -> str:
    """Whole lines of the deleted file round the marker, the enclosing `def` line included."""
    text = deletion.text
    rows = re.split(r"\r\n|\r|\n", text)
    at = len(re.findall(r"\r\n|\r|\n", text[: deletion.position]))
    top = hole.function_lines[0] - 1
    bottom = hole.function_lines[1] - 1 - len(re.findall(r"\r\n|\r|\n", deletion.answer.new))
    first = last = at
    used = len(rows[at]) + 1
    above_def = at > hole.def_line - 1
    if above_def:
        used += len(rows[hole.def_line - 1]) + 1
    grow = [True, True]
    while any(grow):
        # Two lines above for one below: what comes before says more about what is missing.
        for side in (0, 0, 1):
            here = first - 1 if side == 0 else last + 1
            limit = settings.lines_before if side == 0 else settings.lines_after
            inside = top <= here <= bottom and abs(here - at) <= limit
            counted = above_def and here == hole.def_line - 1
            cost = 0 if not inside or counted else len(rows[here]) + 1
            if not grow[side] or not inside or used + cost > settings.max_window_chars:
                grow[side] = False
                continue
            used += cost
            first, last = min(first, here), max(last, here)
    shown = rows[first : last + 1]
    if above_def and first > hole.def_line - 1:
        gap = ["    ..."] if first > hole.def_line else []
        shown = [rows[hole.def_line - 1], *gap, *shown]
    return "\n".join(row.rstrip() for row in shown).strip("\n")
