"""`etude chat`: a conversation in the terminal, in the harness of practice."""

from __future__ import annotations

import asyncio
import difflib
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.token_policy import TokenPolicy
from etude.agent.tools import AnyTool, default_tools, tools_named
from etude.agent.tools.programs import with_tools
from etude.cli.screen import Screen, console
from etude.errors import EtudeError
from etude.inference.engine import TorchEngine
from etude.inference.settings import EngineSettings
from etude.models.dialects.hermes import HermesRenderer
from etude.models.pull import ensure_model
from etude.pipeline.recipe import Recipe
from etude.records import Event, EventKind
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.protocol import Image, Workspace
from etude.sandbox.registry import open_sandbox

_MAX_TURNS = 8


async def converse(model: str, folder: Path, seed: int, temperature: float) -> None:
    """Read messages from the terminal until end of input; the model works on a copy of `folder`.

    Raises EtudeError when the model, the folder or the sandbox is missing.
    """
    if not folder.is_dir():
        raise EtudeError(f"{folder} is no folder; name the repository to work on with --folder")
    screen = Screen()
    run = Path(model)
    if (run / "recipe.json").is_file():
        path, tools = _final_model(run), tools_named(Recipe.from_json(run / "recipe.json").tools)
    else:
        path = await asyncio.to_thread(ensure_model, model, progress=screen.say)
        tools = default_tools()
    with closing(await open_sandbox()) as sandbox:
        engine = TorchEngine(path, EngineSettings())
        try:
            settings = SessionSettings(
                max_turns=_MAX_TURNS, max_turn_tokens=512, temperature=temperature, seed=seed
            )
            await _talk(path, folder.resolve(), engine, sandbox, settings, tools)
        finally:
            await engine.close()


async def _talk(
    path: Path,
    folder: Path,
    engine: TorchEngine,
    sandbox: BubblewrapSandbox,
    settings: SessionSettings,
    tools: Sequence[AnyTool],
) -> None:
    async def workspace() -> Workspace:
        return await sandbox.create(with_tools(Image(root=folder)))

    console.print(f"{path.name} on a copy of {folder}; an empty line ends.", style="dim")
    async with Session(
        TokenPolicy(engine, HermesRenderer.from_folder(path)),
        workspace,
        tools,
        settings,
        session_id="chat",
        on_event=_show,
        on_delta=lambda delta: console.print(delta.text, end="", markup=False, style="cyan"),
    ) as session:
        while line := await _line():
            stop = await session.prompt(line)
            console.print(f"[{stop.value}]", style="dim", markup=False)
        _show_changes(folder, (await session.trajectory()).outcome.changes)


def _show_changes(folder: Path, changes: Mapping[str, str | None]) -> None:
    """What the agent left behind, as a patch; the copy itself is thrown away."""
    for path, text in changes.items():
        file = folder / path
        before = file.read_text("utf-8", "replace") if file.is_file() else ""
        patch = difflib.unified_diff(
            before.splitlines(), (text or "").splitlines(), f"a/{path}", f"b/{path}", lineterm=""
        )
        for line in patch:
            console.print(line, markup=False)


def _final_model(run: Path) -> Path:
    """The trained model of a run folder. Raises EtudeError while there is none."""
    final = run / "models" / "final"
    if not final.is_dir():
        raise EtudeError(f"{run} is not finished; go on with `etude practice --resume {run}`")
    return final


async def _line() -> str:
    """A line from the terminal. The thread that waits for it ends with the program: one of the
    loop's own would hold a Ctrl-C back until somebody presses Enter."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def deliver(text: str) -> None:
        if not answer.done():
            answer.set_result(text)

    def wait() -> None:
        text = _ask()
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            loop.call_soon_threadsafe(deliver, text)

    threading.Thread(target=wait, daemon=True).start()
    return await answer


def _ask() -> str:
    if sys.stdin.isatty():
        try:
            return console.input("[bold]> [/bold]").strip()
        except EOFError:
            return ""
    return sys.stdin.readline().strip()


def _show(event: Event) -> None:
    if event.kind is EventKind.TOOL_RESULT:
        text = str(event.data["text"])
        console.print(f"\n{event.data['name']}: {text}", style="yellow", markup=False)
    elif event.kind is EventKind.ASSISTANT:
        console.print()
