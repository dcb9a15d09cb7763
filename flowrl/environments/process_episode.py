"""An episode whose environment has a process of its own, a child of the zygote."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flowrl.environments import exchange
from flowrl.environments.environment_row import EnvironmentRow
from flowrl.environments.failure import CAUSES, EnvironmentFailed
from flowrl.environments.open_episode import OpenEpisode, time_limit
from flowrl.environments.output import Output, with_tail
from flowrl.environments.protocol import Action, MalformedValue, Step
from flowrl.environments.zygote import KILLED_WITHIN_S, Exit, ZygoteClient
from flowrl.errors import ConfigError
from flowrl.tasks import child

MOST_BYTES = 1 << 28
"""A longer answer of a process is garbage."""


class ProcessEpisode(OpenEpisode):
    """Forked when the object is made."""

    def __init__(self, name: str, zygote: ZygoteClient, *, step_s: float) -> None:
        super().__init__(name, step_s=step_s)
        self._zygote = zygote
        self._output = Output()
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.birth = zygote.fork(theirs, self._output.target)
        self._output.handed_over()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._killed = False

    async def try_making(self, *, limit_s: float) -> tuple[int, bool, bool]:
        """Make an environment and close it: its `seats`, `replays`, and whether it can save its state.

        Raises ConfigError if it cannot be made.
        """
        answer = await self._ask({"call": "try"}, limit_s, "making it")
        return int(answer["seats"]), bool(answer["replays"]), bool(answer["saves"])

    async def begin(self, row: EnvironmentRow, state: bytes | None, *, limit_s: float) -> None:
        if state is not None:
            await self._ask({"call": "restore", "state": state, "seed": row.seed}, limit_s, "restore")
            return
        answer = await self._ask({"call": "reset", "task": row.task, "seed": row.seed}, limit_s, "reset")
        with self._refusing():
            self.observations = exchange.observations(answer)

    async def save(self) -> bytes | None:
        state = await self._ask({"call": "save"}, self._step_s, "save")
        with self._refusing():
            return exchange.state(state)

    async def _step(self, action: Action, seat: int) -> Step:
        request = {"call": "step", "action": exchange.plain(action), "seat": seat}
        answer = await self._ask(request, self._step_s, "step")
        with self._refusing():
            return exchange.step(answer)

    async def _close(self) -> None:
        try:
            if not self._killed:
                await self._ask({"call": "close"}, self._step_s, "close")
        finally:
            self._kill()
            await self._gone()

    async def _gone(self) -> None:
        """Wait until nothing of a killed process is left."""
        try:
            ended = await asyncio.shield(self.birth.exited)
            if ended.status is None and self._streams is not None:
                # The zygote, which would have waited for it, has died first. Its end of the connection tells.
                with suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(self._streams[0].read(), KILLED_WITHIN_S)
        finally:
            self._output.close()
            if self._streams is not None:
                self._streams[1].close()
            self._connection.close()

    def _kill(self) -> None:
        self._killed = True
        self._zygote.kill(self.birth)

    async def _ask(self, request: dict[str, Any], limit_s: float, doing: str) -> Any:
        try:
            async with time_limit(limit_s, f"{self._name}: {doing}"):
                return self._checked(await self._exchange(request))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._died(doing) from None
        except child.Garbage as problem:
            raise self._malformed(str(problem)) from None
        except EnvironmentFailed as failed:
            if failed.cause == "env_timed_out":
                self._kill()
            raise EnvironmentFailed(failed.cause, with_tail(str(failed), self._output.tail())) from None
        except BaseException:  # a cancelled call may still run: only the process's end ends it
            self._kill()
            raise

    async def _exchange(self, request: dict[str, Any]) -> Any:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._connection)
        reader, writer = self._streams
        writer.write(child.packed(request))
        await writer.drain()
        return await child.receive(reader, most_bytes=MOST_BYTES)

    def _checked(self, reply: Any) -> Any:
        fields = reply if isinstance(reply, dict) else {}
        if "answer" in fields:
            return fields["answer"]
        if "refused" in fields:
            raise ConfigError(str(fields["refused"]))
        if fields.get("cause") in CAUSES:
            raise EnvironmentFailed(fields["cause"], f"{self._name}: {fields.get('text')}")
        raise child.Garbage("the process answered with neither a result nor a cause")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except MalformedValue as problem:
            raise self._malformed(str(problem)) from None

    def _malformed(self, text: str) -> EnvironmentFailed:
        self._kill()
        return EnvironmentFailed("env_malformed", with_tail(f"{self._name}: {text}", self._output.tail()))

    async def _died(self, doing: str) -> EnvironmentFailed:
        """A process that only closed its connection is given a moment to end by itself, then killed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.birth.exited), 1.0)
        self._kill()
        ended = await asyncio.shield(self.birth.exited)
        text = f"{self._name}: its process ended during {doing} ({_status(ended)})"
        return EnvironmentFailed("env_died", with_tail(text, self._output.tail()), event=ended.event)


def _status(ended: Exit) -> str:
    if ended.status is None:
        return ended.text
    if ended.status >= 0:
        return f"status {ended.status}"
    return f"signal {signal.Signals(-ended.status).name}"
