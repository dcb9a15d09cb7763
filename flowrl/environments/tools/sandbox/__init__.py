"""The tool `python`: an interpreter of the policy's own, shut in."""

from flowrl.environments.tools.sandbox.python_tool import PythonTool

__all__ = ["PythonTool"]
