"""Reading a skill: how a person wants a kind of work to be done."""

from __future__ import annotations

from collections.abc import Sequence

from etude.agent.instructions import Skill
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)


class SkillArguments(Arguments):
    """A name from the list of skills."""

    name: Word


class ReadSkill(Tool[SkillArguments]):
    """Gives a skill's whole text, as it was at the start of the session: the files lie on the
    host, where nothing is read at a model's word."""

    name = "skill"
    description = "read one of the skills before doing what it is about"
    arguments = SkillArguments
    effect = Effect.TALK

    def __init__(self, skills: Sequence[Skill]) -> None:
        self._skills = {skill.name: skill for skill in skills}

    async def run(self, context: ToolContext, args: SkillArguments) -> ToolResult:
        """See `Tool.run`."""
        skill = self._skills.get(args.name)
        if skill is None:
            known = ", ".join(sorted(self._skills))
            return ToolResult(
                f"there is no skill {args.name!r}; known: {known}", ErrorClass.NOT_FOUND
            )
        return ToolResult(skill.text)
