"""Background jobs: what they say, and stopping them."""

from __future__ import annotations

import asyncio
import time

from pydantic import Field

from etude.agent.tools.shell import find_job, new_output
from etude.agent.tools.tool import (
    Arguments,
    Effect,
    ErrorClass,
    Tool,
    ToolContext,
    ToolResult,
    Word,
)
from etude.sandbox.protocol import Job, Workspace

_POLL = 0.05
_COMMAND_CHARS = 100


class JobArguments(Arguments):
    """Without an `id` every job is listed. `wait` is how many seconds to wait for its end."""

    id: Word | None = None
    wait: float = Field(default=0, ge=0)
    stop: bool = False


class JobTool(Tool[JobArguments]):
    """Lists background jobs, reads what one has written since the last look, waits for its end or
    stops it."""

    name = "job"
    description = "list background jobs, or read new output of one, wait for it, or stop it"
    arguments = JobArguments
    effect = Effect.READ

    def subject(self, args: JobArguments) -> str:
        """The job."""
        return args.id or ""

    async def run(self, context: ToolContext, args: JobArguments) -> ToolResult:
        """See `Tool.run`."""
        workspace = await context.workspace()
        jobs = await workspace.jobs()
        if args.id is None:
            lines = [_described(context, job) for job in jobs]
            return ToolResult("\n".join(lines) or "(no jobs)")
        if all(job.id != args.id for job in jobs):
            known = ", ".join(job.id for job in jobs) or "none"
            return ToolResult(f"there is no job {args.id}; jobs: {known}.", ErrorClass.NOT_FOUND)
        if args.stop:
            await workspace.stop(args.id)
        job = await _waited(workspace, args.id, min(args.wait, context.timeout))
        output = (await new_output(context, workspace, args.id)).rstrip("\n")
        return ToolResult(f"{_described(context, job)}\n{output or '(no new output)'}")


async def _waited(workspace: Workspace, name: str, seconds: float) -> Job:
    """The job once it has ended, or as it is after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        job = await find_job(workspace, name)
        assert job is not None, "a job stays listed while its workspace lives"
        if not job.running or time.monotonic() >= deadline:
            return job
        await asyncio.sleep(_POLL)


def _described(context: ToolContext, job: Job) -> str:
    known = context.jobs.get(job.id)
    command = " ".join((known.command if known and known.command else job.command).split())
    if len(command) > _COMMAND_CHARS:
        command = f"{command[:_COMMAND_CHARS]}..."
    state = "runs" if job.running else f"ended with exit code {job.exit_code}"
    return f"job {job.id} {state}, {job.seconds:.0f} s: {command}"
