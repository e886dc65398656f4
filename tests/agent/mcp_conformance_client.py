"""Etude's client as the conformance suite starts it: `mcp_conformance_client.py URL`.

Lists the server's tools and calls each with arguments made from its schema; questions of the
server's are answered with their defaults.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.agent.mcp.definitions import Origin, ServerDefinition, ServerSettings
from etude.agent.mcp.elicit import ANSWER
from etude.agent.mcp.servers import open_servers
from etude.agent.tools import ToolContext

EXAMPLES: dict[str, Any] = {
    "integer": 2,
    "number": 2,
    "string": "two",
    "boolean": True,
    "array": [],
    "object": {},
}


async def ask(question: str, options: Sequence[str]) -> str:
    return ANSWER if ANSWER in options else ""


async def main() -> None:
    server = ServerDefinition("suite", Origin.USER, ServerSettings(url=sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        servers = await open_servers(Path(folder), given=[server], ask=ask)
        async with servers:
            print([tool.name for tool in servers.tools], servers.complaints)
            for tool in servers.tools:
                properties = tool.spec().parameters.get("properties", {})
                values = {name: EXAMPLES[of["type"]] for name, of in properties.items()}
                args = tool.arguments.model_validate(values)
                context = ToolContext(None, 20)  # type: ignore[arg-type]
                print(await tool.run(context, args))


asyncio.run(main())
