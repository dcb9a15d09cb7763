"""An episode that is being played, and the kind whose environment runs in this process.

Waits: every call has a limit in seconds. When it passes, or the call is cancelled, the environment's coroutine is
cancelled, or its process killed with its group.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

from flowrl.environments.environment_row import EnvironmentRow
from flowrl.environments.failure import EnvironmentFailed
from flowrl.environments.find import FoundEnvironment
from flowrl.environments.player import Player
from flowrl.environments.protocol import Action, Observation, Step


class TimeLimit:
    """Raises EnvironmentFailed(env_timed_out) when the time is over."""

    def __init__(self, seconds: float, doing: str) -> None:
        self._seconds, self._doing = seconds, doing
        self._limit = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, frames)
        except TimeoutError:
            raise self._over() from None
        if isinstance(error, TimeoutError) and self._limit.expired():
            raise self._over() from None

    def _over(self) -> EnvironmentFailed:
        return EnvironmentFailed("env_timed_out", f"{self._doing} took more than {self._seconds:g} s")


class OpenEpisode(ABC):
    """One episode, from its first observation to `close`, which has to be called. One call at a time.

    All methods raise EnvironmentFailed; after that only `close` may be called. A cancelled call also ends the episode.
    """

    observations: tuple[Observation, ...] = ()
    """What each seat sees first; none after `restore`."""

    def __init__(self, name: str, *, step_s: float) -> None:
        self._name, self._step_s = name, step_s
        self._over = self._closed = False
        self.on_close: Callable[[OpenEpisode], None] = lambda episode: None

    @property
    def observation(self) -> Observation:
        """What the only seat sees first."""
        (only,) = self.observations
        return only

    async def step(self, action: Action, seat: int = 0) -> Step:
        """Play one action."""
        assert not self._over, f"an episode of {self._name} is over, and was asked for one more step"
        self._over = True
        step = await self._step(action, seat)
        self._over = step.over
        return step

    async def close(self) -> None:
        """Close the environment and end its process. When it returns or raises, nothing of the episode is left."""
        if not self._closed:
            self._closed = self._over = True
            try:
                await self._close()
            finally:
                self.on_close(self)

    async def close_quietly(self) -> None:
        """`close` for an episode that has failed or is given up, so that errors of closing it do not matter."""
        try:
            await self.close()
        except EnvironmentFailed:
            return

    @abstractmethod
    async def begin(self, row: EnvironmentRow, state: bytes | None, *, limit_s: float) -> None:
        """Reset, or restore a saved state."""

    @abstractmethod
    async def save(self) -> bytes | None:
        """The environment's state for `Episodes.restore`; None if it has none."""

    @abstractmethod
    async def _step(self, action: Action, seat: int) -> Step: ...

    @abstractmethod
    async def _close(self) -> None: ...


class LoopEpisode(OpenEpisode):
    """An episode whose environment is cooperative and runs in this event loop."""

    def __init__(self, found: FoundEnvironment, *, step_s: float) -> None:
        super().__init__(found.text, step_s=step_s)
        self._found = found
        self._player: Player | None = None

    async def begin(self, row: EnvironmentRow, state: bytes | None, *, limit_s: float) -> None:
        self._player = Player(self._name, self._found.make)
        async with TimeLimit(limit_s, f"{self._name}: reset"):
            if state is None:
                self.observations = await self._player.reset(row.task, row.seed)
            else:
                await self._player.restore(state)

    async def save(self) -> bytes | None:
        assert self._player is not None
        return self._player.save()

    async def _step(self, action: Action, seat: int) -> Step:
        assert self._player is not None
        async with TimeLimit(self._step_s, f"{self._name}: step"):
            return await self._player.step(action, seat)

    async def _close(self) -> None:
        if self._player is not None:
            async with TimeLimit(self._step_s, f"{self._name}: close"):
                await self._player.close()
