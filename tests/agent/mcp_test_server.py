"""A tool server made with the SDK, for the tests: `mcp_test_server.py [http PORT]`."""

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("test", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def echo(text: str) -> str:
    """Say it back."""
    return text


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=base64.b64decode("iVBORw0KGgo="), format="png")


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("this never works")


@server.tool()
async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def where() -> dict[str, Any]:
    """Where the server stands and what it was given."""
    return {"cwd": str(Path.cwd()), "variable": os.environ.get("GIVEN"), "pid": os.getpid()}


@server.tool()
def die() -> str:
    """End the server at once, without a word."""
    sys.stderr.write("this is the end\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def spawn() -> int:
    """Leave a process behind in a session of its own."""
    child = subprocess.Popen(
        ["setsid", "sh", "-c", "trap '' TERM; sleep 300 & wait"], stdin=subprocess.DEVNULL
    )
    return child.pid


@server.tool()
async def grow(context: Context) -> str:
    """Get another tool."""
    server.add_tool(lambda: "new", name="newcomer", description="Came later.")
    server.remove_tool("fail")
    await context.session.send_tool_list_changed()
    await context.notify_tools_changed()
    return "grown"


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run()
