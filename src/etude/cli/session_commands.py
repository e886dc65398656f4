"""The commands about sessions: `etude` itself, `chat`, `sessions`, `export`, `approve`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.cli import options
from etude.cli.choices import PICK, Choices
from etude.errors import EtudeError

_MODELS = "A run folder, registered model, folder, hub id, or (with --url) a service's model."
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def talk(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Option("--print", "-p", metavar="TEXT", help="Answer this and end (`-`: stdin)."),
    ] = None,
    model: Annotated[str, typer.Option(help=_MODELS)] = "",
    folder: Annotated[Path, typer.Option(help="The project to work on.")] = Path(),
    mode: options.Mode = "",
    effort: options.Effort = "",
    resume: Annotated[
        str, typer.Option(metavar="[ID|last]", help="Go on with a session; without ID, choose.")
    ] = "",
    go_on: Annotated[
        bool, typer.Option("--continue", help="Go on with this folder's last session.")
    ] = False,
    fork: Annotated[
        str, typer.Option(metavar="ID[:TURN]", help="Go on in a copy of a session.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="With -p: one JSON document.")] = False,
    stream_json: Annotated[
        bool, typer.Option("--stream-json", help="With -p: one JSON line for each event.")
    ] = False,
    url: options.Url = "",
    api_key_env: options.ApiKeyEnv = "",
    context_length: options.Context = None,
    dialect: options.Dialect = "",
    money: options.Money = None,
    tokens: options.Tokens = None,
    allow_host: options.AllowHost = None,
    seed: options.Seed = 0,
    temperature: options.Temperature = None,
    version: options.Version = False,
) -> None:
    """Work on the project in this folder with a model: files are read, changed and tested in a
    sandbox, and what matters is asked first.

    Without -p in the terminal; with -p one message, no questions, and exit code 0 (finished), 3
    (something was refused), 4 (a limit), 5 (an error) or 130 (interrupted). A trained run gets
    the tools of its recipe. Examples: `etude --model smollm2-135m`,
    `etude chat --model runs/toolz-20261130-120000`, `etude -p "fix the tests" --mode auto --json`
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    if go_on and resume:
        raise EtudeError("give --continue or --resume, not both")
    if prompt is None and (as_json or stream_json):
        raise EtudeError("--json and --stream-json go with -p TEXT")
    if as_json and stream_json:
        raise EtudeError("give --json or --stream-json, not both")
    choices = Choices(
        model=model,
        url=url,
        api_key_env=api_key_env,
        context=context_length,
        mode=mode,
        effort=effort,
        folder=folder,
        money=money,
        tokens=tokens,
        allow_hosts=tuple(allow_host or ()),
        dialect=dialect,
        seed=seed,
        temperature=temperature,
        resume="last" if go_on else resume,
        fork=fork,
    )
    _begin(choices, prompt, "json" if as_json else "stream-json" if stream_json else "text")


def _begin(choices: Choices, prompt: str | None, form: str) -> None:
    """In the terminal, headless, or line by line."""
    if prompt is not None:
        from etude.cli.headless import Form, headless

        _refuse_picking(choices)
        raise typer.Exit(asyncio.run(headless(choices, prompt, Form(form))))
    if _interactive():
        from etude.cli.talk import talk as in_terminal

        asyncio.run(in_terminal(choices))
    else:
        from etude.cli.plain import converse
        from etude.cli.running import run

        _refuse_picking(choices)
        run(converse, choices)


def _interactive() -> bool:
    capable = os.environ.get("TERM", "dumb") != "dumb"
    return sys.stdin.isatty() and sys.stdout.isatty() and capable


def _refuse_picking(choices: Choices) -> None:
    if choices.resume == PICK:
        raise EtudeError("--resume without an id needs a terminal; give an id or `last`")


def _refuse_options(context: typer.Context) -> None:
    """Options of `etude` itself mean nothing to a command."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise EtudeError(
                f"put options behind the command: etude {context.invoked_subcommand} …"
            )


def with_values(words: list[str]) -> list[str]:
    """The command line with `?` behind a `--resume` that has no value."""
    out: list[str] = []
    for index, word in enumerate(words):
        out.append(word)
        if word == "--resume" and (index + 1 == len(words) or words[index + 1].startswith("-")):
            out.append(PICK)
    return out


def sessions(
    everywhere: Annotated[bool, typer.Option("--all", help="Of every folder.")] = False,
    as_json: Json = False,
) -> None:
    """List the sessions of this folder, the newest first.

    Example: `etude sessions --all`
    """
    from etude.cli.history import as_json as to_json
    from etude.cli.history import rows, whole
    from etude.cli.opening import session_store
    from etude.cli.screen import print_json, print_table

    found = whole(session_store().list(None if everywhere else Path.cwd()))
    if as_json:
        print_json(to_json(found))
    else:
        print_table("", ["session", "last used", "model", "folder", "first message"], rows(found))


def export(
    session: Annotated[str, typer.Argument(help="Id, the beginning of one, or `last`.")],
    form: Annotated[str, typer.Option("--format", help="markdown or atif.")] = "markdown",
    out: Annotated[Path | None, typer.Option(help="File to write; it must not exist.")] = None,
) -> None:
    """Write a session out: as Markdown for people, as ATIF v1.8 with its tokens for programs.

    Example: `etude export last --format atif --out session.json`
    """
    from etude.cli.history import exported, write_new
    from etude.cli.opening import session_store
    from etude.cli.visible import visible

    text = exported(session_store(), session, form)
    if out is not None:
        write_new(out, text)
        return
    shown = visible(text) if sys.stdout.isatty() else text
    sys.stdout.write(shown.encode("utf-8", "replace").decode())


def explain(
    session: Annotated[str, typer.Argument(help="Id, the beginning of one, or `last`.")],
    as_json: Json = False,
) -> None:
    """Say what was asked and done in a session, and which event shows each claim of its final
    message.

    Example: `etude explain last`
    """
    from etude.agent.explain import explain as explained
    from etude.cli.history import logged
    from etude.cli.opening import session_store
    from etude.cli.screen import print_json

    _, log = logged(session_store(), session)
    explanation = explained(log.events)
    if as_json:
        print_json(explanation.to_json())
    else:
        sys.stdout.write(explanation.to_text().encode("utf-8", "replace").decode())


def review(
    diff: Annotated[
        str, typer.Argument(help="A file with a diff, or `-`; else what differs from HEAD.")
    ] = "",
    folder: Annotated[Path, typer.Option(help="The repository of the diff.")] = Path(),
    model: Annotated[str, typer.Option(help="Add a summary by this model.")] = "",
    url: Annotated[str, typer.Option(help="The model's service, up to /v1.")] = "",
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Variable that holds the service's key.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Say what a change holds: functions, findings of scanners on its added lines, which tests
    mention them, and what was not verified. Nothing of the repository is run.

    Examples: `etude review`, `git diff main | etude review -`
    """
    from etude.cli.reviewing import reviewed
    from etude.cli.running import run
    from etude.cli.screen import print_json

    choices = Choices(model=model, url=url, api_key_env=api_key_env, folder=folder)
    found = run(reviewed, diff, choices)
    if as_json:
        print_json(found.to_json())
    else:
        sys.stdout.write(found.to_text().encode("utf-8", "replace").decode())


def approve(
    ids: Annotated[list[str] | None, typer.Argument(help="What to approve, by id.")] = None,
    folder: Annotated[Path, typer.Option(help="The project.")] = Path(),
    as_json: Json = False,
) -> None:
    """Show what a project wants to run (hooks, tool servers) or to allow, in its exact words; with
    ids, approve exactly that. Until then none of it counts.

    Example: `etude approve 3f2a9c01b7de`
    """
    from etude.cli.approving import approve as approve_these
    from etude.cli.approving import as_json as to_json
    from etude.cli.approving import described, pending
    from etude.cli.screen import print_json
    from etude.cli.writing import write_lines

    project = folder.resolve()
    if not project.is_dir():
        raise EtudeError(f"{folder} is no folder; name the project with --folder")
    done = approve_these(project, ids) if ids else []
    waiting = pending(project)
    if as_json:
        answer = {"approved": [to_json(b) for b in done], "pending": [to_json(b) for b in waiting]}
        print_json(answer)
        return
    for brought in done:
        write_lines([*described(brought)], "approved:")
    for brought in waiting:
        write_lines([*described(brought)], "waits for `etude approve`:")
    if not done and not waiting:
        sys.stdout.write("nothing waits for approval\n")


def register(app: typer.Typer) -> None:
    """Add these commands; `etude` without a command opens a session."""
    app.callback(invoke_without_command=True)(talk)
    app.command("chat")(talk)
    for command in (sessions, explain, export, review, approve):
        app.command()(command)
