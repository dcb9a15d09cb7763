"""A server that speaks the Model Context Protocol: how it is named, and its tools in an episode.

Every episode has a session of its own, and a server that is a command has a process for every episode.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from flowrl.environments.middle import LEAST_BYTES
from flowrl.environments.tools.mcp_tools.mcp_session import McpSession
from flowrl.environments.tools.tool import OBSERVATION_BYTES, Tool
from flowrl.environments.tools.tool_description import ToolDescription
from flowrl.environments.tools.tool_source import ToolSource
from flowrl.errors import ConfigError

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
        try:
            yield [self._tool(session, found) for found in await session.open()]
        finally:
            await session.close()

    def _tool(self, session: McpSession, found: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return await session.call(found.name, arguments)

        described = ToolDescription(found.name, found.description or "", found.input_schema, None)
        return Tool(call, described, self.call_s, self.observation_bytes, when_stopped=UNKNOWN)
