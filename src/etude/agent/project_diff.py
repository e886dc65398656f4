"""Two states of a project as unified text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from itertools import islice

from etude.agent.project_tree import Entry, Kind, Tree, differing

_LONGEST_BYTES = 1 << 20
_LONGEST_LINES = 20_000


def tree_diff(old: Tree, new: Tree, content: Callable[[str], bytes]) -> str:
    """The differences of files and links, as `git apply` takes them; `content` gives the bytes of
    a digest. Of files that are no text, or very long, it only says that they differ."""
    lines: list[str] = []
    for path, before, after in differing(old, new):
        a = None if before is None or before.kind is Kind.FOLDER else before
        b = None if after is None or after.kind is Kind.FOLDER else after
        if a is not None and b is not None and a.kind is not b.kind:
            # A file that became a link: git says it as two changes.
            lines += _change(path, a, None, content)
            lines += _change(path, None, b, content)
        elif a is not None or b is not None:
            lines += _change(path, a, b, content)
    return "".join(lines)


def _git_mode(entry: Entry) -> str:
    if entry.kind is Kind.LINK:
        return "120000"
    return "100755" if entry.mode & 0o100 else "100644"


def _change(
    path: str, old: Entry | None, new: Entry | None, content: Callable[[str], bytes]
) -> Iterator[str]:
    """The lines of one path."""
    before, after = _bytes(old, content), _bytes(new, content)
    a, b = quoted(f"a/{path}"), quoted(f"b/{path}")
    head = [f"diff --git {a} {b}\n"]
    if old is None and new is not None:
        head.append(f"new file mode {_git_mode(new)}\n")
    elif new is None and old is not None:
        head.append(f"deleted file mode {_git_mode(old)}\n")
    elif old is not None and new is not None and _git_mode(old) != _git_mode(new):
        head += [f"old mode {_git_mode(old)}\n", f"new mode {_git_mode(new)}\n"]
    elif before == after:
        return  # Only bits that git does not know.
    yield from head
    if before == after:
        return
    a, b = ("/dev/null" if old is None else a), ("/dev/null" if new is None else b)
    texts = _lines(before), _lines(after)
    if texts[0] is None or texts[1] is None:
        yield f"Binary files {a} and {b} differ\n"
        return
    # git takes a name with a space in it only before a tab.
    tab = "\t" if " " in path else ""
    yield f"--- {a}{'' if old is None else tab}\n"
    yield f"+++ {b}{'' if new is None else tab}\n"
    for line in islice(difflib.unified_diff(texts[0], texts[1], n=3), 2, None):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _bytes(entry: Entry | None, content: Callable[[str], bytes]) -> bytes:
    if entry is None:
        return b""
    if entry.kind is Kind.LINK:
        return entry.content.encode("utf-8", "surrogateescape")
    return content(entry.content)


def _lines(data: bytes) -> list[str] | None:
    """Lines with their ends, or None for what is not to be shown."""
    if b"\0" in data or len(data) > _LONGEST_BYTES or data.count(b"\n") > _LONGEST_LINES:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def quoted(name: str) -> str:
    """A name as git writes it: with anything unusual in it, in quotes with escapes."""
    data = name.encode("utf-8", "surrogateescape")
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in data):
        return name
    known = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r", 0x22: '\\"', 0x5C: "\\\\"}
    return (
        '"'
        + "".join(
            known.get(byte) or (chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}")
            for byte in data
        )
        + '"'
    )
