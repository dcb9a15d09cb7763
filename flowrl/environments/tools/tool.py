"""One tool: a function that a policy may call, and the result of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowrl.environments.tools.tool_description import ToolDescription

CALL_S = 10.0
OBSERVATION_BYTES = 65536


class ToolError(Exception):
    """Raised by a tool to answer with only this text, for example to a question that has no answer."""


@dataclass(frozen=True)
class ToolResult:
    """What the policy is shown about its call."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Tool:
    """One function with its limits."""

    function: Callable[..., Any]
    description: ToolDescription
    call_s: float
    observation_bytes: int
    when_stopped: str = ""
    """A sentence for the policy after a call whose time was over."""

    @property
    def name(self) -> str:
        return self.description.name
