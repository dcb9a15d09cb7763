"""The caller's side of a process that plays episodes one after the other. The process is a child of the zygote.

Waits: `ask` for an answer, until its limit, the end of the process, or cancellation, each of which ends the process;
`gone` for the zygote's report.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flowrl.environments.episode_processes.output import Output, with_tail
from flowrl.environments.episode_processes.zygote import KILLED_WITHIN_S, Exit, ZygoteClient
from flowrl.environments.failure import CAUSES, EnvironmentFailed
from flowrl.environments.open_episode import TimeLimit
from flowrl.environments.protocol import MalformedValue
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
            self._birth = zygote.fork(theirs, self._output.target)
        self._output.handed_over()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.num_begun = 0
        """Number of episodes so far, including the current one."""
        self.killed = False

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Done when the process, its group and what it left behind are gone."""
        return self._birth.exited

    def begin(self) -> None:
        """One more episode begins; what earlier ones printed is forgotten."""
        self.num_begun += 1
        if self.num_begun > 1:
            self._output.forget()

    async def ask(self, request: dict[str, Any], limit_s: float, doing: str) -> Any:
        """The answer to a request. Raises EnvironmentFailed, and ConfigError for a mistake of the user."""
        try:
            async with TimeLimit(limit_s, f"{self._name}: {doing}"):
                return self._checked(await self._exchange(request))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._died(doing) from None
        except Garbage as problem:
            raise self._malformed(str(problem)) from None
        except EnvironmentFailed as failed:
            if failed.cause == "env_timed_out":
                self.kill()
            raise EnvironmentFailed(failed.cause, with_tail(str(failed), self._output.tail())) from None
        except BaseException:  # a cancelled call may still run: only the process's end ends it
            self.kill()
            raise

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Kills the process and raises EnvironmentFailed if its answer has a malformed value."""
        try:
            yield
        except MalformedValue as problem:
            raise self._malformed(str(problem)) from None

    def kill(self) -> None:
        self.killed = True
        self._zygote.kill(self._birth)

    async def gone(self) -> None:
        """Wait until nothing of a killed process is left."""
        try:
            ended = await asyncio.shield(self.exited)
            if ended.status is None and self._streams is not None:
                # The zygote, which would have waited for the process, has died first. The end of the connection shows
                # the end of the process.
                with suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(self._streams[0].read(), KILLED_WITHIN_S)
        finally:
            self.dispose()

    def dispose(self) -> None:
        """Close this side's descriptors."""
        self._output.close()
        if self._streams is not None:
            self._streams[1].close()
        self._connection.close()

    async def _exchange(self, request: dict[str, Any]) -> Any:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._connection)
        reader, writer = self._streams
        writer.write(pack_message(request))
        await writer.drain()
        return await receive_message(reader, most_bytes=MOST_BYTES)

    def _checked(self, reply: Any) -> Any:
        fields = reply if isinstance(reply, dict) else {}
        if "answer" in fields:
            return fields["answer"]
        if "refused" in fields:
            raise ConfigError(str(fields["refused"]))
        if fields.get("cause") in CAUSES:
            raise EnvironmentFailed(fields["cause"], f"{self._name}: {fields.get('text')}")
        raise Garbage("the process answered with neither a result nor a cause")

    def _malformed(self, text: str) -> EnvironmentFailed:
        self.kill()
        return EnvironmentFailed("env_malformed", with_tail(f"{self._name}: {text}", self._output.tail()))

    async def _died(self, doing: str) -> EnvironmentFailed:
        """A process that has only closed its connection gets a moment to end by itself, and is then killed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.exited), 1.0)
        self.kill()
        ended = await asyncio.shield(self.exited)
        text = f"{self._name}: its process ended during {doing} ({_status(ended)})"
        return EnvironmentFailed("env_died", with_tail(text, self._output.tail()), event=ended.event)


def _status(ended: Exit) -> str:
    if ended.status is None:
        return ended.text
    if ended.status >= 0:
        return f"status {ended.status}"
    return f"signal {signal.Signals(-ended.status).name}"
