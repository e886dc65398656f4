"""What a person wrote down for agents: AGENTS.md files and skills.

Both become part of the head, which is the same in every context window. Files are read on the
host, so a link that leads out of the project is not followed: what it names could be anything.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from etude.agent.tools.text import clean

FILE = "AGENTS.md"
SKILL_FILE = "SKILL.md"
MAX_BYTES = 32 << 10
"""Of all instructions together; a head is paid for in every turn."""
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_FIELD = re.compile(r"^(name|description)\s*:\s*(.*?)\s*$", re.MULTILINE)
_NOT_SEARCHED = frozenset({".git", "node_modules", ".venv", "venv", "__pycache__"})
_MAX_FOLDERS = 2000


@dataclass(frozen=True)
class Instructions:
    """Text for the head, and a sentence for the person on what was left out, or ''."""

    text: str
    left_out: str


@dataclass(frozen=True)
class Skill:
    """A way to do something, told to the model by name and description only; it reads the rest
    when it needs it."""

    name: str
    description: str
    text: str


def read_instructions(project: Path, user: Path) -> Instructions:
    """The person's own AGENTS.md (in `user`), then the project's, then where more specific ones
    lie. A file that is too long is cut, and said."""
    parts: list[str] = []
    left_out: list[str] = []
    room = MAX_BYTES
    for folder, title in ((user, "the user's own"), (project, "the project's")):
        path = folder / FILE
        if not path.is_file():
            continue
        if folder == project and path.is_symlink():
            left_out.append(f"{path} is a link, which is not followed")
            continue
        data = _head(path, room + 1, follow=folder == user)
        if data is None:
            continue
        if len(data) > room:
            left_out.append(f"{path} was cut at {room >> 10} KiB")
        text = data[:room].decode("utf-8", "replace").strip()
        room -= min(room, len(data))
        if text:
            parts.append(f"# Instructions ({title} {FILE})\n{clean(text)}")
    deeper = [path for path in _deeper(project) if _inside(path, project)]
    if deeper:
        names = ", ".join(str(path.relative_to(project)) for path in deeper[:20])
        parts.append(f"Before working below their folders, read: {names}")
    return Instructions("\n\n".join(parts), "; ".join(left_out))


def find_skills(project: Path, user: Path) -> list[Skill]:
    """Every `NAME/SKILL.md` below the project's and the person's skills folder that has a name and
    a description in its front matter; of two with the same name the first counts. Texts are taken
    now: what becomes of the files later does not matter. In the project no link is followed."""
    found: dict[str, Skill] = {}
    for folder, own in ((project / ".etude" / "skills", False), (user / "skills", True)):
        for path in sorted(folder.glob(f"*/{SKILL_FILE}")):
            if not own and path.resolve() != project.resolve() / path.relative_to(project):
                continue
            data = _head(path, MAX_BYTES, follow=own)
            text = "" if data is None else clean(data.decode("utf-8", "replace"))
            front = _FRONT.match(text)
            fields = dict(_FIELD.findall(front[1])) if front else {}
            if fields.get("name") and fields.get("description"):
                name = fields["name"].strip("\"'")
                found.setdefault(name, Skill(name, fields["description"], text))
    return list(found.values())


def _head(path: Path, most: int, *, follow: bool) -> bytes | None:
    """The first bytes of a regular file, None for anything else: a pipe would never end."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def skills_text(skills: Iterable[Skill]) -> str:
    """What the head says of skills."""
    lines = [f"- {skill.name}: {skill.description}" for skill in skills]
    if not lines:
        return ""
    return "# Skills\nBefore doing one of these, read it with the skill tool.\n" + "\n".join(lines)


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _deeper(project: Path) -> list[Path]:
    """AGENTS.md files below the project's top, nearest first; big trees are searched in part."""
    found: list[Path] = []
    for searched, (folder, folders, files) in enumerate(os.walk(project)):
        folders[:] = sorted(set(folders) - _NOT_SEARCHED)
        if searched >= _MAX_FOLDERS:
            break
        if FILE in files and Path(folder) != project:
            found.append(Path(folder) / FILE)
    return sorted(found, key=lambda path: (len(path.parts), path))
