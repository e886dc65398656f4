"""Deletion is exact: the answer gives the pristine text back, byte for byte, in any Python file."""

import ast
import heapq
import inspect
import statistics
import textwrap
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tasks.holes import SourceFile, apply_edit, delete, find_holes, prompt
from etude.tasks.settings import MakerSettings
from etude.tasks.task import Rung

SETTINGS = MakerSettings()
MODULES = [textwrap, heapq, statistics]


def holes_of(source: SourceFile):
    return [hole for f in source.functions for hole in find_holes(source, f, SETTINGS)]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_deletion_of_real_files_is_exact(module: types.ModuleType) -> None:
    path = inspect.getsourcefile(module)
    assert path is not None
    with open(path, newline="", encoding="utf-8") as file:  # noqa: PTH123
        text = file.read()
    source = SourceFile("pkg/module.py", text)
    holes = holes_of(source)
    assert {hole.rung for hole in holes} == set(Rung)
    refused = 0
    for hole in holes[:: max(1, len(holes) // 80)]:
        deletion = delete(source, hole)
        if deletion is None:
            # Only `elif` is no statement that could be taken out alone.
            assert text[hole.start :].startswith("elif")
            refused += 1
            continue
        assert deletion.text.count(deletion.answer.old) == 1
        assert apply_edit(deletion.text, deletion.answer) == text
        assert deletion.answer.new == text[hole.start : hole.end]
        check_prompt(source, hole, deletion)
    assert refused < len(holes) / 20


def check_prompt(source: SourceFile, hole, deletion) -> None:
    told = prompt(hole, deletion, SETTINGS)
    head, shown = told.split("\n\n", 1)
    assert hole.path in head and deletion.marker in head
    rows = shown.split("\n")
    assert sum(deletion.marker in row for row in rows) == 1
    assert source.row(hole.def_line).rstrip() in rows
    first, last = hole.function_lines
    inside = {row.rstrip() for row in deletion.text.splitlines()}
    own = {source.row(n).rstrip() for n in range(first, last + 1)}
    for row in rows:
        assert row in inside or row == "    ..."
        assert row in own or deletion.marker in row or row == "    ...", "left the function"
    longest = len(source.row(hole.def_line)) + max(len(r) for r in rows) + len("    ...") + 2
    assert len(shown) <= max(SETTINGS.max_window_chars + len("    ...\n"), longest)


def test_expression_holes_agree_with_the_standard_library() -> None:
    """`ast.get_source_segment` is the slow reference for positions."""
    text = inspect.getsource(textwrap)
    source = SourceFile("textwrap.py", text)
    segments = {
        ast.get_source_segment(text, node)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.expr)
    }
    found = [text[h.start : h.end] for h in holes_of(source) if h.rung is Rung.EXPRESSION]
    assert len(found) > 80
    assert set(found) <= segments
    for segment in found:
        assert 3 <= len(segment) <= 80 and "\n" not in segment


WORDS = st.sampled_from(["x", "größe", "self.名", "'ß😀'", "f(a)[0]", "(1, 'é')", "{'k': [v]}"])
EXPRESSIONS = st.recursive(
    WORDS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]} + {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"call({p[0]}, key={p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"any({p[0]} for q in {p[1]} if q)"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} if not {p[1]} else -1)"),
        inner.map(lambda e: f"[{e} for i in range(3)]"),
        inner.map(lambda e: f"(lambda z: {e})"),
        inner.map(lambda e: f"{e}\\\n + 1" if not e.startswith("'") else e),
    ),
    max_leaves=3,
)
STATEMENTS = st.one_of(
    EXPRESSIONS.map(lambda e: f"value = {e}"),
    EXPRESSIONS.map(lambda e: f"a, b = {e}; total += {e}"),
    EXPRESSIONS.map(lambda e: f"if {e}: return {e}"),
    EXPRESSIONS.map(lambda e: f"for i in {e}:\n    yield {e}\nelse:\n    pass"),
    EXPRESSIONS.map(
        lambda e: f"try:\n    go({e})\nexcept (KeyError, OSError) as error:\n    raise"
    ),
    EXPRESSIONS.map(lambda e: f"@mark({e})\ndef inner(k={e}):\n    '''Doc é.'''\n    return {e}"),
    EXPRESSIONS.map(lambda e: f"if {e}:\n    pass\nelif {e}:\n    call({e})\nelse:\n    del e"),
    st.just('text = """two\n  lines ß"""  # comment \x0c after'),
    st.just("match value:\n    case [1, x] if x > 2:\n        return x\n    case _:\n        pass"),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(STATEMENTS, min_size=1, max_size=5),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["    ", "\t", "  "]),
    st.booleans(),
)
def test_deletion_is_exact_for_any_layout(
    statements: list[str], ending: str, indent: str, method: bool
) -> None:
    body = "\n".join(statements)
    text = "def f(self, v):\n" + textwrap.indent(body.replace("    ", indent), indent) + "\n"
    if method:
        text = "class C:\n" + textwrap.indent(text, indent)
    text = f"# é\nX = 1\n{text}\n\ndef g():\n    return 'held out'"
    try:
        ast.parse(text)
    except SyntaxError:
        return
    text = text.replace("\n", ending)
    source = SourceFile("m.py", text)
    for hole in holes_of(source):
        deletion = delete(source, hole)
        if deletion is not None:
            assert apply_edit(deletion.text, deletion.answer).encode() == text.encode()
            compile(deletion.text, "m.py", "exec")
            if hole.function != "g":
                assert "held out" not in prompt(hole, deletion, SETTINGS)


def test_a_generator_argument_does_not_swallow_the_parentheses() -> None:
    source = SourceFile("m.py", "def f(xs):\n    return any(x.ok() for x in xs)\n")
    texts = {source.text[h.start : h.end] for h in holes_of(source) if h.rung is Rung.EXPRESSION}
    assert texts == {"any(x.ok() for x in xs)", "x.ok()"}
    for hole in holes_of(source):
        assert delete(source, hole) is not None


def test_yield_stays_and_only_its_value_goes() -> None:
    source = SourceFile("m.py", "def f(a):\n    got = yield a + 1\n    return got.x\n")
    texts = {source.text[h.start : h.end] for h in holes_of(source) if h.rung is Rung.EXPRESSION}
    assert texts == {"a + 1", "got.x"}


def test_the_marker_is_one_that_the_file_does_not_use() -> None:
    source = SourceFile("m.py", "MISSING = object()\n\n\ndef f(a):\n    return a + 1\n")
    (hole,) = [h for h in holes_of(source) if h.rung is Rung.EXPRESSION]
    deletion = delete(source, hole)
    assert deletion is not None
    assert deletion.answer.old == "MISSING_CODE"
    assert deletion.text.endswith("return MISSING_CODE\n")


def test_reaching_a_hole_raises_and_importing_does_not() -> None:
    text = "def f(a):\n    '''Doc.'''\n    if a > 1:\n        return a * 2\n    return 0\n"
    source = SourceFile("m.py", text)
    for hole in holes_of(source):
        deletion = delete(source, hole)
        assert deletion is not None
        names: dict = {}
        exec(compile(deletion.text, "m.py", "exec"), names)
        assert names["f"].__doc__ == "Doc."
        with pytest.raises((NameError, NotImplementedError)):
            [names["f"](a) for a in (2, 0)]


def test_functions_carry_decorators_and_nested_ones_belong_to_the_outer() -> None:
    text = (
        "if True:\n    @deco\n    @deco(2)\n    def outer():\n        def inner(): return 1 + 1\n"
        "        return inner\nclass A:\n    class B:\n        async def m(self): return 2 + 2\n"
    )
    functions = SourceFile("m.py", text).functions
    assert [(f.qualname, f.lines) for f in functions] == [("outer", (2, 6)), ("A.B.m", (9, 9))]


def test_an_edit_that_matches_twice_is_refused() -> None:
    source = SourceFile("m.py", "def f(a):\n    return a + 1\n")
    deletion = delete(source, holes_of(source)[-1])
    assert deletion is not None
    with pytest.raises(ValueError, match="2 times"):
        apply_edit(deletion.text * 2, deletion.answer)
