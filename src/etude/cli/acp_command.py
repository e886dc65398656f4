"""The command `etude acp`."""

from __future__ import annotations

from typing import Annotated

import typer

from etude.cli import options
from etude.cli.choices import Choices


def acp(
    model: Annotated[
        str, typer.Option(envvar="ETUDE_MODEL", help="A run folder, model name, folder or hub id.")
    ] = "",
    mode: options.Mode = "",
    effort: options.Effort = "",
    url: options.Url = "",
    api_key_env: options.ApiKeyEnv = "",
    context_length: options.Context = None,
    dialect: options.Dialect = "",
    money: options.Money = None,
    tokens: options.Tokens = None,
    allow_host: options.AllowHost = None,
    seed: options.Seed = 0,
    temperature: options.Temperature = None,
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
