"""Plays episodes of one environment: in processes, or in this event loop if the environment is cooperative.

A process plays one episode, or up to `episodes_per_process` one after the other. It plays no further episode if it has
failed, or if the episode has left tasks, threads, processes or much memory. After MOST_LEFT episodes in a row that have
left something, every process plays only one.

At most `processes` are alive at a time; `reset` waits until one is gone or free. Only another episode's `close` ends
that wait, which is not part of `reset_s`. A zygote that has died is started again at the next `reset`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from flowrl.environments.environment_class import FoundEnvironment, find_environment
from flowrl.environments.environment_row import COOPERATIVE, EnvironmentName, EnvironmentRow
from flowrl.environments.episode_processes.episode_process import EpisodeProcess, ProcessEpisode
from flowrl.environments.episode_processes.zygote import ZygoteClient, with_tail
from flowrl.environments.open_episode import LoopEpisode, OpenEpisode, ZygoteFailed
from flowrl.environments.protocol import can_save
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import keep_problems, missing_variables

MOST_LEFT = 8
"""Episodes in a row that have left something, after which every process plays only one."""


class Episodes:
    """`async with Episodes(name) as pool: episode = await pool.reset(row)`. Only one event loop may use it.

    Entering raises ConfigError for a mistake of the user in the name. Leaving ends all episodes. `progress` is called
    with sentences for the user.
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
        episodes_per_process: int = 1,
        keep_variables: Sequence[str] = (),
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        counts = {"processes": processes, "memory_bytes": memory_bytes, "episodes_per_process": episodes_per_process}
        for what, value in counts.items():
            if value < 1:
                raise ConfigError(f"{what} is {value}; it has to be at least 1")
        for what, limit_s in (("reset_s", reset_s), ("step_s", step_s)):
            if not limit_s > 0:
                raise ConfigError(f"{what} is {limit_s}; it has to be above 0")
        for problem in keep_problems(keep_variables):
            raise ConfigError(problem)
        self._keep_variables = tuple(keep_variables)
        self._name = EnvironmentName(name)
        self._memory_bytes, self._reset_s, self._step_s = memory_bytes, reset_s, step_s
        self._episodes_per_process, self._progress = episodes_per_process, progress
        self._left_in_a_row = 0
        """Episodes that left something, since the last one that did not."""
        self._free = asyncio.Semaphore(processes)
        """Number of processes that may be alive and do not play, including those of `_waiting`."""
        self._waiting: list[EpisodeProcess] = []
        """Processes that have played and may play again."""
        self._restarts_left = zygote_restarts
        self._starting = asyncio.Lock()
        self._zygote: ZygoteClient | None = None
        self._in_loop: FoundEnvironment | None = None
        self._open: set[OpenEpisode] = set()
        self.seats, self.replays, self.saves = 1, True, False
        """As the environment declares them; known once the pool is entered."""

    @property
    def zygote_pid(self) -> int | None:
        """Pid of the process that starts the processes of episodes; None if the environment is cooperative."""
        return None if self._zygote is None else self._zygote.pid

    async def __aenter__(self) -> Episodes:
        # An adapter that is not cooperative imports its package, and only the zygote may do that.
        known = not self._name.adapter or self._name.adapter in COOPERATIVE
        found = find_environment(self._name.text) if known else None
        if found is not None and found.kind.cooperative:
            for option, given in (
                ("episodes_per_process", self._episodes_per_process > 1),
                ("keep_variables", bool(self._keep_variables)),
            ):
                if given:
                    raise ConfigError(
                        f"environment {self._name.text!r} is cooperative and has no processes, so {option} has no "
                        "effect; leave it out"
                    )
            self._in_loop, self.seats, self.replays = found, found.kind.seats, found.kind.replays
            self.saves = can_save(found.kind)
            await found.make_environment().close()
            return self
        if missing := missing_variables(self._keep_variables):
            self._progress(f"keep_variables names {', '.join(missing)}, of which nothing is set on this machine")
        try:
            episode = await self._open_episode(episodes=1)
            try:
                self.seats, self.replays, self.saves = await episode.try_making(limit_s=self._reset_s)
            finally:
                await episode.close_quietly()
        except BaseException:  # a cancelled or failed trial also ends its processes
            await self._end_zygote()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_zygote()

    async def reset(self, row: EnvironmentRow) -> OpenEpisode:
        """A new episode at the row's start, with its first observations.

        Raises EnvironmentFailed, and ZygoteFailed when no process can be started any more.
        """
        return await self._begin_episode(row, None)

    async def restore(self, row: EnvironmentRow, state: bytes) -> OpenEpisode:
        """A new episode that continues from a state that `OpenEpisode.save_state` returned. Raises as `reset` does."""
        return await self._begin_episode(row, state)

    async def _begin_episode(self, row: EnvironmentRow, state: bytes | None) -> OpenEpisode:
        found = self._in_loop
        episode = (
            await self._open_episode(self._episodes_per_process)
            if found is None
            else LoopEpisode(found, step_s=self._step_s)
        )
        self._open.add(episode)
        episode.on_close = self._open.discard
        try:
            await episode.begin_episode(row, state, limit_s=self._reset_s)
        except BaseException:  # a cancelled or failed reset also closes the environment
            await episode.close_quietly()
            raise
        return episode

    async def _open_episode(self, episodes: int) -> ProcessEpisode:
        """An episode in a process that plays up to `episodes`."""
        await self._free.acquire()
        try:
            # The process that played last, unless those that wait have ended because their zygote is dead.
            if self._waiting and not self._waiting[-1].exited.done():
                process = self._waiting.pop()
            else:
                process = EpisodeProcess(self._name.text, await self._living_zygote())
                process.exited.add_done_callback(lambda exited: self._process_exited(process))
        except BaseException:  # a cancelled or failed start also gives its place back
            self._free.release()
            raise
        again = process.num_begun + 1 < episodes
        keep = self._keep_process if again else None
        return ProcessEpisode(self._name.text, process, step_s=self._step_s, keep=keep, left=self._episode_left)

    def _keep_process(self, process: EpisodeProcess) -> None:
        """Keep a process whose episode is over and that may play another one."""
        self._left_in_a_row = 0
        if process.exited.done():  # it has ended at the same moment
            process.dispose_process()
        else:
            self._waiting.append(process)
            self._free.release()

    def _episode_left(self) -> None:
        """Count an episode that has left something behind, so that its process has ended."""
        self._left_in_a_row += 1
        if self._left_in_a_row >= MOST_LEFT and self._episodes_per_process > 1:
            self._episodes_per_process = 1
            self._progress(
                f"{MOST_LEFT} episodes of {self._name.text} in a row left a task, a thread, a process or much memory, "
                "after which a process plays no other episode; from now on each plays one, and episodes_per_process "
                "has no effect"
            )

    def _process_exited(self, process: EpisodeProcess) -> None:
        if process in self._waiting:
            self._waiting.remove(process)
            process.dispose_process()
        else:
            self._free.release()

    async def _living_zygote(self) -> ZygoteClient:
        """The zygote, a new one if it has died."""
        async with self._starting:
            if self._zygote is not None and not self._zygote.dead:
                return self._zygote
            if self._zygote is not None:
                await self._zygote.stop_zygote()
                if self._restarts_left == 0:
                    text = f"environment {self._name.text!r}: the process that starts its episodes has died again"
                    raise ZygoteFailed(with_tail(f"{text}, and no restart is left", self._zygote.output.tail()))
                self._restarts_left -= 1
            zygote = ZygoteClient(
                self._name.text,
                memory_bytes=self._memory_bytes,
                start_s=self._reset_s,
                keep_variables=self._keep_variables,
            )
            await zygote.start_zygote()
            self._zygote = zygote
            return zygote

    async def _end_zygote(self) -> None:
        try:
            await asyncio.gather(*(episode.close_quietly() for episode in list(self._open)))
            for process in self._waiting:
                process.kill_process()
            await asyncio.gather(*(process.wait_gone() for process in list(self._waiting)))
        finally:
            if self._zygote is not None:
                await self._zygote.stop_zygote()
