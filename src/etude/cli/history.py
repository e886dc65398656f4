"""Sessions that were: listing them, and writing one out in a format that others read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from etude.agent.export.atif import dumps, to_atif
from etude.agent.export.markdown import to_markdown
from etude.agent.export.recording import Recording, of_log, with_children
from etude.agent.log import LoggedSession, read_log
from etude.agent.sessions import SessionInfo, SessionStore
from etude.cli.lines import shortened
from etude.cli.visible import visible
from etude.errors import EtudeError
from etude.inference.prices import read_prices

FORMATS = ("markdown", "atif")
_FIRST_CHARS = 60


def describe(found: Sequence[SessionInfo]) -> list[str]:
    """One numbered line for each session."""
    return [
        f"{number:3}. {_when(info)}  {info.id}  {_first(info)}"
        for number, info in enumerate(found, 1)
    ]


def rows(found: Sequence[SessionInfo]) -> list[list[str]]:
    """Cells of a table: id, when, model, folder, first message."""
    return [
        [
            info.id,
            _when(info),
            visible(str(info.about.get("model", ""))),
            visible(str(info.about.get("project", ""))),
            _first(info),
        ]
        for info in found
    ]


def as_json(found: Sequence[SessionInfo]) -> list[dict[str, Any]]:
    """The same as JSON values, nothing cut."""
    return [
        {
            "id": info.id,
            "used": info.used,
            "model": info.about.get("model"),
            "project": info.about.get("project"),
            "parent": info.about.get("parent"),
            "first": info.first,
        }
        for info in found
    ]


def _when(info: SessionInfo) -> str:
    return datetime.fromtimestamp(info.used).strftime("%Y-%m-%d %H:%M")


def _first(info: SessionInfo) -> str:
    return shortened(visible(" ".join(info.first.split())), _FIRST_CHARS)


def whole(found: Sequence[SessionInfo]) -> list[SessionInfo]:
    """Without the sessions of sub-agents."""
    return [info for info in found if not _is_child(info)]


def _is_child(info: SessionInfo) -> bool:
    return "." in info.id


def logged(store: SessionStore, name: str) -> tuple[str, LoggedSession]:
    """A session by its id, the beginning of one, or `last` (of this folder). Raises EtudeError."""
    session_id = store.find(name, Path.cwd())
    return session_id, read_log(store.path(session_id))


def exported(store: SessionStore, name: str, form: str) -> str:
    """A session with those of its sub-agents in one of FORMATS. Raises EtudeError."""
    if form not in FORMATS:
        raise EtudeError(f"there is no format {form!r}; choose from {', '.join(FORMATS)}")
    session_id, log = logged(store, name)
    try:
        recording = _recording(store, session_id, log)
    except ValueError as error:
        raise EtudeError(f"the session {session_id} cannot be exported: {error}") from error
    if form == "markdown":
        return to_markdown(recording)
    model = str(log.about.get("model", ""))
    return dumps(to_atif(recording, price=read_prices().find(model).price))


def _recording(store: SessionStore, session_id: str, log: LoggedSession) -> Recording:
    recording = of_log(session_id, log)
    children = [
        _recording(store, path.stem, read_log(path))
        for path in sorted(store.folder.glob(f"{session_id}.*.jsonl"))
        if path.stem.count(".") == session_id.count(".") + 1
    ]
    return with_children(recording, children)


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises EtudeError."""
    try:
        with path.open("x", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    except FileExistsError as error:
        raise EtudeError(f"{path} exists already; name another file") from error
    except OSError as error:
        raise EtudeError(f"{path} cannot be written ({error.strerror})") from error
