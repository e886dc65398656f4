"""Searching the workspace by meaning."""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import dataclass, field

from etude.agent.tools.chunks import Chunk, SearchUnavailable, list_files, read_files
from etude.agent.tools.embedding import Embedder
from etude.agent.tools.grep import inside
from etude.agent.tools.semantic_index import Files, Found, Hit, VectorStore, search
from etude.agent.tools.text import clean
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)
from etude.machine import cache_folder
from etude.sandbox.process import uninterrupted

_HITS = 6
_LINES = 12
_SECONDS = 60.0
"""Most that one call spends on new chunks."""


class SemanticSearchArguments(Arguments):
    """A question or description in words; `path` is the folder to look in."""

    query: Word
    path: Word = "."


@dataclass
class _Kept:
    """What a session keeps between its searches."""

    files: Files = field(default_factory=Files)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@functools.cache
def _embedder() -> Embedder:
    return Embedder()


class SemanticSearch(Tool[SemanticSearchArguments]):
    """Gives the pieces of files whose meaning is nearest. The index follows the files: only what
    is new is embedded."""

    name = "semantic_search"
    description = "find code by what it does, in words, where no exact name is known"
    arguments = SemanticSearchArguments
    effect = Effect.READ

    async def run(self, context: ToolContext, args: SemanticSearchArguments) -> ToolResult:
        """See `Tool.run`."""
        kept = context.kept.setdefault(self.name, _Kept())
        assert isinstance(kept, _Kept)
        async with kept.turn:
            workspace = await context.workspace()
            try:
                stamps = await list_files(workspace, context.timeout)
            except SearchUnavailable as error:
                return ToolResult(f"{error}.", ErrorClass.UNAVAILABLE)
            wanted = kept.files.changed(stamps)
            texts = await read_files(workspace, stamps, wanted, context.timeout)
            kept.files.update(stamps, wanted, texts)
            folder = inside(args.path)
            candidates = [
                chunk
                for path in stamps
                if folder in (".", path) or path.startswith(f"{folder}/")
                for chunk in kept.files.chunks[path]
            ]
            if not candidates:
                return ToolResult(f"there is no text in {args.path}.", ErrorClass.NOT_FOUND)
            found = await _searched(args.query, candidates, min(_SECONDS, context.timeout / 2))
        return ToolResult(_shown(found))


async def _searched(query: str, candidates: list[Chunk], seconds: float) -> Found:
    stop = threading.Event()

    def work() -> Found:
        store = VectorStore(cache_folder() / "search")
        return search(
            query, candidates, _embedder(), store, count=_HITS, seconds=seconds, stop=stop
        )

    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # A thread cannot be killed; it looks at the flag after each batch.
        stop.set()
        await uninterrupted(_settled(task))
        raise


async def _settled(task: asyncio.Future[Found]) -> None:
    await asyncio.wait((task,))


def _shown(found: Found) -> str:
    parts = [_hit(hit) for hit in found.hits]
    if found.compared < found.chunks:
        parts.append(
            f"(only {found.compared} of {found.chunks} pieces are indexed so far; search again for"
            " more)"
        )
    return "\n\n".join(parts)


def _hit(hit: Hit) -> str:
    chunk = hit.chunk
    lines = chunk.text.split("\n")
    rest = [f"[{len(lines) - _LINES} more lines]"] if len(lines) > _LINES else []
    scope = [chunk.scope.rstrip()] if chunk.scope else []
    head = f"{chunk.path}:{chunk.start}-{chunk.end}"
    return clean("\n".join([head, *scope, *lines[:_LINES], *rest]))
