"""What a person approved: things that bring their own code, or rules that allow, by exact content.

A repository may come with hooks, tool servers and rules that allow. None of them counts before a
person said yes to exactly that content, in exactly that project; a changed byte asks again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.agent.permissions.files import change
from etude.errors import EtudeError
from etude.machine import state_folder

_LARGEST = 64 << 20
"""Bytes of a file that a command names and that can still be approved."""


@dataclass(frozen=True)
class Brought:
    """Something that a project brought; `content` are JSON values, and all of what it is."""

    kind: str
    project: Path
    content: Any

    @property
    def fingerprint(self) -> str:
        """SHA-256 over canonical JSON."""
        value = [self.kind, str(self.project.resolve()), self.content]
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class NamedFile:
    """A file of the project that a command names. `real` is where it lies, links followed, which
    may be elsewhere; `data` are the bytes that are approved."""

    name: str
    real: str
    data: bytes


def named_paths(command: Sequence[str], project: Path) -> dict[str, str]:
    """What of the project a command may name: where each name leads, links followed. Raises
    EtudeError for a NUL."""
    root = os.path.realpath(project)
    found: dict[str, str] = {}
    for word in command:
        if "\0" in word:
            raise EtudeError("A command must not contain a NUL character.")
        for name in {word, word.rpartition("=")[2]}:  # `--config=file` names a file too.
            path = os.path.join(root, name)  # noqa: PTH118 (an argument, as text)
            real = os.path.realpath(path)
            if name and f"{root}/" in (
                os.path.normpath(path)[: len(root) + 1],
                real[: len(root) + 1],
            ):
                found[name] = real
    return found


def paths_inside(command: Sequence[str], project: Path) -> list[str]:
    """The files that a command names and that lie in the project, relative to it."""
    root = os.path.realpath(project)
    found = (Path(real) for real in named_paths(command, project).values())
    return [
        str(path.relative_to(root))
        for path in found
        if path.is_relative_to(root) and path.is_file()
    ]


def named_files(command: Sequence[str], project: Path) -> tuple[NamedFile, ...]:
    """Those that are there, each read once. Raises EtudeError for a huge one."""
    read = [
        (name, real, _bytes(Path(real))) for name, real in named_paths(command, project).items()
    ]
    return tuple(NamedFile(name, real, data) for name, real, data in read if data is not None)


def command_content(definition: Mapping[str, Any], files: Sequence[NamedFile]) -> dict[str, Any]:
    """The content of a definition that runs a command: itself, and the digest of every file of
    the project that the command names, so that a changed script asks again. What those files load
    in turn is not looked at."""
    digests = {file.name: hashlib.sha256(file.data).hexdigest() for file in files}
    return {"definition": dict(definition), "files": digests}


def _bytes(path: Path) -> bytes | None:
    """A regular file, None when there is none. Raises EtudeError for a huge one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None  # No file that this person could run.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):  # Python would not open a folder.
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = b"" if status.st_size > _LARGEST else file.read(_LARGEST + 1)
    if max(status.st_size, len(data)) > _LARGEST:
        raise EtudeError(f"{path} is too large to be approved as part of a command.")
    return data


class Approvals:
    """The approvals of one person, in a file of the state folder."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or state_folder() / "approvals.json"

    def approved(self, kind: str, project: Path, content: Any) -> bool:
        """Whether a person approved exactly this. Raises EtudeError when the file is damaged."""
        return Brought(kind, project, content).fingerprint in self._load()

    def approve(self, kind: str, project: Path, content: Any) -> None:
        """Keep a person's yes. Raises EtudeError when it cannot be written."""
        brought = Brought(kind, project, content)
        entry = {
            "kind": kind,
            "project": str(project.resolve()),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "content": content,
        }
        self._change(lambda all_: {**all_, brought.fingerprint: entry})

    def revoke(self, project: Path, kind: str | None = None) -> None:
        """Forget what was approved of a project (of one kind)."""
        where = str(project.resolve())

        def others(all_: dict[str, Any]) -> dict[str, Any]:
            return {
                key: entry
                for key, entry in all_.items()
                if entry["project"] != where or kind not in (None, entry["kind"])
            }

        self._change(others)

    def pending(self, brought: Iterable[Brought]) -> tuple[Brought, ...]:
        """Those that still need a person's yes."""
        known = self._load()
        return tuple(item for item in brought if item.fingerprint not in known)

    def _load(self) -> dict[str, Any]:
        try:
            return self._parse(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeError) as error:
            raise EtudeError(f"The approvals {self._path} cannot be read ({error}).") from error

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            return dict(json.loads(text)["approved"]) if text else {}
        except (ValueError, KeyError, TypeError) as error:
            raise EtudeError(
                f"The approvals {self._path} are damaged; delete the file to approve afresh."
            ) from error

    def _change(self, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        change(
            self._path,
            lambda text: json.dumps({"approved": edit(self._parse(text))}, indent=1) + "\n",
        )
