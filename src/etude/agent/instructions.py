"""What a person wrote down for agents: AGENTS.md files and skills.

Both become part of the head, which is the same in every context window. Files are read on the
host, so a link that leads out of the project is not followed: what it names could be anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
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
    path: Path


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
        if folder == project and not _inside(path, project):
            left_out.append(f"{path} leads out of the project")
            continue
        data = path.read_bytes()
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


def find_skills(folders: Sequence[Path]) -> list[Skill]:
    """Every `NAME/SKILL.md` below the folders that has a name and a description in its front
    matter; of two with the same name the first counts."""
    found: dict[str, Skill] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"*/{SKILL_FILE}")):
            if not _inside(path, folder):
                continue
            front = _FRONT.match(path.read_bytes()[:4096].decode("utf-8", "replace"))
            fields = dict(_FIELD.findall(front[1])) if front else {}
            if fields.get("name") and fields.get("description"):
                name = clean(fields["name"].strip("\"'"))
                found.setdefault(name, Skill(name, clean(fields["description"]), path))
    return list(found.values())


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
