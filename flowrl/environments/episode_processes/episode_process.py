"""The caller's side of a process that plays episodes one after the other. The process is a child of the zygote.

Waits: `ask` for an answer, until its limit, the end of the process, or cancellation, each of which ends the process;
`gone` for the zygote's report.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flowrl.environments.environment_row import EnvironmentRow
from flowrl.environments.episode_processes.zygote import KILLED_WITHIN_S, Exit, Output, ZygoteClient, with_tail
from flowrl.environments.open_episode import CAUSES, EnvironmentFailed, OpenEpisode, limit_time
from flowrl.environments.protocol import (
    Action,
    MalformedValue,
    Step,
    as_plain,
    read_observations,
    read_state,
    read_step,
)
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import Garbage, pack_message, receive_message

MOST_BYTES = 1 << 28
"""A longer answer of a process is garbage."""


class EpisodeProcess:
    """Forked when the object is made. One call at a time."""

    def __init__(self, name: str, zygote: ZygoteClient) -> None:
        self._name, self._zygote = name, zygote
        self._output = Output()
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._birth = zygote.fork_process(theirs, self._output.target)
        self._output.handed_over()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.num_begun = 0
        """Number of episodes so far, including the current one."""
        self.killed = False

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Done when the process, its group and what it left behind are gone."""
        return self._birth.exited

    def begin_episode(self) -> None:
        """One more episode begins; what earlier ones printed is forgotten."""
        self.num_begun += 1
        if self.num_begun > 1:
            self._output.forget_output()

    async def ask_process(
        self, request: dict[str, Any], limit_s: float, doing: str, read: Callable[[Any], Any] = lambda answer: answer
    ) -> Any:
        """What `read` makes of the answer to a request. Raises EnvironmentFailed, and ConfigError for a mistake of the
        user."""
        try:
            async with limit_time(limit_s, f"{self._name}: {doing}"):
                if self._streams is None:
                    self._streams = await asyncio.open_connection(sock=self._connection)
                reader, writer = self._streams
                writer.write(pack_message(request))
                await writer.drain()
                reply = await receive_message(reader, most_bytes=MOST_BYTES)
            fields = reply if isinstance(reply, dict) else {}
            if "answer" in fields:
                return read(fields["answer"])
            if "refused" in fields:
                raise ConfigError(str(fields["refused"]))
            if fields.get("cause") in CAUSES:
                raise EnvironmentFailed(fields["cause"], f"{self._name}: {fields.get('text')}")
            raise Garbage("the process answered with neither a result nor a cause")
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._failure_of_end(doing) from None
        except (Garbage, MalformedValue) as problem:
            self.kill_process()
            raise EnvironmentFailed(
                "env_malformed", with_tail(f"{self._name}: {problem}", self._output.tail())
            ) from None
        except EnvironmentFailed as failed:
            if failed.cause == "env_timed_out":
                self.kill_process()
            raise EnvironmentFailed(failed.cause, with_tail(str(failed), self._output.tail())) from None
        except BaseException:  # a cancelled call may still run: only the process's end ends it
            self.kill_process()
            raise

    def kill_process(self) -> None:
        self.killed = True
        self._zygote.kill_episode(self._birth)

    async def wait_gone(self) -> None:
        """Wait until nothing of a killed process is left."""
        try:
            ended = await asyncio.shield(self.exited)
            if ended.status is None and self._streams is not None:
                # The zygote, which would have waited for the process, has died first. The end of the connection shows
                # the end of the process.
                with suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(self._streams[0].read(), KILLED_WITHIN_S)
        finally:
            self.dispose_process()

    def dispose_process(self) -> None:
        """Close this side's descriptors."""
        self._output.close_output()
        if self._streams is not None:
            self._streams[1].close()
        self._connection.close()

    async def _failure_of_end(self, doing: str) -> EnvironmentFailed:
        """A process that has only closed its connection gets a moment to end by itself, and is then killed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.exited), 1.0)
        self.kill_process()
        ended = await asyncio.shield(self.exited)
        how = ended.text
        if ended.status is not None:
            killed_by = signal.Signals(-ended.status).name if ended.status < 0 else ""
            how = f"signal {killed_by}" if killed_by else f"status {ended.status}"
        text = f"{self._name}: its process ended during {doing} ({how})"
        return EnvironmentFailed("env_died", with_tail(text, self._output.tail()), event=ended.event)


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
        process.begin_episode()

    async def try_making(self, *, limit_s: float) -> tuple[int, bool, bool]:
        """Make an environment and close it: its `seats`, `replays`, and whether it can save its state.

        Raises ConfigError if it cannot be made.
        """
        answer = await self._process.ask_process({"call": "try"}, limit_s, "making it")
        return int(answer["seats"]), bool(answer["replays"]), bool(answer["saves"])

    async def begin_episode(self, row: EnvironmentRow, state: bytes | None, *, limit_s: float) -> None:
        if state is not None:
            await self._process.ask_process({"call": "restore", "state": state, "seed": row.seed}, limit_s, "restore")
            return
        request = {"call": "reset", "task": row.task, "seed": row.seed}
        self.observations = await self._process.ask_process(request, limit_s, "reset", read_observations)

    async def save_state(self) -> bytes | None:
        state: bytes | None = await self._process.ask_process({"call": "save"}, self._step_s, "save", read_state)
        return state

    async def _call_step(self, action: Action, seat: int) -> Step:
        request = {"call": "step", "action": as_plain(action), "seat": seat}
        step: Step = await self._process.ask_process(request, self._step_s, "step", read_step)
        return step

    async def _call_close(self) -> None:
        again = None
        try:
            if not self._process.killed:
                request = {"call": "close", "again": self._keep is not None}
                again = await self._process.ask_process(request, self._step_s, "close")
        finally:
            if again is True and self._keep is not None:
                self._keep(self._process)
            else:
                self._process.kill_process()
                await self._process.wait_gone()
        if again is False:
            self._left()
