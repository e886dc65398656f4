"""AGENTS.md files and skills: what is read, what is not, and in what order."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from etude.agent.instructions import MAX_BYTES, find_skills, read_instructions, skills_text
from etude.agent.tools.skill import ReadSkill
from etude.agent.tools.tool import Prepared, ToolContext, invoke, prepare
from etude.models.renderer import ToolCall
from etude.sandbox.protocol import Workspace


def test_own_then_the_projects_then_the_deeper_ones_by_name(tmp_path: Path) -> None:
    user, project = tmp_path / "user", tmp_path / "project"
    for folder in (user, project / "b" / "c", project / "a", project / ".git"):
        folder.mkdir(parents=True)
    (user / "AGENTS.md").write_text("Speak plainly.")
    (project / "AGENTS.md").write_text("Run make test.\n")
    for folder in ("b/c", "a", ".git"):
        (project / folder / "AGENTS.md").write_text("deep")
    found = read_instructions(project, user)
    assert found.left_out == ""
    assert found.text.index("Speak plainly.") < found.text.index("Run make test.")
    assert found.text.endswith("read: a/AGENTS.md, b/c/AGENTS.md")
    assert "deep" not in found.text


def test_a_link_out_of_the_project_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the key")
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "AGENTS.md").symlink_to(secret)
    (project / "sub" / "AGENTS.md").symlink_to(secret)
    found = read_instructions(project, tmp_path / "nobody")
    assert found.text == ""
    assert "is a link" in found.left_out


def test_long_instructions_are_cut_and_said(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_bytes(b"x" * (MAX_BYTES - 1) + "é and more".encode())
    found = read_instructions(tmp_path, tmp_path / "nobody")
    assert "was cut" in found.left_out
    assert len(found.text.encode()) < MAX_BYTES + 100


def skill(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(text)


def test_skills_are_listed_by_name_and_read_when_asked(tmp_path: Path) -> None:
    project, user = tmp_path / "project", tmp_path / "user"
    skill(project / ".etude/skills", "release", "---\nname: release\ndescription: cut\n---\nTag.\n")
    skill(project / ".etude/skills", "broken", "no front matter")
    skill(user / "skills", "x", "---\nname: release\ndescription: another\n---\n")
    skill(user / "skills", "y", "---\nname: 'review'\ndescription: look closely\n---\n")
    skills = find_skills(project, user)
    assert [(s.name, s.description) for s in skills] == [
        ("release", "cut"),
        ("review", "look closely"),
    ]
    assert "- release: cut\n- review: look closely" in skills_text(skills)
    assert skills_text([]) == ""
    # What becomes of the file later does not matter.
    (project / ".etude/skills/release/SKILL.md").unlink()
    (project / ".etude/skills/release/SKILL.md").symlink_to("/etc/passwd")

    async def nowhere() -> Workspace:
        raise AssertionError("a skill needs no workspace")

    def ask(name: str) -> str:
        prepared = prepare([ReadSkill(skills)], ToolCall("skill", {"name": name}, ""))
        assert isinstance(prepared, Prepared)
        return asyncio.run(invoke(prepared, ToolContext(nowhere, 5))).text

    assert ask("release").endswith("Tag.\n")
    assert "there is no skill 'z'" in ask("z")


@pytest.mark.timeout(20)
def test_no_link_and_no_pipe_is_read_as_a_skill_or_as_instructions(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    skill(outside, "z", "---\nname: z\ndescription: z\n---\nsecret\n")
    skill(project / "conf", "w", "---\nname: w\ndescription: w\n---\nsecret\n")
    (project / ".etude" / "skills" / "pipe").mkdir(parents=True)
    os.mkfifo(project / ".etude" / "skills" / "pipe" / "SKILL.md")
    (project / ".etude" / "skills" / "z").symlink_to(outside / "z")
    os.mkfifo(project / "AGENTS.md")
    assert find_skills(project, tmp_path / "nobody") == []
    assert read_instructions(project, tmp_path / "nobody").text == ""
    for target in (project / "conf", outside):
        shutil.rmtree(project / ".etude")
        (project / ".etude").mkdir()
        (project / ".etude" / "skills").symlink_to(target)
        assert find_skills(project, tmp_path / "nobody") == []
        (project / ".etude" / "skills").unlink()
        (project / ".etude" / "skills").mkdir()


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "AGENTS.md").open("wb") as file:
        file.truncate(1 << 40)
    found = read_instructions(tmp_path, tmp_path / "nobody")
    assert "was cut" in found.left_out
