"""Requests and notes between endpoints: the control link, which is separate from the lanes.

Invariants
- Every request gets one answer: a value, the other side's error, or LaneFailed when the other process failed. A
  handler that ends in any other way than by returning is an error, unless the requester cancelled it.
- A cancelled request cancels its handler's task at the other end; an answer that still arrives is dropped. A caller
  that requests a right to something must give it back when it is cancelled: the answer may already be in flight.
- A broken connection is not a failure: frames still arrive once and in order (`connection.NumberedFrames`).
- Notes and requests from one process to another arrive in the order in which they were made. A note's (plain) handler
  has run before the next frame is handled; a request's handler begins in the next tick, after notes that came with it.

What ends a wait: a request waits for its answer, the failure of the other process, its own cancellation or
the closing of the endpoint.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flowrl import errors
from flowrl.errors import FlowrlError, LaneFailed, NodeFailed, WireError
from flowrl.wire.encoding.multiparts import ABORT, NOTIFY, REPLY, REQUEST, Frame

Answer = Callable[[str, Any], Any]
"""handler(host, body): a coroutine function for requests, a plain one for notes (or for quick answers)."""


class Work:
    """A running handler of a request or note from `host`."""

    task: asyncio.Task[None]

    def __init__(self, host: str, number: int, kind: str) -> None:
        self.host = host
        self.number = number
        """Number of the request, 0 for a note."""
        self.kind = kind
        self.wanted = True
        """True until the work is cancelled. Its result or error is reported only while this is True."""

    def stop(self) -> None:
        """Cancel the work: the requester has cancelled, or the requester's process or this one ends."""
        self.wanted = False
        self.task.cancel()


class Control:
    """The control side of one endpoint.

    `post(host, frame)` sends. `report(error)` is called with an error that no requester waits for.
    """

    def __init__(self, post: Callable[[str, Frame], None], report: Callable[[BaseException], None]) -> None:
        self._post = post
        self._report = report
        self._context = contextvars.copy_context()
        """Handlers' tasks run in a copy of this context, not in the one that was active when the request arrived."""
        self._answers: dict[str, Answer] = {}
        """Kind of a request or note -> its handler here."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, str, float, asyncio.Future[Any]]] = {}
        """Number of a request made here -> (host, kind, time.monotonic() of its start, its answer)."""
        self._works: dict[tuple[str, int], Work] = {}
        """(host, number of its request) -> the running handler; the key of a note has a unique negative number."""
        self._closed = False

    def on(self, kind: str, answer: Answer) -> None:
        """Make `answer` the handler of requests and notes of this kind."""
        self._answers[kind] = answer

    async def request(self, host: str, kind: str, body: Any) -> Any:
        """The answer of the handler of `kind` at `host`. Raises its error, or LaneFailed if `host` has failed."""
        if self._closed:
            raise LaneFailed(f"request {kind!r} to {host!r}: this endpoint was closed")
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
        """Send a note. Nothing comes back: an error of its handler is reported at `host`."""
        self._post(host, (NOTIFY, 0, 0, 0, (kind, body)))

    def waiting_requests(self) -> list[tuple[str, str, float]]:
        """(host, kind, time.monotonic() of its start) of every request that has no answer yet."""
        return [(host, kind, since) for host, kind, since, _ in self._waiting.values()]

    def peer_failed(self, host: str, reason: str) -> None:
        """Fail the requests that wait for `host`, and stop the handlers that work for it."""
        for peer, kind, _, reply in self._waiting.values():
            if peer == host and not reply.done():
                reply.set_exception(LaneFailed(f"request {kind!r} to {host!r}: {reason}"))
        for work in self._works.values():
            if work.host == host:
                work.stop()

    async def close(self) -> None:
        """Fail all waiting requests, cancel all running handlers, and wait until they have ended."""
        self._closed = True
        for host, kind, _, reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(LaneFailed(f"request {kind!r} to {host!r}: this endpoint was closed"))
        works = list(self._works.values())
        for work in works:
            work.stop()
        await asyncio.gather(*(work.task for work in works), return_exceptions=True)

    def receive_frame(self, host: str, frame: Frame) -> None:
        """Take one REQUEST, REPLY, ABORT or NOTIFY frame from `host`."""
        kind, _, _, number, payload = frame
        if kind == NOTIFY:
            self._begin_work(host, 0, *payload)
        elif kind == REQUEST:
            self._begin_work(host, number, *payload)
        elif kind == REPLY:
            self._settle_request(host, number, *payload)
        elif (host, number) in self._works:
            self._works[host, number].stop()

    def _begin_work(self, host: str, number: int, kind: str, body: Any) -> None:
        """Run the handler: a plain function that handles a note at once, any other handler in its own task."""
        answer = self._answers.get(kind)
        if answer is not None and not inspect.iscoroutinefunction(answer) and not number:
            self._run_note(answer, host, kind, body)
        elif not self._closed:
            key = host, number or -next(self._numbers)
            work = self._works[key] = Work(host, number, kind)
            begun = self._run_work(work, answer, body)
            work.task = asyncio.get_running_loop().create_task(begun, context=self._context.copy())
            work.task.add_done_callback(lambda _: self._forget_work(key, work))

    def _forget_work(self, key: tuple[str, int], work: Work) -> None:
        if self._works.get(key) is work:  # a new incarnation of the host may reuse the number
            del self._works[key]

    def _run_note(self, answer: Answer, host: str, kind: str, body: Any) -> None:
        try:
            answer(host, body)
        except BaseException as error:  # the sender does not wait: report it to the owner of this endpoint
            self._report(as_exception(f"the handler of {kind!r}", error))

    async def _run_work(self, work: Work, answer: Answer | None, body: Any) -> None:
        try:
            if answer is None:
                raise WireError(f"host {work.host!r} sent {work.kind!r}, for which this host has no handler")
            value = answer(work.host, body)
            if isinstance(value, Awaitable):
                value = await value
        except GeneratorExit:  # the loop has ended
            raise
        except BaseException as error:  # sent to the requester, or reported to the endpoint's owner
            self._send_error(work, as_exception(f"the handler of {work.kind!r}", error))
        else:
            self._send_reply(work, value)

    def _send_error(self, work: Work, error: Exception) -> None:
        if not work.wanted:
            return
        if not work.number:
            self._report(error)
            return
        try:
            self._post(work.host, (REPLY, 0, 0, work.number, (False, _as_data(error))))
        except WireError:  # the error's text holds a character that cannot be sent
            plain = FlowrlError(ascii(str(error)))
            self._post(work.host, (REPLY, 0, 0, work.number, (False, _as_data(plain))))

    def _send_reply(self, work: Work, value: Any) -> None:
        if not work.number or not work.wanted:
            return
        try:
            self._post(work.host, (REPLY, 0, 0, work.number, (True, value)))
        except WireError as error:
            self._send_error(work, WireError(f"answer to {work.kind!r}: {error}"))

    def _settle_request(self, host: str, number: int, good: bool, value: Any) -> None:
        """Give a request its answer: a value, or an error of `_as_data` if not `good`. Drops answers nobody awaits."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting[0] != host or waiting[3].done():
            return
        _, kind, _, reply = waiting
        if good:
            reply.set_result(value)
        else:
            reply.set_exception(_as_error(host, kind, value))


def is_cancel(error: BaseException) -> bool:
    """Whether the current task was cancelled from outside. If not, a CancelledError comes from something it awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def as_exception(what: str, error: BaseException) -> Exception:
    """The error that `what` raised, as an Exception: a cancellation or sys.exit() becomes a RuntimeError."""
    if isinstance(error, Exception):
        return error
    problem = RuntimeError(
        f"{what} ended with {type(error).__name__}, although nobody cancelled it; it has to return or to raise an "
        "Exception. If a library cancels itself, catch that where the library is awaited"
    )
    problem.__cause__ = error
    return problem


def _as_data(error: BaseException) -> Mapping[str, Any]:
    """Convert an error to plain values; `_as_error` converts it back."""
    data: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, NodeFailed):
        data["node"] = (error.node, error.replica, error.reason, error.remote_traceback, error.ticket)
    if not isinstance(error, FlowrlError):
        data["traceback"] = "".join(traceback.format_exception(error))
    return data


def _as_error(host: str, kind: str, data: Mapping[str, Any]) -> FlowrlError:
    """The error that `_as_data` converted; `frames.fits` has checked that `data` holds one."""
    if "node" in data:
        node, replica, reason, remote, ticket = data["node"]
        return NodeFailed(node, replica, reason, remote_traceback=remote, ticket=ticket)
    if "traceback" in data:
        return FlowrlError(
            f"host {host!r} failed to answer {kind!r}: {data['type']}: {data['text']}\n{data['traceback']}"
        )
    return _OF_TEXT.get(data["type"], FlowrlError)(data["text"])


_OF_TEXT: Mapping[str, type[FlowrlError]] = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, FlowrlError) and cls.__init__ is FlowrlError.__init__
}
"""flowrl's errors whose constructor takes only their text."""
