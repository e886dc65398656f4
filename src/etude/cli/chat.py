"""`etude chat`: a conversation in the terminal, in the harness of practice."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from etude.agent.session import Session
from etude.agent.settings import SessionSettings
from etude.agent.tools import default_tools
from etude.cli.screen import Screen, console
from etude.errors import EtudeError
from etude.inference.engine import TorchEngine
from etude.inference.settings import EngineSettings
from etude.models.hermes import HermesRenderer
from etude.models.pull import ensure_model
from etude.records import Event, EventKind
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
    path = _final_model(Path(model)) or await asyncio.to_thread(
        ensure_model, model, progress=screen.say
    )
    sandbox = await open_sandbox("bubblewrap")
    engine = TorchEngine(path, EngineSettings())

    async def workspace() -> Workspace:
        return await sandbox.create(Image(root=folder.resolve()))

    settings = SessionSettings(
        max_turns=_MAX_TURNS, max_turn_tokens=512, temperature=temperature, seed=seed
    )
    renderer = HermesRenderer.from_folder(path)
    console.print(f"{path.name} on a copy of {folder.resolve()}; an empty line ends.", style="dim")
    try:
        async with Session(
            engine,
            renderer,
            workspace,
            default_tools(),
            settings,
            session_id="chat",
            on_event=_show,
            on_token=lambda token: console.print(
                renderer.decode([token]), end="", markup=False, style="cyan"
            ),
        ) as session:
            while line := await asyncio.to_thread(_ask):
                stop = await session.send(line)
                console.print(f"[{stop.value}]", style="dim", markup=False)
    finally:
        await engine.close()


def _final_model(run: Path) -> Path | None:
    """The trained model of a run folder, or None when this is no run folder."""
    if not (run / "recipe.json").is_file():
        return None
    final = run / "models" / "final"
    if not final.is_dir():
        raise EtudeError(f"{run} is not finished; go on with `etude practice --resume {run}`")
    return final


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
