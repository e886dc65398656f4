"""Ending the session."""

from __future__ import annotations

from etude.agent.tools.tool import Arguments, Effect, Tool, ToolContext, ToolResult


class FinishArguments(Arguments):
    """What the person reads at the end."""

    message: str = ""


class Finish(Tool[FinishArguments]):
    """Ends the session with a message."""

    name = "finish"
    description = "end the work with a message"
    arguments = FinishArguments
    effect = Effect.TALK

    async def run(self, context: ToolContext, args: FinishArguments) -> ToolResult:
        """See `Tool.run`."""
        return ToolResult(args.message, final=True)
