"""An episode whose environment is in a separate process."""

from __future__ import annotations

from collections.abc import Callable

from flowrl.environments.environment_row import EnvironmentRow
from flowrl.environments.episode_processes import exchange
from flowrl.environments.episode_processes.episode_process import EpisodeProcess
from flowrl.environments.open_episode import OpenEpisode
from flowrl.environments.protocol import Action, Step


class ProcessEpisode(OpenEpisode):
    """An episode that `process` plays. `keep` gets the process afterwards if it can play another one; None: the process
    ends with this episode.

    `left` is called if the process cannot play another episode because of what this one has left.
    """

    def __init__(
        self,
        name: str,
        process: EpisodeProcess,
        *,
        step_s: float,
        keep: Callable[[EpisodeProcess], None] | None,
        left: Callable[[], None],
    ) -> None:
        super().__init__(name, step_s=step_s)
        self._process, self._keep, self._left = process, keep, left
        process.begin()

    async def try_making(self, *, limit_s: float) -> tuple[int, bool, bool]:
        """Make an environment and close it: its `seats`, `replays`, and whether it can save its state.

        Raises ConfigError if it cannot be made.
        """
        answer = await self._process.ask({"call": "try"}, limit_s, "making it")
        return int(answer["seats"]), bool(answer["replays"]), bool(answer["saves"])

    async def begin(self, row: EnvironmentRow, state: bytes | None, *, limit_s: float) -> None:
        if state is not None:
            await self._process.ask({"call": "restore", "state": state, "seed": row.seed}, limit_s, "restore")
            return
        answer = await self._process.ask({"call": "reset", "task": row.task, "seed": row.seed}, limit_s, "reset")
        with self._process.refusing():
            self.observations = exchange.observations(answer)

    async def save(self) -> bytes | None:
        state = await self._process.ask({"call": "save"}, self._step_s, "save")
        with self._process.refusing():
            return exchange.state(state)

    async def _step(self, action: Action, seat: int) -> Step:
        request = {"call": "step", "action": exchange.plain(action), "seat": seat}
        answer = await self._process.ask(request, self._step_s, "step")
        with self._process.refusing():
            return exchange.step(answer)

    async def _close(self) -> None:
        again = None
        try:
            if not self._process.killed:
                request = {"call": "close", "again": self._keep is not None}
                again = await self._process.ask(request, self._step_s, "close")
        finally:
            if again is True and self._keep is not None:
                self._keep(self._process)
            else:
                self._process.kill()
                await self._process.gone()
        if again is False:
            self._left()
