"""Requests and notes between endpoints: the control link beside the lanes.

Invariants
- Every request gets one answer: a value, the other side's error, or LaneFailed when its process failed.
- A cancelled request cancels its handler's task at the other end; an answer that still comes is dropped.
- Notes and requests from one process to another are begun in the order in which they were made.

Ends of waits: a request waits for its answer, the failure of the other process, its own cancellation or
the closing of the endpoint.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flowrl import errors
from flowrl.channel.wire import ABORT, NOTIFY, REPLY, REQUEST, Frame
from flowrl.errors import FlowrlError, LaneFailed, NodeFailed, WireError

Answer = Callable[[str, Any], Any]
"""handler(host, body): a coroutine function for requests, a plain one for notes (or for quick answers)."""


class Control:
    """The control side of one endpoint. `post(host, frame)` sends."""

    def __init__(self, post: Callable[[str, Frame], None], report: Callable[[BaseException], None]) -> None:
        self._post = post
        self._report = report
        self._answers: dict[str, Answer] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, str, float, asyncio.Future[Any]]] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def on(self, kind: str, answer: Answer) -> None:
        self._answers[kind] = answer

    async def request(self, host: str, kind: str, body: Any) -> Any:
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = host, kind, time.monotonic(), reply
        try:
            self._post(host, (REQUEST, 0, 0, number, (kind, body)))
            return await reply
        except asyncio.CancelledError:
            self._post(host, (ABORT, 0, 0, number, None))
            raise
        finally:
            del self._waiting[number]

    def notify(self, host: str, kind: str, body: Any) -> None:
        self._post(host, (NOTIFY, 0, 0, 0, (kind, body)))

    def waiting(self) -> list[tuple[str, str, float]]:
        """(host, kind, time.monotonic when it was made) of every request without an answer yet."""
        return [(host, kind, since) for host, kind, since, _ in self._waiting.values()]

    def peer_failed(self, host: str, reason: str) -> None:
        """Fail what waits for `host`, and stop working for it."""
        for peer, kind, _, reply in self._waiting.values():
            if peer == host and not reply.done():
                reply.set_exception(LaneFailed(f"request {kind!r} to {host!r}: {reason}"))
        for (peer, _), task in self._tasks.items():
            if peer == host:
                task.cancel()

    async def close(self) -> None:
        """Fail what waits, cancel what works, and see its end."""
        for host, kind, _, reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(LaneFailed(f"request {kind!r} to {host!r}: this endpoint was closed"))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def receive(self, host: str, frame: Frame) -> None:
        """Take one REQUEST, REPLY, ABORT or NOTIFY frame from `host`."""
        kind, _, _, number, payload = frame
        if kind == NOTIFY:
            self._begin(host, 0, *payload)
        elif kind == REQUEST:
            self._begin(host, number, *payload)
        elif kind == REPLY:
            self._settle(number, *payload)
        elif (host, number) in self._tasks:
            self._tasks[host, number].cancel()

    def _begin(self, host: str, number: int, kind: str, body: Any) -> None:
        answer = self._answers.get(kind)
        if answer is not None and not inspect.iscoroutinefunction(answer) and not number:
            self._note(answer, host, body)
            return
        key = host, number or -next(self._numbers)
        task = asyncio.get_running_loop().create_task(self._work(host, number, kind, body, answer))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key))

    def _note(self, answer: Answer, host: str, body: Any) -> None:
        try:
            answer(host, body)
        except Exception as error:  # the sender does not wait: whoever owns this endpoint hears of it
            self._report(error)

    async def _work(self, host: str, number: int, kind: str, body: Any, answer: Answer | None) -> None:
        try:
            if answer is None:
                raise WireError(f"host {host!r} sent {kind!r}, which nobody answers here")
            value = answer(host, body)
            if isinstance(value, Awaitable):
                value = await value
        except Exception as error:  # carried to the asker, or to the endpoint's owner
            if not number:
                self._report(error)
            else:
                self._post(host, (REPLY, 0, 0, number, (False, _as_data(error))))
            return
        if number:
            self._reply(host, number, kind, value)

    def _reply(self, host: str, number: int, kind: str, value: Any) -> None:
        try:
            self._post(host, (REPLY, 0, 0, number, (True, value)))
        except WireError as error:
            self._post(host, (REPLY, 0, 0, number, (False, _as_data(WireError(f"answer to {kind!r}: {error}")))))

    def _settle(self, number: int, good: bool, value: Any) -> None:
        waiting = self._waiting.get(number)
        if waiting is None or waiting[3].done():
            return
        host, kind, _, reply = waiting
        if good:
            reply.set_result(value)
        else:
            reply.set_exception(_as_error(host, kind, value))


def _as_data(error: BaseException) -> Mapping[str, Any]:
    """An error as plain values; `_as_error` makes it one again."""
    data: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, NodeFailed):
        data["node"] = (error.node, error.replica, error.reason, error.remote_traceback, error.ticket)
    if not isinstance(error, FlowrlError):
        data["traceback"] = "".join(traceback.format_exception(error))
    return data


def _as_error(host: str, kind: str, data: Mapping[str, Any]) -> FlowrlError:
    if "node" in data:
        node, replica, reason, remote, ticket = data["node"]
        return NodeFailed(node, replica, reason, remote_traceback=remote, ticket=ticket)
    if "traceback" in data:
        return FlowrlError(
            f"host {host!r} failed to answer {kind!r}: {data['type']}: {data['text']}\n{data['traceback']}"
        )
    cls = getattr(errors, data["type"], FlowrlError)
    plain = isinstance(cls, type) and issubclass(cls, FlowrlError) and cls is not errors.GraphError
    return cls(data["text"]) if plain else FlowrlError(data["text"])
