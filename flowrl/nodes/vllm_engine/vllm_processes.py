"""The end of vLLM's engine processes, as an event of the node's loop.

vLLM fails requests when its engine process has died. But an engine call (pause, load weights, sleep) that is running at
that time never returns, and nothing is raised while no request or call is made. So this module asks the kernel to
report the end.

Waits: none here; `required` ends its block when a process has ended.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from flowrl.errors import FlowrlError
from flowrl.nodes.vllm_engine.sampling import NOTHING, Completion

DID_NOT_START, DIED = "failed to start.", "encountered a fatal error."
"""The words with which a vLLM process logs the exception that ends it; it continues after other exceptions."""
CONSEQUENCE = "initialization failed"
"""Words in the exception that a vLLM process raises because another process has failed."""
LOGGED_ERROR = re.compile(
    r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR \S+ \S+ \[\S+\] +((?:\w+\.)*\w*(?:Error|Exception): .+)$",
    re.MULTILINE,
)
"""The last line of a traceback that an engine process or one of its workers has logged."""
LOG_TAIL_BYTES = 1 << 18
LONGEST_ERROR = 400


class EngineDied(FlowrlError):
    """An engine process has ended unexpectedly. `arrived` has the tokens of the request that arrived before that."""

    arrived: Completion = NOTHING


class EngineProcesses:
    """The processes of one engine. `listen` and `required` are for the node's loop, `expect_end` for any thread."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._descriptors: list[int] = []
        self._expected = False
        self._ended: asyncio.Future[None] | None = None

    def listen(self) -> None:
        """Report the end of a process from now on."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for pid in self._pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._report()
                continue
            self._descriptors.append(descriptor)
            loop.add_reader(descriptor, self._report)

    def expect_end(self) -> None:
        """The engine is about to be shut down: do not report that end."""
        self._expected = True

    @property
    def have_ended(self) -> bool:
        """Whether one of the processes has ended unexpectedly."""
        return self._ended is not None and self._ended.done()

    @asynccontextmanager
    async def required(self) -> AsyncIterator[None]:
        """Cancel the block and raise EngineDied if a process ends before the block does, like `asyncio.timeout`.

        Before `listen`, this has no effect.
        """
        task, ended = asyncio.current_task(), self._ended
        if ended is None or task is None:
            yield
            return
        requests, inside, cancelled = task.cancelling(), True, False

        def cancel(_: asyncio.Future[None]) -> None:
            nonlocal cancelled
            if inside:  # the block may end in the tick in which this is called
                cancelled = True
                task.cancel()

        ended.add_done_callback(cancel)
        try:
            yield
        except asyncio.CancelledError:
            if cancelled and task.cancelling() <= requests + 1:
                raise engine_died() from None
            raise
        finally:
            inside = False
            ended.remove_done_callback(cancel)
            if cancelled:  # whatever the block raises; otherwise the task would count as cancelled from then on
                task.uncancel()

    def _report(self) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.remove_reader(descriptor)
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        if self._ended is not None and not (self._expected or self._ended.done()):
            self._ended.set_result(None)


def engine_died() -> EngineDied:
    told = _logged_error(DIED)
    usual = told or "out of memory is the usual cause: lower --engine.kv-cache-bytes, or --engine.concurrency"
    return EngineDied(f"vLLM's engine process died; {log_place()} say why ({usual})")


@contextmanager
def starting() -> Iterator[None]:
    """Raises FlowrlError if vLLM reports that its engine process has ended before it was ready."""
    try:
        yield
    except RuntimeError as problem:
        if CONSEQUENCE not in str(problem):
            raise
        told = _logged_error(DID_NOT_START)
        usual = told or "a model that vLLM does not support, or too little memory, are the usual causes"
        raise FlowrlError(f"vLLM's engine process ended before it was ready; {log_place()} say why ({usual})") from None


def log_place(output: int = 1) -> str:
    """Where the last log lines of this process and its children are: Ray has redirected their output to a file."""
    path = _log_file(output)
    return f"the last lines of {path}" if path else "its own log lines above"


def _log_file(output: int = 1) -> str:
    """The file that standard output (or descriptor `output`) is redirected to; "" if it is not a file."""
    path = os.readlink(f"/proc/self/fd/{output}")
    return path if os.path.isfile(path) else ""


def _logged_error(after: str) -> str:
    """The exception with which an engine process has ended, such as "ValueError: ..."; "" if it logged none."""
    try:
        with open(_log_file(), "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return error_in(log.read().decode(errors="replace"), after)
    except OSError:
        return ""


def error_in(log: str, after: str) -> str:
    """The last exception, on one line, that a log of vLLM's has after the words `after`; "" if there is none.

    Exceptions that are only a consequence of another process's exception are skipped.
    """
    _, found, rest = log.partition(after)
    told = [error[1] for error in LOGGED_ERROR.finditer(rest) if found and CONSEQUENCE not in error[1]]
    return told[-1][:LONGEST_ERROR] if told else ""
