"""The tool `python`: an isolated interpreter for the policy."""

from flowrl.environments.tools.sandbox.python_tool import PythonTool

__all__ = ["PythonTool"]
