"""Tools that an episode has for itself: they are opened when it begins, and closed at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

from flowrl.environments.tools.tool import Tool


class ToolSource(ABC):
    """Opens tools for one episode, such as an interpreter of its own or a session with a server."""

    replays: ClassVar[bool] = True
    """The same calls in a new session give the same answers, and may be made again."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in texts for the user."""

    @abstractmethod
    def check(self) -> None:
        """Called once before any episode, outside of an event loop. Raises ConfigError if no session can be opened."""

    @abstractmethod
    def session(self, seed: int) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """The tools of one episode, whose row has this seed.

        Entering, and calling a tool, raise EnvironmentFailed for failures that the policy has not caused; a ToolError
        is an answer to the policy.
        """
