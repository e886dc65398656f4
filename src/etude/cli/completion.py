"""What Tab offers while a message is typed: `/` commands, and files of the project behind `@`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from etude.cli.visible import visible

_MOST = 50
_LOOKED_AT = 5000
"""Entries of a folder that are looked at."""


class TalkCompleter(Completer):
    """`commands` are names with their help; files are those below `project`, one folder at a
    time. Nothing of the project is run or read, only listed."""

    def __init__(self, commands: Mapping[str, str], project: Path) -> None:
        self._commands = commands
        self.project = project

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """See `Completer`."""
        before = document.text_before_cursor
        if re.fullmatch(r"/\w*", before):
            for name, about in self._commands.items():
                if name.startswith(before[1:]):
                    yield Completion(f"/{name}", -len(before), display_meta=about)
            return
        mention = re.search(r"(?:^|\s)@(\S*)$", before)
        if mention is not None:
            yield from islice(self._files(mention.group(1)), _MOST)

    def _files(self, typed: str) -> Iterator[Completion]:
        """Entries of the folder that `typed` names and that begin with its last part."""
        folder, _, start = typed.rpartition("/")
        if typed.startswith("/") or ".." in folder.split("/"):
            return
        try:
            with os.scandir(self.project / folder) as found:
                entries = sorted(islice(found, _LOOKED_AT), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            hidden = entry.name.startswith(".") and not start.startswith(".")
            # A name that could not be typed as it looks is not offered.
            if hidden or not entry.name.startswith(start) or visible(entry.name) != entry.name:
                continue
            ending = "/" if entry.is_dir(follow_symlinks=False) else ""
            yield Completion(f"{entry.name}{ending}", -len(start), display=entry.name + ending)
