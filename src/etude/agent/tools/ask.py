"""A question to the person."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from pydantic import Field

from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)

AskPerson = Callable[[str, Sequence[str]], Awaitable[str]]
"""Shows a question with the answers to choose from (none: any answer) and waits for the answer."""


class AskArguments(Arguments):
    """`options` are answers to choose from; the person may also say something else."""

    question: Word
    options: Annotated[tuple[Word, ...], Field(max_length=9)] = ()


class Ask(Tool[AskArguments]):
    """Waits for a person's answer. `person` is None where nobody is there."""

    name = "ask"
    description = "ask the person a question and wait for the answer"
    arguments = AskArguments
    effect = Effect.TALK
    patient = True

    def __init__(self, person: AskPerson | None = None) -> None:
        self._person = person

    def subject(self, args: AskArguments) -> str:
        """The question."""
        return args.question

    async def run(self, context: ToolContext, args: AskArguments) -> ToolResult:
        """See `Tool.run`."""
        if self._person is None:
            return ToolResult(
                "nobody is there to answer; decide yourself and say at the end what you assumed.",
                ErrorClass.UNAVAILABLE,
            )
        answer = await self._person(args.question, args.options)
        return ToolResult(answer.strip() or "(no answer)")
