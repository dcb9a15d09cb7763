"""Tools of MCP servers."""

from flowrl.environments.tools.mcp_tools.mcp_server import McpServer

__all__ = ["McpServer"]
