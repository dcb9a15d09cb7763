"""Tools: functions that a policy may call while it plays an episode."""

from flowrl.environments.tools.collection import Tool, ToolError, ToolResult, Tools
from flowrl.environments.tools.named_tools import named_tools

__all__ = ["Tool", "ToolError", "ToolResult", "Tools", "named_tools"]
