"""Plays episodes of one environment: a process each, or in this event loop if the environment is cooperative.

At most `processes` are alive at a time; `reset` waits for one to be gone. That wait is ended by another episode's
`close` alone, and is not part of `reset_s`. A zygote that has died is started again at the next `reset`.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from flowrl.environments.environment_row import COOPERATIVE, EnvironmentName, EnvironmentRow
from flowrl.environments.failure import ZygoteFailed
from flowrl.environments.find import FoundEnvironment, find_environment
from flowrl.environments.open_episode import LoopEpisode, OpenEpisode
from flowrl.environments.output import with_tail
from flowrl.environments.process_episode import ProcessEpisode
from flowrl.environments.protocol import can_save
from flowrl.environments.zygote import ZygoteClient
from flowrl.errors import ConfigError


class Episodes:
    """`async with Episodes(name) as pool: episode = await pool.reset(row)`. Only one event loop may use it.

    Entering raises ConfigError for a name that is a user's mistake. Leaving ends all episodes.
    """

    def __init__(
        self,
        name: str,
        *,
        processes: int = 256,
        memory_bytes: int = 1 << 30,
        reset_s: float = 120.0,
        step_s: float = 60.0,
        zygote_restarts: int = 8,
    ) -> None:
        for what, value in (("processes", processes), ("memory_bytes", memory_bytes)):
            if value < 1:
                raise ConfigError(f"{what} is {value}; it has to be at least 1")
        for what, limit_s in (("reset_s", reset_s), ("step_s", step_s)):
            if not limit_s > 0:
                raise ConfigError(f"{what} is {limit_s}; it has to be above 0")
        self._name = EnvironmentName(name)
        self._memory_bytes, self._reset_s, self._step_s = memory_bytes, reset_s, step_s
        self._free = asyncio.Semaphore(processes)
        self._restarts_left = zygote_restarts
        self._starting = asyncio.Lock()
        self._zygote: ZygoteClient | None = None
        self._in_loop: FoundEnvironment | None = None
        self._open: set[OpenEpisode] = set()
        self.seats, self.replays, self.saves = 1, True, False
        """As the environment says; known once the pool is entered."""

    @property
    def zygote_pid(self) -> int | None:
        """The process that starts those of the episodes; None if the environment is cooperative."""
        return None if self._zygote is None else self._zygote.pid

    async def __aenter__(self) -> Episodes:
        # An adapter that is not cooperative imports its package, and only the zygote may do that.
        known = not self._name.adapter or self._name.adapter in COOPERATIVE
        found = find_environment(self._name.text) if known else None
        if found is not None and found.kind.cooperative:
            self._in_loop, self.seats, self.replays = found, found.kind.seats, found.kind.replays
            self.saves = can_save(found.kind)
            await found.made().close()
            return self
        try:
            await self._try_making()
        except BaseException:  # a cancelled or failed trial ends its processes too
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def reset(self, row: EnvironmentRow) -> OpenEpisode:
        """A new episode at the row's start, with its first observations.

        Raises EnvironmentFailed, and ZygoteFailed when no process can be started any more.
        """
        return await self._begun(row, None)

    async def restore(self, row: EnvironmentRow, state: bytes) -> OpenEpisode:
        """A new episode that continues from what `OpenEpisode.save` gave. Raises as `reset` does."""
        return await self._begun(row, state)

    async def _try_making(self) -> None:
        episode = await self._opened()
        try:
            self.seats, self.replays, self.saves = await episode.try_making(limit_s=self._reset_s)
        finally:
            await episode.close_quietly()

    async def _begun(self, row: EnvironmentRow, state: bytes | None) -> OpenEpisode:
        found = self._in_loop
        episode = await self._opened() if found is None else LoopEpisode(found, step_s=self._step_s)
        self._open.add(episode)
        episode.on_close = self._open.discard
        try:
            await episode.begin(row, state, limit_s=self._reset_s)
        except BaseException:  # a cancelled or failed reset closes the environment too
            await episode.close_quietly()
            raise
        return episode

    async def _opened(self) -> ProcessEpisode:
        await self._free.acquire()
        try:
            episode = ProcessEpisode(self._name.text, await self._living(), step_s=self._step_s)
        except BaseException:  # a cancelled or failed start gives its place back too
            self._free.release()
            raise
        episode.birth.exited.add_done_callback(lambda exited: self._free.release())
        return episode

    async def _living(self) -> ZygoteClient:
        """The zygote, a new one if it has died."""
        async with self._starting:
            if self._zygote is not None and not self._zygote.dead:
                return self._zygote
            if self._zygote is not None:
                await self._zygote.stop()
                self._use_restart(self._zygote)
            zygote = ZygoteClient(self._name.text, memory_bytes=self._memory_bytes, start_s=self._reset_s)
            await zygote.start()
            self._zygote = zygote
            return zygote

    def _use_restart(self, died: ZygoteClient) -> None:
        if self._restarts_left == 0:
            text = f"environment {self._name.text!r}: the process that starts its episodes has died again"
            raise ZygoteFailed(with_tail(f"{text}, and no restart is left", died.output.tail()))
        self._restarts_left -= 1

    async def _end(self) -> None:
        try:
            await asyncio.gather(*(episode.close_quietly() for episode in list(self._open)))
        finally:
            if self._zygote is not None:
                await self._zygote.stop()
