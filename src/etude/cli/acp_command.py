"""The command `etude acp`."""

from __future__ import annotations

from typing import Annotated

import typer

from etude.cli.choices import Choices


def acp(
    model: Annotated[
        str, typer.Option(envvar="ETUDE_MODEL", help="A run folder, model name, folder or hub id.")
    ] = "",
    mode: Annotated[str, typer.Option(help="What runs unasked: ask, auto, read-only, plan.")] = "",
    effort: Annotated[str, typer.Option(help="low, medium or high.")] = "",
    url: Annotated[str, typer.Option(help="An OpenAI-compatible service, up to /v1.")] = "",
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Variable that holds the service's key.")
    ] = "",
    context_length: Annotated[
        int | None, typer.Option("--context", min=64, help="Tokens of prompt and answer.")
    ] = None,
    dialect: Annotated[str, typer.Option(help="Tool format of a local model, by name.")] = "",
    money: Annotated[
        float | None, typer.Option(min=0, help="Dollars that each session may spend.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each session may sample.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="May be fetched from; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default 0.7, or the recipe's.")
    ] = None,
) -> None:
    """Be the agent of an editor that speaks the Agent Client Protocol, over stdin and stdout.

    The editor starts this, names the folder of each session and asks you what needs asking.
    Example, as the command of an agent in the editor's settings:
    `etude acp --model runs/toolz-20261130-120000`
    """
    from etude.cli.acp import serve
    from etude.cli.running import run

    choices = Choices(
        model=model,
        url=url,
        api_key_env=api_key_env,
        context=context_length,
        mode=mode,
        effort=effort,
        money=money,
        tokens=tokens,
        allow_hosts=tuple(allow_host or ()),
        dialect=dialect,
        seed=seed,
        temperature=temperature,
    )
    run(serve, choices)
