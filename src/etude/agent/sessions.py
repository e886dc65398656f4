"""Where sessions are kept: listed, resumed, forked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from etude.agent.log import Entry, SessionLog, decode_entry, read_about, read_log
from etude.errors import EtudeError
from etude.records import EventKind

_SUFFIX = ".jsonl"
_LOOKED_AT = 50
"""Lines in which the first message is looked for."""


@dataclass(frozen=True)
class SessionInfo:
    """A kept session; `about` holds what its driver wrote at the start (project, model, parent),
    `first` the person's first message, `used` when it was last written (seconds of the epoch)."""

    id: str
    about: Mapping[str, Any]
    first: str
    used: float


class SessionStore:
    """A folder of session logs, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, session_id: str) -> Path:
        """The log of a session."""
        return self.folder / f"{session_id}{_SUFFIX}"

    def new(self, about: Mapping[str, Any]) -> tuple[str, SessionLog]:
        """Start a log. Raises EtudeError when the folder cannot be written."""
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        session_id = f"{stamp}-{secrets.token_hex(2)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return session_id, SessionLog(self.path(session_id), {**about, "id": session_id})
        except OSError as error:
            raise EtudeError(
                f"sessions cannot be kept in {self.folder} ({error.strerror}); set ETUDE_STATE to"
                " a folder that can be written"
            ) from error

    def open(self, session_id: str) -> SessionLog:
        """Open a kept log to go on with it. Raises EtudeError when there is none, it is damaged,
        or another process holds it."""
        if not self.path(session_id).is_file():
            raise EtudeError(f"there is no session {session_id!r} in {self.folder}")
        return SessionLog(self.path(session_id))

    def find(self, name: str, project: Path | None = None) -> str:
        """The id that begins with `name`; `last` is the newest (of a project). Raises EtudeError
        when there is none or several."""
        if name == "last":
            newest = self.list(project)
            if not newest:
                where = f" of {project}" if project is not None else ""
                raise EtudeError(f"there is no session{where} to go on with")
            return newest[0].id
        found = [path.stem for path in self.folder.glob(f"*{_SUFFIX}") if path.stem == name]
        found = found or [
            path.stem for path in self.folder.glob(f"*{_SUFFIX}") if path.stem.startswith(name)
        ]
        if len(found) != 1:
            many = f"{len(found)} sessions begin with" if found else "there is no session"
            raise EtudeError(f"{many} {name!r}; `etude sessions` lists them")
        return found[0]

    def list(self, project: Path | None = None) -> list[SessionInfo]:
        """All sessions (of a project), newest first. Left out is what is no readable log, and
        sessions in which nobody said anything."""
        if not self.folder.is_dir():
            return []
        infos: list[SessionInfo] = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                about = read_about(path)
                if project is not None and about.get("project") != str(project):
                    continue
                first = _first(path)
                if first is not None:
                    infos.append(SessionInfo(path.stem, about, first, path.stat().st_mtime))
            except (OSError, EtudeError):
                continue
        return sorted(infos, key=lambda info: (info.used, info.id), reverse=True)

    def fork(self, session_id: str, turn: int | None = None) -> tuple[str, SessionLog]:
        """A new session with everything up to the end of the model's turn number `turn` (from 0;
        None: all of it). Raises EtudeError when there is no such turn."""
        if not self.path(session_id).is_file():
            raise EtudeError(f"there is no session {session_id!r} in {self.folder}")
        kept = read_log(self.path(session_id))
        entries = kept.entries if turn is None else upto(kept.entries, turn)
        parent = {"parent": session_id, "parent_turn": turn}
        new_id, log = self.new({**kept.about, **parent})
        for entry in entries:
            log.append(entry)
        log.close()
        return new_id, SessionLog(self.path(new_id))


def upto(entries: Sequence[Entry], turn: int) -> tuple[Entry, ...]:
    """The entries up to the end of a turn: its results, but no later word of anybody's. Raises
    EtudeError when there is no such turn."""
    starts = (EventKind.ASSISTANT, EventKind.SUMMARY)
    begins = [
        index
        for index, entry in enumerate(entries)
        if entry.events[0].kind in starts and entry.events[0].turn == turn
    ]
    if not begins:
        raise EtudeError(f"the session has no turn {turn}; turns are counted from 0")
    end = begins[0] + 1
    said = (*starts, EventKind.USER, EventKind.NOTE)
    while end < len(entries) and entries[end].events[0].kind not in said:
        end += 1
    return tuple(entries[:end])


def _first(path: Path) -> str | None:
    """The person's first message, '' when it is not found, None when there is none."""
    with path.open("rb") as file:
        file.readline()
        for line in islice(file, _LOOKED_AT):
            try:
                event = decode_entry(line.decode("utf-8", "replace")).events[0]
            except ValueError:
                return ""  # Damaged: what was said cannot be told.
            if event.kind is EventKind.USER:
                return str(event.data["text"])
        return "" if file.readline() else None
