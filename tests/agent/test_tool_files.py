"""Edits through the real sandbox: whatever the file's bytes are, those outside the edit stay."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from etude.agent.tools import text as texts
from etude.agent.tools.edit import Edit
from etude.agent.tools.read import Read
from etude.agent.tools.tool import ErrorClass, ToolContext, ToolResult, invoke, prepare
from etude.agent.tools.write import Write
from etude.models.renderer import ToolCall
from etude.sandbox.protocol import Image, Sandbox, Workspace

TOOLS = [Read(), Edit(), Write()]
PIECE = st.one_of(
    st.sampled_from(
        [b"a", b"b", b"ab", b" ", b"\n", b"\r\n", b"\r", "é".encode(), b"\xef\xbb\xbf"]
    ),
    st.binary(max_size=3),
)
FILE = st.lists(PIECE, min_size=1, max_size=25).map(b"".join)
NEW = st.text(alphabet="abx\n é", max_size=8)


class Bench:
    def __init__(self, runner: asyncio.Runner, workspace: Workspace) -> None:
        self.runner, self.workspace = runner, workspace
        self.context = ToolContext(self.given, 30)

    async def given(self) -> Workspace:
        return self.workspace

    def __call__(self, name: str, **arguments: Any) -> ToolResult:
        prepared = prepare(TOOLS, ToolCall(name, arguments, ""))
        if isinstance(prepared, ToolResult):
            return prepared
        return self.runner.run(invoke(prepared, self.context))

    def put(self, data: bytes, path: str = "f") -> None:
        self.runner.run(self.workspace.write(path, data))
        self.context.seen.clear()

    def get(self, path: str = "f") -> bytes:
        return self.runner.run(self.workspace.read(path))


@pytest.fixture(scope="module")
def bench(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        workspace = runner.run(sandbox.create(Image(tmp_path_factory.mktemp("image"))))
        yield Bench(runner, workspace)
        runner.run(workspace.close())


def raw_pieces(data: bytes) -> list[str]:
    """The file's text cut so that the n-th piece is what a model sees as its n-th character."""
    text = data.decode("utf-8", "surrogateescape")
    pieces: list[str] = []
    at = 0
    while at < len(text):
        size = 2 if text.startswith("\r\n", at) else 1
        pieces.append(text[at : at + size])
        at += size
    return pieces


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(FILE, NEW, st.data(), st.booleans())
def test_bytes_outside_the_edit_stay(
    bench: Bench, data: bytes, new: str, draw: st.DataObject, replace_all: bool
) -> None:
    pieces = raw_pieces(data)
    text = "".join("\n" if piece == "\r\n" else piece for piece in pieces)
    assume(text)
    start = draw.draw(st.integers(0, len(text) - 1))
    old = text[start : draw.draw(st.integers(start + 1, min(len(text), start + 6)))]
    # What is no UTF-8 or NUL a model cannot spell; "\r\n" it means as "\n".
    assume(not any("\udc80" <= c <= "\udcff" for c in old) and "\r" not in old)
    bench.put(data)
    result = bench("edit", path="f", old=old, new=new, replace_all=replace_all)
    after = bench.get()
    if len(texts.occurrences(text, old)) > 1 and not replace_all:
        assert result.error_class is ErrorClass.SEVERAL_MATCHES
    if result.error_class is not None:
        assert result.error_class in (ErrorClass.SEVERAL_MATCHES, ErrorClass.NO_CHANGE)
        assert after == data
        return
    # The stretches that were kept, byte for byte, with the new text between them, whose line
    # endings are the file's.
    kept: list[bytes] = []
    at = 0
    for stretch in text.split(old):
        raw = "".join(pieces[at : at + len(stretch)])
        kept.append(re.escape(raw.encode("utf-8", "surrogateescape")))
        at += len(stretch) + len(old)
    between = re.escape(new.encode()).replace(b"\\\n", b"\r?\n")
    assert re.fullmatch(between.join(kept), after)


def test_replace_all(bench: Bench) -> None:
    bench.put(b"\xef\xbb\xbfx = 1\r\ny = x\r\n\xff x\nx")
    result = bench("edit", path="f", old="x", new="long\nname", replace_all=True)
    assert result.text == "edited f in 4 places."
    assert bench.get() == (
        b"\xef\xbb\xbflong\r\nname = 1\r\ny = long\r\nname\r\n\xff long\nname\nlong\nname"
    )
    assert bench("edit", path="f", old="gone", new="x", replace_all=True).error_class is (
        ErrorClass.NO_MATCH
    )
    several = bench("edit", path="f", old="name", new="x")
    assert several.error_class is ErrorClass.SEVERAL_MATCHES
    bench.put(b"aaaa")
    assert bench("edit", path="f", old="aa", new="b", replace_all=True).changed
    assert bench.get() == b"bb"


@pytest.mark.parametrize("name", ["read", "edit"])
def test_what_does_not_exist_names_what_is_like_it(bench: Bench, name: str) -> None:
    bench.put(b"x", "folder/module.py")
    arguments: Mapping[str, Any] = {"old": "a", "new": "b"} if name == "edit" else {}
    result = bench(name, path="folder/modul.py", **arguments)
    assert result.error_class is ErrorClass.NOT_FOUND
    assert result.text == "folder/modul.py does not exist. Similar: folder/module.py."


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet="ab\n é\x00\x85\u2028", max_size=30))
def test_what_is_written_is_read_back(bench: Bench, content: str) -> None:
    bench.runner.run(bench.workspace.exec(["rm", "-f", "g"], timeout=10))
    bench.context.seen.clear()
    assert bench("write", path="g", content=content).changed
    assert bench.get("g") == content.encode()
