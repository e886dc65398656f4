"""The `etude` command. Nothing here imports torch before it is needed."""

from __future__ import annotations

import errno
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import acp_command, session_commands
from etude.cli.running import INTERRUPTED, expect_signals, expect_the_end
from etude.cli.running import run as run_to_end
from etude.errors import EtudeError

if TYPE_CHECKING:
    from etude.pipeline.recipe import Recipe

app = typer.Typer(
    add_completion=False,
    # Plain help: reading the library for rich text takes longer than all the rest.
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
    pretty_exceptions_enable=False,
    help="Turn an open-weights model and your own repositories into a coding agent.",
)
model_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Get models.")
tasks_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make verified tasks from a repository.",
)
app.add_typer(model_app, name="model")
app.add_typer(tasks_app, name="tasks")
session_commands.register(app)
app.command("acp")(acp_command.acp)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine has, and how to mend what is missing.

    Example: `etude doctor`
    """
    from etude.cli.doctor import examine, show
    from etude.cli.screen import print_json

    checks = examine()
    if as_json:
        print_json([vars(check) for check in checks])
    else:
        show(checks)
    if not all(check.ok or not check.needed for check in checks):
        raise typer.Exit(1)


@model_app.command("pull")
def model_pull(
    name: Annotated[str, typer.Argument(help="A registered model.")] = "smollm2-135m",
) -> None:
    """Fetch a model into the cache, mend its tokenizer and verify it; works offline afterwards.
    Without a name it is smollm2-135m.

    Example: `etude model pull smollm2-135m`
    """
    from etude.cli.screen import Screen
    from etude.models.pull import pull

    screen = Screen()
    screen.say(f"{name} is at {pull(name, progress=screen.say)}")


@model_app.command("list")
def model_list(as_json: Json = False) -> None:
    """List the registered models and where they are.

    Example: `etude model list`
    """
    from etude.cli.screen import print_json, print_table
    from etude.models.pull import registered

    models = registered()
    if as_json:
        print_json([{"name": name, "folder": folder} for name, folder in models.items()])
        return
    rows = [[name, str(folder) if folder else "not pulled"] for name, folder in models.items()]
    print_table("", ["model", "folder"], rows)


@tasks_app.command("make")
def tasks_make(
    source: Annotated[str, typer.Argument(help="A folder, a git URL, or pypi:NAME.")],
    out: Annotated[Path, typer.Option(help="Folder to write the tasks to.")] = Path("tasks"),
    preset: Annotated[str, typer.Option(help="Recipe whose numbers of tasks to use.")] = "",
    recipe: Annotated[Path | None, typer.Option(help="A recipe of your own (TOML).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of splits and choice, 0 or more.")] = None,
    as_json: Json = False,
) -> None:
    """Remove features from a repository and keep those removals that its tests notice.

    Example: `etude tasks make pypi:toolz --out toolz-tasks`
    """
    from etude.cli.screen import Screen, print_json
    from etude.pipeline.workbench import make_tasks
    from etude.progress import Silent
    from etude.tasks.source import check

    check(source)
    plan = _plan(preset, recipe).with_choices(source=source, seed=seed)
    screen = Silent() if as_json else Screen()
    result = run_to_end(make_tasks, out, plan, screen)
    if as_json:
        print_json(result)
    else:
        for name, value in result.items():
            screen.say(f"{name}: {value}")


@tasks_app.command("show")
def tasks_show(
    folder: Annotated[Path, typer.Argument(help="Folder that `tasks make` wrote.")],
    task_id: Annotated[str, typer.Argument(help="One task; all are listed without it.")] = "",
    as_json: Json = False,
) -> None:
    """List tasks, or show one: prompt, answer and tests.

    Example: `etude tasks show toolz-tasks`
    """
    from etude.cli.screen import Screen, print_json, print_table
    from etude.tasks.library import load

    tasks = load(folder).tasks
    if not task_id:
        if as_json:
            print_json([task.model_dump(mode="json") for task in tasks])
            return
        rows = [[t.id, t.rung, t.split, t.function, str(len(t.target_tests))] for t in tasks]
        print_table("", ["task", "rung", "split", "function", "tests"], rows)
        return
    chosen = next((task for task in tasks if task.id == task_id), None)
    if chosen is None:
        raise EtudeError(
            f"{folder} has no task {task_id!r}; `etude tasks show {folder}` lists them"
        )
    if as_json:
        print_json(chosen.model_dump(mode="json"))
        return
    screen = Screen()
    screen.say(f"{chosen.id} · {chosen.function} · {chosen.split}\n\n{chosen.prompt}\n")
    screen.say(f"answer: {chosen.answer.old!r} -> {chosen.answer.new!r}")
    screen.say("tests: " + ", ".join(chosen.target_tests))


@app.command()
def practice(
    source: Annotated[str, typer.Argument(help="A folder, a git URL, or pypi:NAME.")] = "",
    preset: Annotated[str, typer.Option(help="A recipe that ships with Etude: demo, smoke.")] = "",
    recipe: Annotated[Path | None, typer.Option(help="A recipe of your own (TOML).")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-TIME.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run.")] = None,
    model: Annotated[str, typer.Option(help="Model name, folder or hub id.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of everything, 0 or more.")] = None,
    as_json: Json = False,
) -> None:
    """Make tasks from a repository, let the model practise them, and show what it learnt.

    Examples: `etude practice pypi:toolz --preset demo`,
    `etude practice --resume runs/toolz-20261130-120000`
    """
    from etude.cli.screen import Screen, print_json, print_summary
    from etude.pipeline.run import Run, default_folder
    from etude.progress import Silent
    from etude.tasks.source import check

    screen = Silent() if as_json else Screen()
    if resume is not None:
        if source or preset or recipe or run or model or seed is not None:
            raise EtudeError(
                "--resume goes on with the recipe of the run; leave the source and the other"
                " options away"
            )
        opened = Run.resume(resume)
    else:
        plan = _plan(preset, recipe).with_choices(source=source, model=model, seed=seed)
        if not plan.source:
            raise EtudeError("name a repository: a folder, a git URL or pypi:NAME")
        check(plan.source)
        folder = run or default_folder(plan.source)
        Run.check_new(folder)
        from etude.pipeline.preflight import preflight

        run_to_end(preflight, plan, folder, screen)
        opened = Run.create(folder, plan)
    # Late: torch takes seconds, and what was asked for may be wrong.
    from etude.pipeline.job import main_job
    from etude.pipeline.report import write_report

    with opened:
        screen.say(f"run folder: {opened.folder}")
        try:
            summary = run_to_end(main_job, opened, screen)
        except KeyboardInterrupt:
            screen.say(f"stopped; go on with `etude practice --resume {opened.folder}`")
            raise
        page = write_report(opened)
        if as_json:
            print_json({"run": str(opened.folder), **summary.to_json()})
        else:
            print_summary(summary)
            screen.say(f"report: {page}")
            screen.say(f"work with the result: etude --model {opened.folder}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Json = False,
) -> None:
    """Write the page of a run again and print its table.

    Example: `etude report runs/toolz-20261130-120000`
    """
    from etude.cli.screen import Screen, print_json, print_summary
    from etude.pipeline.report import write_report
    from etude.pipeline.run import Run
    from etude.pipeline.summary import summarize

    with Run.look(run) as opened:
        page: Path | None = None
        try:
            page = write_report(opened)
        except OSError as error:
            sys.stderr.write(f"etude: the page could not be written to {run} ({error.strerror})\n")
        summary = summarize(opened)
        if as_json:
            print_json({"run": str(run), "report": page and str(page), **summary.to_json()})
        else:
            print_summary(summary)
            if page is not None:
                Screen().say(f"report: {page}")


def _plan(preset: str, recipe: Path | None) -> Recipe:
    """The recipe that was named; the demo's without a name."""
    from etude.pipeline.recipe import Recipe

    if recipe and preset:
        raise EtudeError("give --recipe or --preset, not both")
    return Recipe.from_toml(recipe) if recipe else Recipe.preset(preset or "demo")


def _disk_full(error: OSError | sqlite3.DatabaseError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # SQLite maps its shared index: on a full disk that is an I/O error, not "full".
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def main() -> None:
    """Entry point. An EtudeError is one sentence on stderr; SIGINT and SIGTERM end with 130;
    anything else is a bug."""
    expect_signals()
    try:
        # Not `app()`: that would put another hook for uncaught exceptions in place.
        typer.main.get_command(app)(args=session_commands.with_values(sys.argv[1:]))
    except EtudeError as error:
        sys.stderr.write(f"etude: {error}\n")
        sys.exit(error.exit_code)
    except (OSError, sqlite3.DatabaseError) as error:
        sys.stderr.write(f"etude: {_storage_sentence(error)}\n")
        sys.exit(EtudeError.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        expect_the_end()


def _storage_sentence(error: OSError | sqlite3.DatabaseError) -> str:
    """What went wrong with a disk, in one sentence. Raises `error` itself when it is a bug."""
    from etude.store import is_damage

    if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
        return (
            f"the database of the run is damaged ({error}); put its run.db back from a backup or"
            " start a new run"
        )
    if not _disk_full(error):
        raise error
    practising = sys.argv[1:2] == ["practice"]
    where = getattr(error, "filename", None) or ("the run folder" if practising else "the output")
    sentence = f"no space left on the disk that holds {where} (or it fails); free some and"
    if practising:
        return f"{sentence} go on with `etude practice --resume RUN`: what is stored is kept"
    return f"{sentence} try again"
