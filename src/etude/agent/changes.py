"""What a session left behind in its workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.sandbox.protocol import Workspace

_NAMED = 5


@dataclass(frozen=True)
class Baseline:
    """How the workspace differed from its image before the first call: a task's own files."""

    files: Mapping[str, bytes | None]

    @classmethod
    async def of(cls, workspace: Workspace) -> Baseline:
        """The present state. Raises WorkspaceError."""
        return cls((await workspace.diff()).files)

    async def changes(self, workspace: Workspace) -> tuple[dict[str, str | None], str]:
        """(path → new text or None if deleted, a sentence on what had to be left out or '').

        A file that was brought back to what the image has no longer differs from it, yet it is a
        change (often the right answer), so such files are read. Raises WorkspaceError.
        """
        now = await workspace.diff()
        after = dict(now.files)
        for path in self.files.keys() - after.keys() - set(now.special):
            try:
                after[path] = await workspace.read(path)
            except (FileNotFoundError, NotADirectoryError):
                after[path] = None
        changes: dict[str, str | None] = {}
        dropped = list(now.special)
        for path, data in sorted(after.items()):
            if path in self.files and self.files[path] == data:
                continue
            try:
                changes[path] = None if data is None else data.decode()
            except UnicodeDecodeError:
                dropped.append(path)
        return changes, _sentence(dropped)


def _sentence(dropped: list[str]) -> str:
    if not dropped:
        return ""
    more = f" and {len(dropped) - _NAMED} more" if len(dropped) > _NAMED else ""
    return f"left out, no UTF-8 text files: {', '.join(dropped[:_NAMED])}{more}"
