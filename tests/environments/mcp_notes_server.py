"""A small MCP server for tests: `python tests/environments/mcp_notes_server.py stdio`, or `http PORT`.

Every tool adds a line to the file that FLOWRL_TEST_NOTES_LOG names when it is executed, so that tests can count what
arrived.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("notes", log_level="ERROR")
notes: dict[str, list[str]] = {}


def log(line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    with Path(os.environ["FLOWRL_TEST_NOTES_LOG"]).open("a") as file:
        file.write(f"{line}\n")


@server.tool()
def note(text: str, ctx: Context) -> list[str]:
    """Keeps a note, and tells all that this session has."""
    log(f"note {text}")
    mine = notes.setdefault((ctx.headers or {}).get("mcp-session-id", ""), [])
    mine.append(text)
    return mine


@server.tool()
def key(ctx: Context) -> str:
    """Tells the key that came with the request, or the variable."""
    return (ctx.headers or {}).get("x-key", "") or os.environ.get("NOTES_KEY", "")


@server.tool()
def fails(how: str, times: int = 1) -> dict[str, Any]:
    """Raises."""
    log("fails")
    raise ValueError(how * times)


@server.tool()
async def ends(how: str) -> str:
    """Ends the server, or never answers."""
    log(f"ends {how}")
    if how == "hang":
        await anyio.sleep_forever()
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
