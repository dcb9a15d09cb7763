"""One session with an MCP server.

Invariants:

- A call is sent once. When the connection breaks before its answer, nobody knows whether it was executed: the attempt
  is void, and the call is not repeated.
- What the server answers is the policy's business, errors included. What it does not answer, or answers as no server
  may, is the environment's failure: `env_died` for a command, `env_unreachable` for a URL, `env_malformed`.

A task of its own opens the connection and closes it, because the package's scopes belong to the task that enters them.

Waits: for the server's answers, ended by them, by the end of the connection, or by the caller's cancellation; and in
`close` for the end of the connection, which the package bounds.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from flowrl.environments.failure import EnvironmentFailed
from flowrl.environments.tools.tool import ToolError
from flowrl.tasks.user_module import one_line

Found = TypeVar("Found")
LOST = (-32000, -32600)
"""Codes that the package gives a call whose answer cannot come: the connection or the session has ended."""
NO_ANSWER = (-32603, "Server returned an error response")
"""The package's code and text for an HTTP status of an error without an answer in it."""
NO_MESSAGE = -32700
HANDSHAKE = "legacy"
"""The package's word for versions of the protocol that have sessions."""
CONNECT_S = 30.0
MOST_PAGES = 100
"""Most pages of a server's list of tools."""


class McpSession:
    """From `open` to `close`, which has to be called. `extra` are headers, or variables of a command."""

    def __init__(self, name: str, words: Sequence[str], *, over_http: bool, extra: Mapping[str, str]) -> None:
        self._name, self._words, self._over_http, self._extra = name, words, over_http, extra
        self._open = asyncio.Event()
        self._over = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._client: Any = None
        self._tools: list[Any] = []

    async def open(self) -> list[Any]:
        """Connect; returns the server's tools as the package has them. Raises EnvironmentFailed."""
        self._holder = asyncio.create_task(self._hold())
        await self._unless_lost(self._open.wait(), "at its start")
        return self._tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """What the tool answers. Raises ToolError for its errors, and EnvironmentFailed."""
        from mcp import MCPError

        try:
            asked = self._client.session.call_tool(tool, dict(arguments))
            result = await self._unless_lost(asked, f"during {tool}")
        except MCPError as problem:
            raise self._failure(tool, problem) from None
        except (ValidationError, RuntimeError) as problem:
            text = f"{self._name} answered {tool} with what the protocol does not allow: {one_line(problem)}"
            raise EnvironmentFailed("env_malformed", text) from None
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    def _failure(self, tool: str, problem: Any) -> Exception:
        """What an error without a result means."""
        if problem.code == NO_MESSAGE:
            return EnvironmentFailed("env_malformed", f"{self._name} answered {tool} with no message: {problem}")
        if problem.code in LOST or (problem.code, str(problem)) == NO_ANSWER:
            return self._lost(f"during {tool}", problem)
        return ToolError(f"{tool}: {problem}")

    async def close(self) -> None:
        """End the session, and the process of a command."""
        self._over.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})
            if not self._holder.cancelled():
                self._holder.exception()  # how a session ends does not matter any more

    async def _hold(self) -> None:
        from mcp import Client

        async with self._target() as target, Client(target, mode=HANDSHAKE, cache=None) as client:
            self._client, self._tools = client, await _listed(client)
            self._open.set()
            await self._over.wait()

    @asynccontextmanager
    async def _target(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        if not self._over_http:
            command, *arguments = self._words
            yield StdioServerParameters(command=command, args=arguments, env={**os.environ, **self._extra})
            return
        times = httpx2.Timeout(CONNECT_S, read=None)  # how long an answer may take is the call's limit
        async with httpx2.AsyncClient(headers=dict(self._extra), timeout=times) as http:
            yield streamable_http_client(self._words[0], http_client=http)

    async def _unless_lost(self, doing: Coroutine[Any, Any, Found], when: str) -> Found:
        """The result, unless the connection ends first."""
        assert self._holder is not None
        task = asyncio.ensure_future(doing)
        try:
            await asyncio.wait({task, self._holder}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise self._lost(when, None if self._holder.cancelled() else self._holder.exception())
        return task.result()

    def _lost(self, when: str, problem: BaseException | None) -> EnvironmentFailed:
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        why = f": {one_line(problem)}" if problem is not None else ""
        if self._over_http:
            return EnvironmentFailed("env_unreachable", f"{self._name} was lost {when}{why}")
        return EnvironmentFailed("env_died", f"{self._name} ended {when}{why}")


async def _listed(client: Any) -> list[Any]:
    """All pages of the tools."""
    page = await client.list_tools()
    found = list(page.tools)
    for _ in range(MOST_PAGES):
        if page.next_cursor is None:
            break
        page = await client.list_tools(cursor=page.next_cursor)
        found += page.tools
    return found


def _text(result: Any) -> str:
    """The texts of a result; of what is no text, its kind."""
    parts = [_part(part) for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _part(part: Any) -> str:
    resource = getattr(part, "resource", part)
    text = getattr(resource, "text", None)
    if isinstance(text, str):
        return text
    kind = getattr(resource, "mime_type", None) or part.type
    return f"[{kind}, which cannot be shown as text]"
