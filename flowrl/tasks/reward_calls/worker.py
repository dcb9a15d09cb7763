"""Runs reward functions in a process of their own, which is ended, with all that it started, when a call is too long.

One call is one length-prefixed msgpack message each way, over a socket that only the child has: programs that the
function starts get an empty standard input, and all output goes to standard error. A keeper (`flowrl.orphans`) is the
child's parent. When it has ended, nothing of the child is left, and then this end of the socket is shut: nothing that
could still hold the other end prolongs a wait.

Waits: a call for its answer, the timeout, or the child's death; loading likewise, with the limit LOADED_WITHIN_S; `end`
for the keeper's end, at most ENDED_WITHIN_S. A call of an `async` function that is over its time is cancelled, and its
child ended if the call does not end within CANCELLED_WITHIN_S, because something blocks the child's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flowrl.errors import ConfigError
from flowrl.orphans import start_kept
from flowrl.tasks.program_variables import EVERYTHING, program_variables
from flowrl.tasks.reward_calls import child
from flowrl.tasks.reward_calls.judge import BadReward, RowColumns, Verdicts

CHILD = "flowrl.tasks.reward_calls.worker_child"
LOADED_WITHIN_S = 600.0
"""A module may load a model when it is imported."""
CANCELLED_WITHIN_S = 2.0
"""The child reports what blocks its event loop earlier."""
BLOCKS = "at {}, which blocks its event loop; await such calls, or make them in asyncio.to_thread"
ENDED_WITHIN_S = 15.0
"""Time of a keeper to end what is below it; after that it is killed, and with it its process group."""


class ChildEnded(Exception):
    """The child ended before it answered."""


class RewardChild:
    """One life of the child. Only one event loop may use it. `on_block(where)` is called when its event loop stands
    still."""

    def __init__(self, place: str, asks: Sequence[str], *, on_block: Callable[[str], None]) -> None:
        self._on_block = on_block
        self._socket, theirs = socket.socketpair()
        with theirs:
            variables = program_variables({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, keep=EVERYTHING)
            self._keeper = start_kept(CHILD, place, *asks, connection=theirs, variables=variables)
        loop = asyncio.get_running_loop()
        self._handle = os.pidfd_open(self._keeper.pid)
        loop.add_reader(self._handle, self._has_ended)
        self.ended: asyncio.Future[int] = loop.create_future()
        """Done, with the exit status, when nothing of the child is left."""
        self.loaded: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.blocked = ""
        """The line of code at which the child's event loop stands still."""
        self.was_blocked = False
        """Whether the child was ended because of that."""
        self.retired = False
        """Whether the child takes no further calls, and ends after the last one."""
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading = loop.create_task(self._read())

    @property
    def how_it_ended(self) -> str:
        """A predicate for the text of an error."""
        status = self.ended.result()
        return f"ended its process ({f'status {status}' if status >= 0 else signal.Signals(-status).name})"

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        with contextlib.suppress(ProcessLookupError):  # what is left if the keeper was killed
            os.killpg(self._keeper.pid, signal.SIGKILL)
        status = self._keeper.wait()  # it has ended, and its number is free only now
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.ended.set_result(status)

    async def _read(self) -> None:
        """Hand out the answers until the connection ends, and then fail the calls that have none."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, child.Garbage):
                while True:
                    self._take(await child.receive(reader))
            await self._gone()
        finally:
            self._writer.close()
            for waiting in (self.loaded, *self._calls.values()):
                if not waiting.done():
                    waiting.set_exception(ChildEnded())
                    waiting.exception()  # mark it as retrieved: nobody may wait

    def _take(self, message: dict[str, Any]) -> None:
        if "blocked" in message:
            self.blocked = message["blocked"]
            if self.blocked:
                self._on_block(self.blocked)
        elif "call" not in message:
            self.loaded.set_result(message)
        elif message["call"] in self._calls:
            self._calls[message["call"]].set_result(message)

    def ask(self, question: dict[str, Any]) -> int:
        """Begin a call. Returns its number."""
        self._num_calls += 1
        self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            self._calls[self._num_calls].set_exception(ChildEnded())
        self._send({"call": self._num_calls, **question})
        return self._num_calls

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._reading.done():
            self._writer.write(child.packed(message))

    async def answer(self, number: int) -> dict[str, Any]:
        """The answer of a call. Raises ChildEnded."""
        return await asyncio.shield(self._calls[number])

    async def cancel(self, number: int) -> bool:
        """Have a call of an `async` function cancelled. Returns whether it has ended."""
        self._send({"call": number})
        try:
            async with asyncio.timeout(CANCELLED_WITHIN_S):
                answer = await self.answer(number)
        except TimeoutError:
            return False
        except ChildEnded:
            return True
        self.retired |= answer.get("left", False)
        return True

    async def forget(self, number: int) -> None:
        """A call is over. Ends a child that is to end after its last call."""
        del self._calls[number]
        if self.retired and not self._calls:
            await self.end()

    async def end(self) -> None:
        """End the child and all that it has started. When this returns, nothing of it is left."""
        self.retired = True
        if not self.ended.done():
            self._keeper.terminate()
        await self._gone()
        await asyncio.wait({self._reading})

    async def _gone(self) -> None:
        """Wait for the keeper's end. A child that has only closed its connection gets a moment, and is then ended."""
        for patience_s, act in ((1.0, self._keeper.terminate), (ENDED_WITHIN_S, self._keeper.kill)):
            await asyncio.wait({self.ended}, timeout=patience_s)
            if self.ended.done():
                return
            act()
        await asyncio.wait({self.ended})


class RewardWorker:
    """One child process for one function. One call at a time, or, of an `async` function, any number.

    A function that limits the time of its calls itself has `own_s`, the longest time of a call; its timeout is never
    less. Verifiers that the function `asks` are loaded with it. `report` gets a line when the calls of an `async`
    function have blocked their event loop for the first time.
    """

    def __init__(
        self,
        place: str,
        *,
        timeout_s: float,
        own_s: Callable[[RowColumns], float] | None = None,
        asks: Sequence[str] = (),
        is_async: bool = False,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.place = place
        self.timeout_s = timeout_s
        self.own_s = own_s
        self.asks = tuple(asks)
        self._is_async = is_async
        self._report: Callable[[str], None] | None = report
        self._child: RewardChild | None = None
        """The child that takes calls."""
        self._children: set[RewardChild] = set()
        """All that have not ended."""
        self._starting, self._turn = asyncio.Lock(), asyncio.Lock()

    async def start(self) -> RewardChild:
        """The child, which is started if there is none. Raises ConfigError if the function does not load there,
        BadReward if the child ends."""
        async with self._starting:
            if self._child is None or self._child.retired or self._child.ended.done():
                self._child = await self._loaded()
            return self._child

    async def _loaded(self) -> RewardChild:
        started = RewardChild(self.place, self.asks, on_block=self._blocked)
        self._children.add(started)
        try:
            async with asyncio.timeout(LOADED_WITHIN_S):
                answer = await asyncio.shield(started.loaded)
        except TimeoutError:
            await self._end(started)
            raise ConfigError(
                f"{self.place} is not loaded after {LOADED_WITHIN_S:g} s; do slow set-up at its first call"
            ) from None
        except ChildEnded:
            self._children.discard(started)
            raise BadReward("reward_died", f"{self.place} {started.how_it_ended} while it was loaded") from None
        except asyncio.CancelledError:
            await self._end(started)
            raise
        if "error" in answer:
            await self._end(started)
            raise ConfigError(answer["error"])
        return started

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        """Call the function. Raises BadReward; after a timeout or a crash the next call uses a new child."""
        question = {"prompts": prompts, "responses": responses, "columns": columns}
        limit_s = self.timeout_s if self.own_s is None else max(self.timeout_s, self.own_s(columns))
        async with contextlib.nullcontext() if self._is_async else self._turn:
            answer = await self._answer(question, limit_s)
        if "error" in answer:
            raise BadReward(answer["reason"], answer["error"])
        if "left" in answer:
            raise BadReward("reward_raised", f"{self.place} raised CancelledError")
        logs = {name: tuple(values) for name, values in answer["logs"].items()}
        return Verdicts(tuple(answer["rewards"]), tuple(answer["scores"]), logs, answer["heads"])

    async def _answer(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer of the child. What another call's block has cost is asked again, within the same time."""
        loop, left_s = asyncio.get_running_loop(), limit_s
        while True:
            asked = await self.start()
            number, begin_s = asked.ask(question), loop.time()
            try:
                async with asyncio.timeout(left_s):
                    return await asked.answer(number)
            except TimeoutError:
                why = await self._give_up(asked, number)
                raise BadReward("reward_timed_out", f"{self.place} took more than {limit_s} s{why}") from None
            except asyncio.CancelledError:
                await self._give_up(asked, number)
                raise
            except ChildEnded:
                left_s -= loop.time() - begin_s
                if not asked.was_blocked or left_s <= 0:
                    raise BadReward("reward_died", f"{self.place} {asked.how_it_ended}") from None
            finally:
                await asked.forget(number)
                if asked.ended.done():
                    self._children.discard(asked)

    async def _give_up(self, asked: RewardChild, number: int) -> str:
        """End a call, and what it has started. Returns the reason if the call blocked its event loop."""
        if self._is_async and await asked.cancel(number):
            return ""
        asked.was_blocked = self._is_async
        await self._end(asked)
        return f": a call stands still {BLOCKS.format(asked.blocked)}" if asked.blocked else ""

    async def close(self) -> None:
        """End the child, and all that it has started."""
        await asyncio.gather(*map(self._end, tuple(self._children)))

    async def _end(self, ended: RewardChild) -> None:
        await ended.end()
        self._children.discard(ended)

    def _blocked(self, where: str) -> None:
        if self._report is not None:
            self._report(f"{self.place} blocks all its calls {BLOCKS.format(where)}")
            self._report = None
