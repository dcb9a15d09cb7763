"""A server that speaks the Model Context Protocol: how it is named, and its tools in an episode.

Every episode has a session of its own, and a server that is a command has a process for every episode.

Invariants:

- A call is sent once. If the connection breaks before the answer, it is unknown whether the call was executed: the
  attempt is void, and the call is not repeated.
- The server's answers go to the policy, errors included. A missing answer is the environment's failure (`env_died` for
  a command, `env_unreachable` for a URL), and so is an answer that the protocol does not allow (`env_malformed`).

A separate task opens the connection and closes it, because the package's scopes belong to the task that enters them.

Waits: for the server's answers, until they arrive, the connection ends, or the caller cancels; and in `close` for the
end of the connection, for which the package has a time limit.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import shlex
import shutil
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from flowrl.environments.open_episode import EnvironmentFailed
from flowrl.environments.protocol import LEAST_BYTES
from flowrl.environments.tools.tool import OBSERVATION_BYTES, Tool, ToolDescription, ToolError, ToolSource
from flowrl.errors import ConfigError
from flowrl.machine.proxies import proxy_of
from flowrl.tasks.user_code import one_line, program_variables

Found = TypeVar("Found")
LOST = (-32000, -32600)
"""Codes that the package gives a call whose answer cannot arrive: the connection or the session has ended."""
NO_ANSWER = (-32603, "Server returned an error response")
"""The package's code and text for an HTTP error status without an answer in its body."""
NO_MESSAGE = -32700
HANDSHAKE = "legacy"
"""The package's word for versions of the protocol that have sessions."""
CONNECT_S = 30.0
MOST_PAGES = 100
"""Maximum pages of a server's list of tools."""


class McpSession:
    """A session from `open` to `close`, which has to be called. `extra` are headers, or variables of a command."""

    def __init__(self, name: str, words: Sequence[str], *, over_http: bool, extra: Mapping[str, str]) -> None:
        self._name, self._words, self._over_http, self._extra = name, words, over_http, extra
        self._open = asyncio.Event()
        self._over = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._client: Any = None
        self._tools: list[Any] = []

    async def open_connection(self) -> list[Any]:
        """Connect; returns the server's tools as the package has them. Raises EnvironmentFailed."""
        self._holder = asyncio.create_task(self._hold_connection())
        await self._unless_lost(self._open.wait(), "at its start")
        return self._tools

    async def call_remote_tool(self, tool: str, /, **arguments: Any) -> str:
        """The tool's answer. Raises ToolError for an error that the server reports, and EnvironmentFailed."""
        from mcp import MCPError

        try:
            asked = self._client.session.call_tool(tool, arguments)
            result = await self._unless_lost(asked, f"during {tool}")
        except MCPError as problem:
            # An error without a result.
            if problem.code == NO_MESSAGE:
                text = f"{self._name} answered {tool} with no message: {problem}"
                raise EnvironmentFailed("env_malformed", text) from None
            if problem.code in LOST or (problem.code, str(problem)) == NO_ANSWER:
                raise self._lost_connection(f"during {tool}", problem) from None
            raise ToolError(f"{tool}: {problem}") from None
        except (ValidationError, RuntimeError) as problem:
            text = f"{self._name} answered {tool} with what the protocol does not allow: {one_line(problem)}"
            raise EnvironmentFailed("env_malformed", text) from None
        text = result_text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close_connection(self) -> None:
        """End the session, and the process of a command."""
        self._over.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})
            if not self._holder.cancelled():
                self._holder.exception()  # how a session ends does not matter any more

    async def _hold_connection(self) -> None:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        async with AsyncExitStack() as scopes:
            if self._over_http:
                url = self._words[0]
                times = httpx2.Timeout(CONNECT_S, read=None)  # the call's own limit bounds the wait for an answer
                through = httpx2.AsyncHTTPTransport(proxy=proxy_of(url) or None)  # its own choice knows NO_PROXY alone
                http = httpx2.AsyncClient(headers=dict(self._extra), timeout=times, transport=through)
                target: Any = streamable_http_client(url, http_client=await scopes.enter_async_context(http))
            else:
                command, *arguments = self._words
                target = StdioServerParameters(command=command, args=arguments, env=program_variables(self._extra))
            client = await scopes.enter_async_context(Client(target, mode=HANDSHAKE, cache=None))
            page = await client.list_tools()
            self._client, self._tools = client, list(page.tools)
            for _ in range(MOST_PAGES):
                if page.next_cursor is None:
                    break
                page = await client.list_tools(cursor=page.next_cursor)
                self._tools += page.tools
            self._open.set()
            await self._over.wait()

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
            raise self._lost_connection(when, None if self._holder.cancelled() else self._holder.exception())
        return task.result()

    def _lost_connection(self, when: str, problem: BaseException | None) -> EnvironmentFailed:
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        why = f": {one_line(problem)}" if problem is not None else ""
        if self._over_http:
            return EnvironmentFailed("env_unreachable", f"{self._name} was lost {when}{why}")
        return EnvironmentFailed("env_died", f"{self._name} ended {when}{why}")


def result_text(result: Any) -> str:
    """The texts of a result; for a part that is no text, its kind."""
    parts = []
    for part in result.content:
        resource = getattr(part, "resource", part)
        text = getattr(resource, "text", None)
        kind = getattr(resource, "mime_type", None) or part.type
        parts.append(text if isinstance(text, str) else f"[{kind}, which cannot be shown as text]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


SCHEMES = ("http://", "https://")
UNKNOWN = "Whether it had an effect is not known."


@dataclass(frozen=True)
class McpServer(ToolSource):
    """The tools of a server at an address `https://HOST/PATH` (streamable HTTP), or behind a command (stdio).

    Raises ConfigError for an address that is neither, and for fields that this kind of server does not use.
    """

    replays = False

    address: str
    """A URL, or a command line as a shell splits it; it is executed without a shell."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request to a URL, such as a key."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a command, in addition to those of its episode's process."""
    call_s: float = 30.0
    observation_bytes: int = OBSERVATION_BYTES

    def __post_init__(self) -> None:
        if not self.words:
            raise ConfigError("an MCP server has no address; write mcp:https://HOST/PATH, or mcp:COMMAND")
        if self.variables and self.over_http:
            raise ConfigError(f"the MCP server {self.address!r} is no command, so it takes no variables; use headers")
        if self.headers and not self.over_http:
            raise ConfigError(f"the MCP server {self.address!r} is a command, so it takes no headers; use variables")
        if not self.call_s > 0 or self.observation_bytes < LEAST_BYTES:
            raise ConfigError(
                f"call_s and observation_bytes of the MCP server {self.address!r} are {self.call_s} and "
                f"{self.observation_bytes}; they have to be above 0, and at least {LEAST_BYTES}"
            )

    @property
    def over_http(self) -> bool:
        """Whether the address is a URL; else it is a command."""
        return len(self.words) == 1 and self.words[0].startswith(SCHEMES)

    @property
    def words(self) -> list[str]:
        """The command and its arguments, or only the URL."""
        try:
            return shlex.split(self.address)
        except ValueError as problem:
            raise ConfigError(
                f"the command {self.address!r} of an MCP server cannot be split into words: {problem}"
            ) from None

    @property
    def name(self) -> str:
        return f"the MCP server {self.address!r}"

    def check(self) -> None:
        """Import the package once, for all episodes. The trial episode asks the server itself."""
        try:
            importlib.import_module("mcp")
        except ImportError:
            raise ConfigError(f"{self.name} needs the package mcp; pip install mcp") from None
        if not self.over_http and shutil.which(self.words[0]) is None:
            raise ConfigError(f"{self.name}: there is no program {self.words[0]!r}")

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Sequence[Tool]]:
        session = McpSession(self.name, self.words, over_http=self.over_http, extra=self.headers or self.variables)
        tools = []
        try:
            for found in await session.open_connection():
                call = functools.partial(session.call_remote_tool, found.name)
                described = ToolDescription(found.name, found.description or "", found.input_schema, None)
                tools.append(Tool(call, described, self.call_s, self.observation_bytes, when_stopped=UNKNOWN))
            yield tools
        finally:
            await session.close_connection()
