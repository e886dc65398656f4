"""Handing a piece of work to a sub-agent."""

from __future__ import annotations

from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)


class TaskArguments(Arguments):
    """`prompt` holds all that the sub-agent is told; one that is `readonly` cannot change files."""

    prompt: Word
    readonly: bool = False


class Task(Tool[TaskArguments]):
    """Runs a sub-agent on the same workspace and gives its final message. It may do no more than
    its parent. Readonly ones of one turn run side by side; those that write take turns."""

    name = "task"
    description = "let a sub-agent, which knows only the prompt, do a piece of work and report"
    arguments = TaskArguments
    effect = Effect.DELEGATE
    patient = True

    def subject(self, args: TaskArguments) -> str:
        """The prompt."""
        return args.prompt

    def side_by_side(self, args: TaskArguments) -> bool:
        """See `Tool.side_by_side`."""
        return args.readonly

    async def run(self, context: ToolContext, args: TaskArguments) -> ToolResult:
        """See `Tool.run`."""
        if context.delegate is None:
            return ToolResult(
                "no sub-agent can be started here; do it yourself.", ErrorClass.UNAVAILABLE
            )
        return await context.delegate(args.prompt, args.readonly)
