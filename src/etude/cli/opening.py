"""From what a person chose to a session: the model, the limits, the sandbox.

A `Bench` is everything that sessions of one process share; it is opened piece by piece when first
needed and closed as a whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from etude.agent.backend import SCRIPT_PREFIX, Backend, ServiceBackend, local_backend
from etude.agent.effort import EffortLevel
from etude.agent.live import Drivers, LiveOptions, LiveSession, open_live, usable_project
from etude.agent.log import read_about
from etude.agent.mcp.servers import ToolServers, open_servers
from etude.agent.permissions.modes import Mode
from etude.agent.permissions.settings import read_user_file
from etude.agent.sessions import SessionStore
from etude.agent.settings import SessionSettings
from etude.agent.tools import AnyTool, tools_named
from etude.cli.choices import Choices
from etude.errors import EtudeError
from etude.inference.openai_client_settings import ChatServiceSettings
from etude.inference.settings import EngineSettings
from etude.machine import state_folder
from etude.pipeline.recipe import Recipe
from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.registry import open_sandbox

_MAX_TURNS = 200
_MAX_TURN_TOKENS = 16384
_TEMPERATURE = 0.7
_CONTEXT = 16384
"""Of a model in this process, unless something else is asked for; its own limit counts too."""


def session_store() -> SessionStore:
    """Where this person's sessions are."""
    return SessionStore(state_folder() / "sessions")


@dataclass
class Bench:
    """See the module. `tools` and `settings` are those of a trained run when the model is one."""

    backend: Backend
    options: LiveOptions
    tools: tuple[AnyTool, ...] | None
    about: dict[str, Any]
    store: SessionStore = field(default_factory=session_store)
    loading: bool = False
    """Whether a model is being read, also after nobody waits for it any more: a thread that reads
    cannot be interrupted."""
    _sandbox: BubblewrapSandbox | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        """Of the model."""
        return self.backend.name

    async def sandbox(self) -> BubblewrapSandbox:
        """The sandbox, proved by running a guest when first asked for. Raises EtudeError when
        there is none: nothing ever runs without."""
        async with self._opening:
            if self._sandbox is None:
                self._sandbox = await open_sandbox()
            return self._sandbox

    async def open(
        self,
        drivers: Drivers,
        *,
        resume: str | None = None,
        fork: bool = False,
        fork_turn: int | None = None,
    ) -> LiveSession:
        """A session on this bench. Raises EtudeError."""
        self.loading = True
        try:
            live = await self._open_live(drivers, resume, fork, fork_turn)
        except Exception:
            self.loading = False
            raise
        self.loading = False
        return live

    async def _open_live(
        self, drivers: Drivers, resume: str | None, fork: bool, fork_turn: int | None
    ) -> LiveSession:
        return await open_live(
            replace(drivers, tools=self.tools),
            self.options,
            store=self.store,
            resume=resume,
            fork=fork,
            fork_turn=fork_turn,
            about=self.about,
        )

    async def close(self) -> None:
        """Free the model and the sandbox."""
        try:
            await self.backend.close()
        finally:
            if self._sandbox is not None:
                self._sandbox.close()
                self._sandbox = None


@dataclass
class OpenSession:
    """A session and the tool servers that it uses; closed together. `log` is where it is kept."""

    live: LiveSession
    servers: ToolServers
    log: Path

    async def close(self) -> None:
        """Idempotent. Of a session in which nothing was said nothing is kept."""
        try:
            await self.live.close()
        finally:
            await self.servers.close()
        if not self.live.used:
            self.log.unlink(missing_ok=True)


async def open_session(
    bench: Bench, target: Target, drivers: Drivers, say: Callable[[str], None]
) -> OpenSession:
    """A session with its tool servers. `say` is told, in sentences, what is not used and why.
    Raises EtudeError."""
    servers = await open_servers(bench.options.project, ask=drivers.ask, say=say)
    try:
        live = await bench.open(
            replace(drivers, extra_tools=servers.tools),
            resume=target.resume,
            fork=target.fork,
            fork_turn=target.fork_turn,
        )
    except BaseException:
        await servers.close()
        raise
    live.permissions.protect(servers.files)
    for complaint in (live.dropped, servers.pending_sentence, *servers.complaints):
        if complaint:
            say(complaint)
    kinds = sorted({brought.kind for brought in live.permissions.pending})
    if kinds:
        say(
            f"This project brings {' and '.join(kinds)} that nobody approved; they do not count"
            " until `etude approve` was used."
        )
    return OpenSession(live, servers, bench.store.path(live.session.session_id))


@dataclass(frozen=True)
class Target:
    """An old session to go on with: its id, whether as a copy, and up to which turn."""

    resume: str | None = None
    fork: bool = False
    fork_turn: int | None = None


def open_bench(choices: Choices) -> tuple[Bench, Target]:
    """Raises EtudeError when what was chosen does not fit together or cannot be used. The model
    itself is opened later."""
    store = session_store()
    project = usable_project(choices.folder)
    target = _target(choices, store, project)
    if target.resume is not None:
        choices = _as_before(choices, store, target.resume)
        project = usable_project(choices.folder)
    if not choices.model:
        choices = _from_environment(choices)
    backend, tools, settings = _model(choices)
    options = LiveOptions(
        project=project,
        mode=_mode(choices.mode),
        effort=_effort(choices.effort),
        settings=settings,
        money=choices.money,
        allow_hosts=choices.allow_hosts,
    )
    return Bench(backend, options, tools, _about(choices), store), target


def _target(choices: Choices, store: SessionStore, project: Path) -> Target:
    if choices.resume and choices.fork:
        raise EtudeError("give --resume or --fork, not both")
    if choices.fork:
        name, _, turn = choices.fork.partition(":")
        if turn and not turn.isdecimal():
            raise EtudeError(f"--fork takes ID or ID:TURN with a number, not {choices.fork!r}")
        return Target(store.find(name, project), True, int(turn) if turn else None)
    return Target(store.find(choices.resume, project)) if choices.resume else Target()


def _from_environment(choices: Choices) -> Choices:
    """The model that a person has set for all sessions."""
    model = os.environ.get("ETUDE_MODEL", "")
    if not model:
        raise EtudeError(
            "no model was named; give --model with a run folder, a registered model, a hub id or"
            " (with --url) a service's model, or set ETUDE_MODEL (and ETUDE_URL);"
            " `etude --help` lists the commands"
        )
    return replace(
        choices,
        model=model,
        url=choices.url or os.environ.get("ETUDE_URL", ""),
        api_key_env=choices.api_key_env or os.environ.get("ETUDE_API_KEY_ENV", ""),
    )


_REMEMBERED = ("model", "url", "api_key_env", "dialect", "context")


def _about(choices: Choices) -> dict[str, Any]:
    """What has to be known to go on with a session later."""
    model = choices.model
    if not choices.url and _is_path(model):
        prefix = SCRIPT_PREFIX if model.startswith(SCRIPT_PREFIX) else ""
        model = prefix + str(Path(model.removeprefix(SCRIPT_PREFIX)).resolve())
    chosen = {name: getattr(choices, name) for name in _REMEMBERED}
    return {"chosen": {**chosen, "model": model}}


def _is_path(model: str) -> bool:
    return model.startswith(SCRIPT_PREFIX) or Path(model).exists()


def _as_before(choices: Choices, store: SessionStore, session_id: str) -> Choices:
    """What was not chosen anew is as it was: the model and where it answers, the project."""
    about = read_about(store.path(session_id))
    project = about.get("project")
    if project:
        choices = replace(choices, folder=Path(project))
    chosen = about.get("chosen")
    if choices.model or not isinstance(chosen, dict):
        return choices
    return replace(choices, **{name: chosen[name] for name in _REMEMBERED if chosen.get(name)})


def _model(choices: Choices) -> tuple[Backend, tuple[AnyTool, ...] | None, SessionSettings]:
    """The model, its tools (None: the usual ones), and the limits of a session with it."""
    settings = SessionSettings(
        max_turns=_MAX_TURNS,
        max_turn_tokens=_MAX_TURN_TOKENS,
        token_budget=choices.tokens,
        temperature=_TEMPERATURE if choices.temperature is None else choices.temperature,
        seed=choices.seed,
    )
    if choices.dialect and (choices.url or choices.model.startswith(SCRIPT_PREFIX)):
        raise EtudeError("--dialect is for local models; leave it out for a script or a service")
    if choices.url:
        return ServiceBackend(_service(choices)), None, settings
    if choices.api_key_env:
        raise EtudeError("--api-key-env is for a service; name its address with --url")
    engine = EngineSettings(max_context=choices.context or _CONTEXT, retained_slots=4, max_batch=4)
    run = Path(choices.model)
    if not (run / "recipe.json").is_file():
        return local_backend(choices.model, engine, choices.dialect or None), None, settings
    recipe = Recipe.from_json(run / "recipe.json")
    changed: dict[str, Any] = {"seed": choices.seed}
    if choices.temperature is not None:
        changed["temperature"] = choices.temperature
    if choices.tokens is not None:
        changed["token_budget"] = choices.tokens
    engine = recipe.engine
    if choices.context is not None:
        engine = engine.model_copy(update={"max_context": choices.context})
    # What it practised in, whatever its chat template says.
    dialect = choices.dialect or "hermes"
    backend = local_backend(str(_final_model(run)), engine, dialect)
    return backend, tools_named(recipe.tools), recipe.session.model_copy(update=changed)


def _final_model(run: Path) -> Path:
    """The trained model of a run folder. Raises EtudeError while there is none."""
    final = run / "models" / "final"
    if not final.is_dir():
        raise EtudeError(f"{run} is not finished; go on with `etude practice --resume {run}`")
    return final


def _service(choices: Choices) -> ChatServiceSettings:
    try:
        return ChatServiceSettings(
            base_url=choices.url,
            model=choices.model,
            api_key_variable=choices.api_key_env or None,
            context_length=choices.context,
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise EtudeError(f"the service {choices.url} cannot be used: {fault['msg']}") from error


def _mode(name: str) -> Mode:
    """Of this name; without one, what the person's settings say."""
    if not name:
        return read_user_file().permissions.mode
    return Mode(_one_of(name, [mode.value for mode in Mode], "mode"))


def _effort(name: str) -> EffortLevel:
    if not name:
        return EffortLevel.MEDIUM
    return EffortLevel(_one_of(name, [level.value for level in EffortLevel], "effort"))


def _one_of(name: str, known: Sequence[str], what: str) -> str:
    if name not in known:
        raise EtudeError(f"there is no {what} {name!r}; choose from {', '.join(known)}")
    return name
