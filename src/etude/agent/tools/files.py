"""Files of the workspace as the tools read and write them."""

from __future__ import annotations

import difflib
import posixpath

from etude.agent.tools import text as texts
from etude.agent.tools.tool import ErrorClass, ToolContext, ToolResult
from etude.sandbox.protocol import WORKSPACE_ROOT, Workspace, WorkspaceError


def guest_path(path: str) -> str:
    """`path` as an absolute one inside the guest, `.` and `..` resolved as text."""
    # normpath keeps two leading slashes, which Linux does not tell from one.
    return "/" + posixpath.normpath(posixpath.join(WORKSPACE_ROOT, path)).lstrip("/")


async def load(context: ToolContext, path: str) -> bytes | None:
    """The file's bytes, or None when nothing stands there. Raises IsADirectoryError and
    PermissionError as the guest sees them."""
    workspace = await context.workspace()
    try:
        return await workspace.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


async def absent(context: ToolContext, path: str) -> ToolResult:
    """That nothing stands at `path`, with names that are like it."""
    similar = await _similar_names(await context.workspace(), path)
    return ToolResult(f"{path} does not exist.{similar}", ErrorClass.NOT_FOUND)


async def _similar_names(workspace: Workspace, path: str) -> str:
    """A sentence with names in the same folder that are like the last part of `path`, or ''."""
    folder, name = posixpath.split(path.rstrip("/"))
    try:
        names = await workspace.list(folder or ".")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return f" There is no folder {folder} either." if folder else ""
    like = difflib.get_close_matches(name, [entry.rstrip("/") for entry in names], n=3)
    return (
        f" Similar: {', '.join(posixpath.join(folder, entry) for entry in like)}." if like else ""
    )


def what_changed(context: ToolContext, path: str, now: bytes) -> str:
    """A line and a diff when the file is no longer what the session last saw of it, else ''."""
    known = context.seen.get(guest_path(path))
    if known is None or known == now:
        return ""
    diff = texts.changes(texts.shown(texts.decode(known)), texts.shown(texts.decode(now)))
    body = diff or "(only line endings or bytes that are not shown)"
    return f"{path} has changed since you last read it:\n{body}\n"


_PUT = """
target=$(readlink -m -- "$1"; printf .); target=${target%??}
case $target in "$2"/?*) ;; *) exit 121 ;; esac
if [ -d "$target" ]; then echo "is a folder" >&2; exit 120; fi
mkdir -p -- "${target%/*}" && exec cat > "$target"
"""


async def store(
    context: ToolContext, path: str, before: bytes | None, after: bytes, said: str
) -> ToolResult:
    """Replace a file whole, making its folders; the result is `said` with what the change broke,
    or a refusal. `seen` then holds `after`.

    The guest follows the links, and in the same command refuses a place outside the workspace:
    a second command would cost a rollout more than all other work of an edit.
    """
    absolute = guest_path(path)
    workspace = await context.workspace()
    done = await workspace.exec(
        ["sh", "-c", _PUT, "put", absolute, WORKSPACE_ROOT], stdin=after, timeout=context.timeout
    )
    if done.timed_out:
        raise WorkspaceError(f"writing {path} did not end within {context.timeout:g} s")
    if done.exit_code == 121:
        return ToolResult(
            f"{path} is outside {WORKSPACE_ROOT}; only files in there can be changed.",
            ErrorClass.DENIED,
        )
    if done.exit_code != 0:
        kind = ErrorClass.WRONG_KIND if done.exit_code == 120 else ErrorClass.DENIED
        return ToolResult(f"{path} cannot be written: {done.stderr.strip()}", kind)
    context.seen[absolute] = after
    if context.diagnose is not None:
        found = await context.diagnose(workspace, path, before, after)
        said += f"\n{found}" if found else ""
    return ToolResult(said, changed=True)
