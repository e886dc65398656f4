"""`etude review`: where the diff comes from, and a model's summary when one is asked for."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from etude.agent.policy import TurnLimits
from etude.agent.review import Review, review, with_summary
from etude.cli.choices import Choices
from etude.cli.opening import open_bench
from etude.errors import EtudeError
from etude.sandbox.protocol import Image, Limits, Rights, WorkspaceError
from etude.sandbox.registry import open_sandbox

_LARGEST = 8 << 20
_GIT_SECONDS = 60.0
_SUMMARY = TurnLimits(max_tokens=1000, temperature=0.0, seed=0, seconds=600)


async def reviewed(diff: str, choices: Choices) -> Review:
    """Review a diff in a file, on standard input (`-`), or of the working tree (`''`). With a
    model chosen, its summary too. Raises EtudeError."""
    project = choices.folder.resolve()
    if not project.is_dir():
        raise EtudeError(f"{choices.folder} is no folder; name the repository with --folder")
    text = _read(diff) if diff else await _working_tree(project)
    if not text.strip():
        raise EtudeError("there is nothing to review: the diff is empty")
    found = review(text, project)
    if not choices.model:
        return found
    bench, _ = open_bench(choices)
    try:
        return await with_summary(found, text, await bench.backend.new_policy(), _SUMMARY)
    finally:
        await bench.close()


def _read(diff: str) -> str:
    try:
        data = sys.stdin.buffer.read(_LARGEST + 1) if diff == "-" else Path(diff).read_bytes()
    except OSError as error:
        raise EtudeError(f"the diff {diff} cannot be read ({error.strerror})") from error
    if len(data) > _LARGEST:
        raise EtudeError("the diff has over 8 MiB; review it in parts")
    return data.decode("utf-8", "replace")


async def _working_tree(project: Path) -> str:
    """What git says differs from the last commit. git runs in the sandbox: a repository's own
    configuration can make it run anything."""
    with closing(await open_sandbox()) as sandbox:
        try:
            image = Image(root=project, live=True)
            workspace = await sandbox.create(image, Limits(output_bytes=_LARGEST))
            try:
                result = await workspace.view(Rights(readonly=True)).exec(
                    ["git", "--no-pager", "diff", "--no-color", "--no-ext-diff", "HEAD"],
                    timeout=_GIT_SECONDS,
                )
            finally:
                await workspace.close()
        except WorkspaceError as error:
            raise EtudeError(f"the sandbox failed: {error}") from error
    if result.exit_code != 0 or result.truncated or result.timed_out:
        why = result.stderr.strip().split("\n")[0] or "it is too large"
        raise EtudeError(f"git gives no diff of {project} ({why}); name a file with a diff")
    return result.stdout
