"""Tools: functions that a policy may call while it plays an episode."""

from flowrl.environments.tools.collection import Tools
from flowrl.environments.tools.mcp_server import McpServer
from flowrl.environments.tools.named_tools import named_tools
from flowrl.environments.tools.sandbox import PythonTool
from flowrl.environments.tools.tool import Tool, ToolError, ToolResult, ToolSource

__all__ = ["McpServer", "PythonTool", "Tool", "ToolError", "ToolResult", "ToolSource", "Tools", "named_tools"]
