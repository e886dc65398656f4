"""Semantic search: the pieces, the index, and the real model on real files in the real sandbox."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools import session_tools
from etude.agent.tools.chunks import Chunk, chunks, list_files, read_files
from etude.agent.tools.embedding import WIDTH, Embedder, embedding_model
from etude.agent.tools.semantic_index import Files, VectorStore, search
from etude.agent.tools.semantic_search import SemanticSearch
from etude.agent.tools.tool import ErrorClass, ToolContext, ToolResult, invoke, prepare
from etude.models.renderer import ToolCall
from etude.records import Float32
from etude.sandbox.protocol import Image, Rights, Sandbox, Workspace

MakeImage = Callable[[Mapping[str, bytes]], Image]
needs_model = pytest.mark.skipif(embedding_model() is None, reason="needs the extra `search`")

LINE = st.sampled_from(
    [
        "",
        "def f():",
        "class A:",
        "    def g(self):",
        "        x = 1",
        "# Title",
        "y" * 500,
        "}",
        " ",
    ]
)


@given(st.lists(LINE, max_size=120))
def test_chunks_hold_every_line_once(lines: list[str]) -> None:
    text = "\n".join(lines)
    found = chunks("f.py", text)
    seen: list[int] = []
    for chunk in found:
        assert chunk.text.split("\n") == lines[chunk.start - 1 : chunk.end]
        assert chunk.end - chunk.start < 30
        seen += range(chunk.start, chunk.end + 1)
    assert seen == sorted(set(seen))
    assert {n for n, line in enumerate(lines, 1) if line.strip()} <= set(seen)


def test_a_method_knows_its_class() -> None:
    body = "".join(f"        line{n} = {n}\n" for n in range(10))
    meow, eat = f"    def meow(self):\n{body}\n", f"    def eat(self):\n{body}"
    text = f"import os\n\n\nclass Cat(Animal):\n{meow}{eat}"
    scopes = {chunk.text.strip().split("\n")[0]: chunk.scope for chunk in chunks("cat.py", text)}
    assert scopes["def eat(self):"] == "class Cat(Animal):"


class Words:
    """An embedding by counting words; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]) -> Float32:
        self.asked += texts
        rows = np.zeros((len(texts), WIDTH), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in re.findall(r"\w+", text):
                row[sum(word.encode()) % WIDTH] += 1
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def pieces(*texts: str) -> list[Chunk]:
    return [Chunk("f", n, n, "", text) for n, text in enumerate(texts)]


def run(query: str, candidates: Sequence[Chunk], embed: Words, store: VectorStore) -> list[str]:
    found = search(query, candidates, embed, store, count=2, seconds=60, stop=threading.Event())
    assert found.compared == found.chunks == len(candidates)
    return [hit.chunk.text for hit in found.hits]


def test_only_what_is_new_is_embedded(tmp_path: Path) -> None:
    embed, store = Words(), VectorStore(tmp_path)
    assert run("cats", pieces("dogs bark", "cats meow"), embed, store)[0] == "cats meow"
    embed.asked.clear()
    # Another process, another place of the same text: the vectors are known.
    again = pieces("cats meow", "birds sing", "dogs bark")
    assert run("birds", again, embed, VectorStore(tmp_path))[0] == "birds sing"
    assert [text for text in embed.asked if text.startswith("f\n")] == ["f\nbirds sing"]


def test_nothing_of_the_text_is_kept_on_disk(tmp_path: Path) -> None:
    run("query", pieces("a secret sentence"), Words(), VectorStore(tmp_path))
    for path in tmp_path.iterdir():
        assert b"secret" not in path.read_bytes()


def test_without_time_the_likely_ones_are_embedded_first(tmp_path: Path) -> None:
    embed, store = Words(), VectorStore(tmp_path)
    candidates = pieces(*(f"nothing {n}" for n in range(200)), "parse the header")
    found = search("header", candidates, embed, store, count=1, seconds=0.0, stop=threading.Event())
    assert found.compared == 0
    deadline = threading.Event()

    def slow(texts: Sequence[str]) -> Float32:
        if len(texts) > 1:
            deadline.set()
        return embed(texts)

    found = search("header", candidates, slow, store, count=1, seconds=60, stop=deadline)
    assert 0 < found.compared < found.chunks
    assert found.hits[0].chunk.text == "parse the header"


def test_files_follow_the_workspace() -> None:
    files = Files()
    stamps = {"a": "1 1", "b": "1 1"}
    assert files.changed(stamps) == ["a", "b"]
    files.update(stamps, ["a", "b"], {"a": "x", "b": "y"})
    assert files.changed(stamps) == []
    assert files.changed({"b": "1 2", "c": "1 1"}) == ["b", "c"]
    files.update({"b": "1 2", "c": "1 1"}, ["b", "c"], {"b": "z"})
    assert {path: [c.text for c in found] for path, found in files.chunks.items()} == {
        "b": ["z"],
        "c": [],
    }


def test_files_are_read_in_one_go(sandbox: Sandbox, image: MakeImage) -> None:
    files = {
        "a.py": b"x = 1\r\n",
        "with space\nand line/b.py": "é\n".encode(),
        "-dash.py": b"y\n",
        "bin.dat": b"\0\1",
        "big.txt": b"z\n" * 200_000,
        "minified.js": b"q" * 5000,
        "empty.py": b"",
        ".gitignore": b"ignored.py\n",
        "ignored.py": b"x\n",
    }

    async def go() -> tuple[set[str], dict[str, str]]:
        workspace = await sandbox.create(image(files))
        try:
            await workspace.exec(["ln", "-s", "/etc/passwd", "link.py"], timeout=10)
            stamps = await list_files(workspace, 30)
            return set(stamps), await read_files(workspace, stamps, list(stamps), 30)
        finally:
            await workspace.close()

    listed, texts = asyncio.run(go())
    assert listed == set(files) - {"big.txt", "empty.py", "ignored.py"}
    assert texts == {
        "a.py": "x = 1\n",
        "with space\nand line/b.py": "é\n",
        "-dash.py": "y\n",
        ".gitignore": "ignored.py\n",
    }


def test_what_a_view_hides_is_not_read(sandbox: Sandbox, image: MakeImage) -> None:
    """Nor does it stay known when it is hidden later."""
    files = {"open.py": b"x = 1\n", "secret.py": b"password = 'hush'\n", "d/e.py": b"hush = 2\n"}

    async def go() -> Files:
        workspace = await sandbox.create(image(files))
        known = Files()
        try:
            for view in (workspace, workspace.view(Rights(hidden=("secret.py", "d")))):
                stamps = await list_files(view, 30)
                wanted = known.changed(stamps)
                known.update(stamps, wanted, await read_files(view, stamps, wanted, 30))
            return known
        finally:
            await workspace.close()

    known = asyncio.run(go())
    texts = [chunk.text for found in known.chunks.values() for chunk in found]
    assert texts == ["x = 1"]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    yield


@needs_model
def test_the_tool_follows_edits(sandbox: Sandbox, image: MakeImage, cache: None) -> None:
    files = {
        "mail.py": b"def deliver(message):\n    '''Send an e-mail through the SMTP server.'''\n",
        "shapes/area.py": b"def area(radius):\n    return 3.14159 * radius ** 2\n",
    }

    async def go() -> list[ToolResult]:
        workspace = await sandbox.create(image(files))

        async def given() -> Workspace:
            return workspace

        context = ToolContext(given, 120)

        async def ask(**arguments: str) -> ToolResult:
            prepared = prepare([SemanticSearch()], ToolCall("semantic_search", arguments, ""))
            assert not isinstance(prepared, ToolResult)
            return await invoke(prepared, context)

        try:
            results = [
                await ask(query="how large is a circle"),
                await ask(query="post a letter", path="shapes"),
                await ask(query="x", path="none"),
            ]
            await workspace.write("new.py", b"def diameter_and_size_of_a_circle(radius): ...\n")
            await workspace.exec(["rm", "mail.py"], timeout=10)
            return [*results, await ask(query="diameter of a circle")]
        finally:
            await workspace.close()

    circle, inside, nowhere, later = asyncio.run(go())
    assert circle.text.startswith("shapes/area.py:1-2\ndef area(radius):")
    assert "mail.py" not in inside.text
    assert nowhere.error_class is ErrorClass.NOT_FOUND
    assert later.text.startswith("new.py:1-1\n")
    assert "mail.py" not in later.text


def test_without_the_extra_there_is_no_tool() -> None:
    names = {tool.name for tool in session_tools()}
    assert ("semantic_search" in names) == (embedding_model() is not None)


QUESTIONS = [
    ("keep compiled templates on disk between runs", "class FileSystemBytecodeCache"),
    ("turn special characters of HTML into entities unless marked safe", "def do_forceescape"),
    ("cut a long text and add an ellipsis", "def do_truncate"),
    ("make web addresses in a text clickable", "def urlize"),
    ("stop templates from reaching dangerous attributes", "def is_safe_attribute"),
    ("forget the least recently used entry when the cache is full", "class LRUCache"),
    ("look for templates in several places one after the other", "class ChoiceLoader"),
    ("rewrite the traceback so that it shows template lines", "def rewrite_traceback_stack"),
    ("show file sizes so that people can read them", "def do_filesizeformat"),
    ("compute constant expressions at compile time", "class Optimizer"),
    ("random filler text", "def generate_lorem_ipsum"),
    ("behave silently when a variable is missing, chaining attribute access", "ChainableUndefined"),
]


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_questions_find_more_than_words_do(tmp_path: Path) -> None:
    root = Path(jinja2.__file__).parent
    candidates = [
        chunk for path in sorted(root.glob("*.py")) for chunk in chunks(path.name, path.read_text())
    ]
    embed, store = Embedder(), VectorStore(tmp_path)
    by_meaning = by_words = 0
    for question, target in QUESTIONS:
        found = search(
            question, candidates, embed, store, count=5, seconds=3600, stop=threading.Event()
        )
        by_meaning += any(target in hit.chunk.embedded for hit in found.hits)
        words = {word.lower() for word in re.findall(r"\w+", question) if len(word) > 2}
        grepped = sorted(
            candidates, key=lambda chunk: -sum(word in chunk.text.lower() for word in words)
        )
        by_words += any(target in chunk.embedded for chunk in grepped[:5])
    print(f"hit@5 of {len(QUESTIONS)}: by meaning {by_meaning}, by words {by_words}")
    assert by_meaning >= 7
    assert by_meaning >= by_words + 3
