"""The ways to call a reward function: directly, in a process of its own, or with many waiting samples at once.

A process runs one function and is ended, with all that it started, when a call is too long. One call is one message
each way (`flowrl.tasks.user_code`), over a socket that only the child has: programs that the function starts get an
empty standard input, and all output goes to standard error. A keeper (`flowrl.machine.orphans`) is the child's
parent. When it has ended, nothing of the child is left, and then this end of the socket is shut: nothing that could
still hold the other end prolongs a wait.

Waits of a process: a call for its answer, the timeout, or the child's death; loading likewise, with the limit
LOADED_WITHIN_S; `end` for the keeper's end, at most ENDED_WITHIN_S. A call of an `async` function that is over its time
is cancelled, and its child ended if the call does not end within CANCELLED_WITHIN_S, because something blocks the
child's event loop.

A function that expects many samples gets those that wait together: while it works on some, others accumulate. A
question waits for the call that contains it. If a call with several samples fails, each sample is asked separately, so
that a problem with one sample does not affect the others. A problem that is not due to a sample, such as a function
that no longer loads, is raised for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flowrl.errors import ConfigError
from flowrl.machine.orphans import start_kept
from flowrl.tasks.checks.answer_checks import CHECKS, OF_MIXTURE_WITH_CODE
from flowrl.tasks.checks.code_tests import call_s
from flowrl.tasks.reward_calls.judge import (
    BadReward,
    Judge,
    Question,
    RowColumns,
    Verdicts,
    fail_questions,
    join_verdicts,
)
from flowrl.tasks.rows import OF_TASK
from flowrl.tasks.task_syntax import parse_options, split_name
from flowrl.tasks.user_code import EVERYTHING, Garbage, pack_message, program_variables, receive_message

TRUSTED = (CHECKS["exact"],)
"""Functions that cannot block; they are called directly."""
OWN_LIMITS: dict[str, Callable[[Sequence[Mapping[str, Any]]], float]] = {
    CHECKS["code"]: call_s,
    f"{CHECKS['code']}_without_namespaces": call_s,
    OF_MIXTURE_WITH_CODE: lambda columns: call_s([row for row in columns if _has_code_check(row)]),
}
"""Functions that limit the time of their calls themselves -> the longest time of a call, in seconds."""
CHILD = "flowrl.tasks.reward_calls.worker_child"
LOADED_WITHIN_S = 600.0
"""A module may load a model when it is imported."""
CANCELLED_WITHIN_S = 2.0
"""The child reports what blocks its event loop earlier."""
BLOCKS = "at {}, which blocks its event loop; await such calls, or make them in asyncio.to_thread"
ENDED_WITHIN_S = 15.0
"""Time of a keeper to end what is below it; after that it is killed, and with it its process group."""
GATHERED = 64
"""Maximum number of samples in one call of a function that expects many."""


def _has_code_check(row: Mapping[str, Any]) -> bool:
    """Whether the source of a mixture's row has check=code."""
    source = str(row.get(OF_TASK, ""))
    return parse_options(source, split_name(source)[1]).get("check") == "code"


class RewardClient(Protocol):
    """A client of one reward function."""

    async def ask(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> Verdicts: ...
    async def close(self) -> None: ...


def open_client(
    judge: Judge, timeout_s: float, *, asks: Sequence[str] = (), report: Callable[[str], None] = lambda text: None
) -> RewardClient:
    """The client that fits the function; `asks` are the verifiers that the function asks. `report` gets a line about
    an `async` function that blocks."""
    if judge.place in TRUSTED:
        return _InPlace(judge)
    own_s = OWN_LIMITS.get(judge.place)
    return RewardWorker(
        judge.place, timeout_s=timeout_s, own_s=own_s, asks=asks, is_async=judge.is_async, report=report
    )


class _InPlace:
    """A function that returns almost immediately."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def ask(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> Verdicts:
        return self._judge(prompts, responses, columns)

    async def close(self) -> None: ...


# A process of its own


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
        self._reading = loop.create_task(self._read_answers())

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

    async def _read_answers(self) -> None:
        """Hand out the answers until the connection ends, and then fail the calls that have none."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, Garbage):
                while True:
                    self._take_message(await receive_message(reader))
            await self._await_end()
        finally:
            self._writer.close()
            for waiting in (self.loaded, *self._calls.values()):
                if not waiting.done():
                    waiting.set_exception(ChildEnded())
                    waiting.exception()  # mark it as retrieved: nobody may wait

    def _take_message(self, message: dict[str, Any]) -> None:
        if "blocked" in message:
            self.blocked = message["blocked"]
            if self.blocked:
                self._on_block(self.blocked)
        elif "call" not in message:
            self.loaded.set_result(message)
        elif message["call"] in self._calls:
            self._calls[message["call"]].set_result(message)

    def begin_call(self, question: dict[str, Any]) -> int:
        """Begin a call. Returns its number."""
        self._num_calls += 1
        self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            self._calls[self._num_calls].set_exception(ChildEnded())
        self._send_message({"call": self._num_calls, **question})
        return self._num_calls

    def _send_message(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._reading.done():
            self._writer.write(pack_message(message))

    async def await_answer(self, number: int) -> dict[str, Any]:
        """The answer of a call. Raises ChildEnded."""
        return await asyncio.shield(self._calls[number])

    async def cancel_call(self, number: int) -> bool:
        """Have a call of an `async` function cancelled. Returns whether it has ended."""
        self._send_message({"call": number})
        try:
            async with asyncio.timeout(CANCELLED_WITHIN_S):
                answer = await self.await_answer(number)
        except TimeoutError:
            return False
        except ChildEnded:
            return True
        self.retired |= answer.get("left", False)
        return True

    async def forget_call(self, number: int) -> None:
        """A call is over. Ends a child that is to end after its last call."""
        del self._calls[number]
        if self.retired and not self._calls:
            await self.end_child()

    async def end_child(self) -> None:
        """End the child and all that it has started. When this returns, nothing of it is left."""
        self.retired = True
        if not self.ended.done():
            self._keeper.terminate()
        await self._await_end()
        await asyncio.wait({self._reading})

    async def _await_end(self) -> None:
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

    async def start_child(self) -> RewardChild:
        """The child, which is started if there is none. Raises ConfigError if the function does not load there,
        BadReward if the child ends."""
        async with self._starting:
            if self._child is not None and not self._child.retired and not self._child.ended.done():
                return self._child
            started = RewardChild(self.place, self.asks, on_block=self._report_block)
            self._children.add(started)
            try:
                async with asyncio.timeout(LOADED_WITHIN_S):
                    answer = await asyncio.shield(started.loaded)
            except TimeoutError:
                await self._end_child(started)
                raise ConfigError(
                    f"{self.place} is not loaded after {LOADED_WITHIN_S:g} s; do slow set-up at its first call"
                ) from None
            except ChildEnded:
                self._children.discard(started)
                raise BadReward("reward_died", f"{self.place} {started.how_it_ended} while it was loaded") from None
            except asyncio.CancelledError:
                await self._end_child(started)
                raise
            if "error" in answer:
                await self._end_child(started)
                raise ConfigError(answer["error"])
            self._child = started
            return started

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        """Call the function. Raises BadReward; after a timeout or a crash the next call uses a new child."""
        question = {"prompts": prompts, "responses": responses, "columns": columns}
        limit_s = self.timeout_s if self.own_s is None else max(self.timeout_s, self.own_s(columns))
        async with contextlib.nullcontext() if self._is_async else self._turn:
            answer = await self._ask_child(question, limit_s)
        if "error" in answer:
            raise BadReward(answer["reason"], answer["error"])
        if "left" in answer:
            raise BadReward("reward_raised", f"{self.place} raised CancelledError")
        logs = {name: tuple(values) for name, values in answer["logs"].items()}
        return Verdicts(tuple(answer["rewards"]), tuple(answer["scores"]), logs, answer["heads"])

    async def _ask_child(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer of the child. What another call's block has cost is asked again, within the same time."""
        loop, left_s = asyncio.get_running_loop(), limit_s
        while True:
            asked = await self.start_child()
            number, begin_s = asked.begin_call(question), loop.time()
            try:
                async with asyncio.timeout(left_s):
                    return await asked.await_answer(number)
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
                await asked.forget_call(number)
                if asked.ended.done():
                    self._children.discard(asked)

    async def _give_up(self, asked: RewardChild, number: int) -> str:
        """End a call, and what it has started. Returns the reason if the call blocked its event loop."""
        if self._is_async and await asked.cancel_call(number):
            return ""
        asked.was_blocked = self._is_async
        await self._end_child(asked)
        return f": a call stands still {BLOCKS.format(asked.blocked)}" if asked.blocked else ""

    async def close(self) -> None:
        """End the child, and all that it has started."""
        await asyncio.gather(*map(self._end_child, tuple(self._children)))

    async def _end_child(self, ended: RewardChild) -> None:
        await ended.end_child()
        self._children.discard(ended)

    def _report_block(self, where: str) -> None:
        if self._report is not None:
            self._report(f"{self.place} blocks all its calls {BLOCKS.format(where)}")
            self._report = None


# Many samples at once


class Gathered:
    """Clients of one function, each with at most one call at a time; they share the waiting questions."""

    def __init__(self, clients: Sequence[RewardClient], *, batch: int = GATHERED) -> None:
        self._clients = tuple(clients)
        self._batch = batch
        self._waiting: list[Question] = []
        self._free = list(clients)
        self._num_called = 0
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        loop = asyncio.get_running_loop()
        questions = Question.make_all(prompts, responses, columns)
        self._waiting += questions
        for _ in questions[: len(self._free)]:
            self._calls.add(loop.create_task(self._call_until_idle(self._free.pop())))
        try:
            await asyncio.wait([question.verdict for question in questions])
        finally:
            for question in questions:
                question.give_up()
        return join_verdicts([question.verdict.result() for question in questions])

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _call_until_idle(self, client: RewardClient) -> None:
        """Call `client` until nothing waits."""
        try:
            await asyncio.sleep(0)  # what arrives in the same tick goes into one call
            while True:
                # As many of the waiting questions are left for each other client without a call.
                self._waiting = [question for question in self._waiting if not question.verdict.done()]
                share = math.ceil(len(self._waiting) / (len(self._clients) - self._num_called))
                number = min(self._batch, share)
                questions, self._waiting = self._waiting[:number], self._waiting[number:]
                if not questions:
                    break
                self._num_called += 1
                try:
                    await self._answer_questions(client, questions)
                finally:
                    self._num_called -= 1
        finally:
            self._free.append(client)
            self._calls.discard(asyncio.current_task())

    async def _answer_questions(self, client: RewardClient, questions: Sequence[Question]) -> None:
        try:
            verdicts = await client.ask(
                [question.prompt for question in questions],
                [question.response for question in questions],
                [question.columns for question in questions],
            )
        except BadReward as bad:
            if len(questions) > 1:
                for question in questions:
                    await self._answer_questions(client, [question])
            else:
                fail_questions(questions, lambda bad=bad: bad)  # type: ignore[misc]
            return
        except Exception as problem:  # every waiting question has to receive the error
            fail_questions(questions, lambda problem=problem: problem)  # type: ignore[misc]
            return
        for index, question in enumerate(questions):
            question.answer(verdicts.of_sample(index))
