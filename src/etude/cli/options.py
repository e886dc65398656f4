"""Options that the terminal, a headless run and an editor's agent share."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"etude {version('etude')}\n")
        raise typer.Exit


Mode = Annotated[str, typer.Option(help="What runs unasked: ask, auto, read-only, plan.")]
Effort = Annotated[str, typer.Option(help="low, medium or high.")]
Url = Annotated[str, typer.Option(help="An OpenAI-compatible service, up to /v1.")]
ApiKeyEnv = Annotated[
    str, typer.Option(metavar="NAME", help="Variable that holds the service's key.")
]
Context = Annotated[
    int | None, typer.Option("--context", min=64, help="Tokens of prompt and answer.")
]
Dialect = Annotated[str, typer.Option(help="Tool format of a local model, by name.")]
Money = Annotated[
    float | None,
    typer.Option(min=0, help="Dollars that a session may spend, sub-agents included."),
]
Tokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens that a session may sample, sub-agents included."),
]
AllowHost = Annotated[
    list[str] | None, typer.Option(metavar="HOST", help="May be fetched from; repeatable.")
]
Seed = Annotated[int, typer.Option(help="Seed of sampling.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, help="0 is greedy; default 0.7, or the recipe's.")
]
Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_print_version, help="Say it and end."),
]
