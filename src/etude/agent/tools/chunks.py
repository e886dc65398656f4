"""A workspace's files, read in one go, and cut into pieces for semantic search."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from etude.agent.summary import HISTORY_FOLDER
from etude.agent.tools.grep import WALK
from etude.agent.tools.programs import RIPGREP
from etude.sandbox.protocol import Workspace, WorkspaceError

_FILE_BYTES = 300_000
"""Larger files are data."""
_READ_BYTES = 16 << 20
"""What is read at once."""
_LINES = 30
_CHARS = 1200
_ENOUGH_LINES = 6
_LINE_CHARS = 300
_START = re.compile(
    r"\s{0,4}(?:def|class|async def|fn|func|function|impl|pub|export|public|private|protected"
    r"|static|struct|enum|interface|type|trait|module|namespace|template|@\w|#{1,6} )\b"
)
_CLASS = re.compile(r"(?:class|impl|struct|interface|trait)\b.*")

_LISTED = """
mkdir -p "$2" && "$1" --files --null --sort=path $3 | xargs -0 -r stat --printf '%s %.Y %n\\0' -- \
  > "$2/files.txt"
"""
_READ = 'tar -C /workspace -cf "$1/files.tar" --null --verbatim-files-from -T -'


class SearchUnavailable(Exception):
    """The workspace's files cannot be listed; the text says why."""


@dataclass(frozen=True)
class Chunk:
    """Lines `start` to `end` (from 1) of a file; `scope` is the line that opens the class they
    stand in, or ''."""

    path: str
    start: int
    end: int
    scope: str
    text: str

    @property
    def embedded(self) -> str:
        """What stands for it in the index."""
        lines = [line[:_LINE_CHARS] for line in self.text.split("\n")]
        return "\n".join(filter(None, (self.path, self.scope, *lines)))[: 2 * _CHARS]


async def list_files(workspace: Workspace, timeout: float) -> dict[str, str]:
    """Path → a stamp of size and time of change, of every file that is not ignored and not too
    large. Raises SearchUnavailable and WorkspaceError."""
    argv = ["sh", "-c", _LISTED, "sh", RIPGREP, HISTORY_FOLDER, " ".join(WALK)]
    done = await workspace.exec(argv, timeout=timeout)
    if done.timed_out:
        raise SearchUnavailable(f"listing the files took more than {timeout:g} s")
    if "rg: not found" in done.stderr:
        raise SearchUnavailable("this sandbox shows no ripgrep, which lists the files")
    try:
        data = await workspace.read(f"{HISTORY_FOLDER}/files.txt")
    except OSError as error:
        raise SearchUnavailable(f"the files could not be listed: {error}") from error
    found: dict[str, str] = {}
    for entry in data.decode("utf-8", "surrogateescape").split("\0")[:-1]:
        size, stamp, path = entry.split(" ", 2)
        if 0 < int(size) <= _FILE_BYTES:
            found[path.removeprefix("./")] = f"{size} {stamp}"
    return found


async def read_files(
    workspace: Workspace, stamps: Mapping[str, str], wanted: Collection[str], timeout: float
) -> dict[str, str]:
    """Text of the wanted files; binary and unreadable ones are left out. Raises WorkspaceError."""
    found: dict[str, str] = {}
    for batch in _batches(stamps, wanted):
        names = "\0".join(batch).encode("utf-8", "surrogateescape")
        argv = ["sh", "-c", _READ, "sh", HISTORY_FOLDER]
        done = await workspace.exec(argv, timeout=timeout, stdin=names)
        if done.timed_out:
            raise WorkspaceError(f"reading {len(batch)} files took more than {timeout:g} s")
        data = await workspace.read(f"{HISTORY_FOLDER}/files.tar")
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isreg() else None
                    text = _text(content.read()) if content is not None else None
                    if text is not None:
                        found[member.name] = text
        except tarfile.TarError as error:
            # What lies in the guest's /tmp its programs can write as well.
            raise WorkspaceError(f"the files could not be read: {error}") from error
    return found


def _batches(stamps: Mapping[str, str], wanted: Collection[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for path in sorted(wanted):
        size += int(stamps[path].split(" ")[0])
        if size > _READ_BYTES and batch:
            yield batch
            batch, size = [], 0
        batch.append(path)
    if batch:
        yield batch


def _text(data: bytes) -> str | None:
    """The text of a file that a person could have written, else None."""
    if b"\0" in data:
        return None
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    lines = text.count("\n") + 1
    return text if len(text) / lines <= _LINE_CHARS else None


def chunks(path: str, text: str) -> list[Chunk]:
    """Pieces of some lines each, cut where something begins when there is such a place. Together
    they hold every line that is not blank."""
    lines = text.removesuffix("\n").split("\n")
    found: list[Chunk] = []
    scope, begin, size = "", 0, 0

    def close(end: int) -> None:
        piece = "\n".join(lines[begin:end])
        if piece.strip():
            inner = scope if piece[:1].isspace() else ""
            found.append(Chunk(path, begin + 1, end, inner, piece))

    for index, line in enumerate(lines):
        taken = index - begin
        starts = _START.match(line) or (index and not lines[index - 1] and not line[:1].isspace())
        full = taken >= _LINES or size + len(line) > _CHARS
        if taken and (full or (taken >= _ENOUGH_LINES and starts)):
            close(index)
            begin, size = index, 0
        if line and not line[0].isspace() and line[0] not in "#)]}":
            scope = line[:_LINE_CHARS] if _CLASS.match(line) else scope if taken == 0 else ""
        size += min(len(line), _LINE_CHARS)
    close(len(lines))
    return found
