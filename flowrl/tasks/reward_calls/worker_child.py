"""The child of a `RewardWorker`: it loads one function and answers its calls. See `reward_client` for the protocol.

A synchronous function is called in the main thread, one call after the other. The calls of an `async` function share
the main thread's event loop; one other thread reads the requests, and another one reports what blocks the loop.

The process ends when the connection ends, whatever its threads and its processes do: its keeper ends them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NoReturn

from flowrl.errors import ConfigError
from flowrl.machine.orphans import child_pids
from flowrl.tasks.reward_calls.judge import BadReward, Judge, Verdicts, load_judge
from flowrl.tasks.user_code import keep_to_this_process, read_message, write_message

BLOCKED_S = 1.0
"""An event loop that stands still for this long is reported."""


def run_child(connection: socket.socket, place: str, *asks: str) -> NoReturn:
    """The whole life of the process. It does not wait for threads and processes, as the interpreter's own end does."""
    status = 1
    try:
        keep_to_this_process(connection)
        serve_calls(connection, place, *asks)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except (BrokenPipeError, ConnectionResetError):  # the caller is gone
        pass
    except BaseException:  # the process ends here, and says why
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)


def serve_calls(connection: socket.socket, place: str, *asks: str) -> None:
    """Load the function, and answer its calls until the connection ends; `asks` are verifiers that the function
    asks."""
    inbox, outbox = connection.makefile("rb"), connection.makefile("wb")
    try:
        judge = load_judge(place)
        prepare_verifier(place)
        for verifier in asks:
            load_judge(verifier)
            prepare_verifier(verifier)
    except ConfigError as problem:
        write_message(outbox, {"error": str(problem)})
        return
    write_message(outbox, {})
    if judge.is_async:
        asyncio.run(AwaitedCalls(judge, inbox, outbox).serve_calls())
        return
    while (request := read_message(inbox)) is not None:
        try:
            answer = verdict_data(judge(request["prompts"], request["responses"], request["columns"]))
        except BadReward as bad:
            answer = {"error": str(bad), "reason": bad.reason}
        write_message(outbox, {"call": request["call"], **answer})


def prepare_verifier(place: str) -> None:
    """Let one of flowrl's verifiers import what it needs. Otherwise its first call does so, which has a limit of some
    seconds."""
    module = place.partition(":")[0]
    if module.startswith("flowrl.tasks."):
        getattr(sys.modules[module], "prepare", lambda: None)()


class AwaitedCalls:
    """The calls of an `async` function."""

    def __init__(self, judge: Judge, inbox: IO[bytes], outbox: IO[bytes]) -> None:
        self._judge, self._inbox, self._outbox = judge, inbox, outbox
        self._writing = threading.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._threads = CountedThreads()

    async def serve_calls(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(self._threads)
        self._of_loop = threading.get_ident()
        self._over = self._loop.create_future()
        for work in (self._read_requests, self._watch_loop):
            threading.Thread(target=work, name=f"flowrl-{work.__name__}", daemon=True).start()
        await self._over

    def _read_requests(self) -> None:
        while (request := read_message(self._inbox)) is not None:
            self._loop.call_soon_threadsafe(self._take_request, request)
        os._exit(0)  # even if the loop is blocked

    def _take_request(self, request: dict[str, Any]) -> None:
        number = request["call"]
        if "prompts" in request:
            self._tasks[number] = self._loop.create_task(self._answer_call(number, request))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer_call(self, number: int, request: dict[str, Any]) -> None:
        try:
            answer = verdict_data(await self._judge.ask(request["prompts"], request["responses"], request["columns"]))
        except BadReward as bad:
            answer = {"error": str(bad), "reason": bad.reason}
        except asyncio.CancelledError:
            # A later call may not find the threads and processes of this one, so the caller has to know of them.
            answer = {"left": bool(self._threads.busy or child_pids())}
        del self._tasks[number]
        self._write_message({"call": number, **answer})

    def _write_message(self, message: dict[str, Any]) -> None:
        with self._writing:
            write_message(self._outbox, message)

    def _watch_loop(self) -> None:
        """Report what blocks the loop, and that it goes on."""
        ended = threading.Event()
        while not ended.wait(BLOCKED_S):
            alive = threading.Event()
            self._loop.call_soon_threadsafe(alive.set)
            if not alive.wait(BLOCKED_S):
                self._write_message({"blocked": _user_line(self._of_loop)})
                alive.wait()
                self._write_message({"blocked": ""})


class CountedThreads(ThreadPoolExecutor):
    """Knows which of its calls have not ended: `busy`."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self.busy: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = super().submit(fn, *args, **kwargs)
        self.busy.add(call)
        call.add_done_callback(self.busy.discard)
        return call


def verdict_data(verdicts: Verdicts) -> dict[str, Any]:
    """The verdicts as plain data."""
    values = {"rewards": verdicts.rewards, "scores": verdicts.scores, "logs": dict(verdicts.logs)}
    return {**values, "heads": dict(verdicts.heads)}


def _user_line(thread: int) -> str:
    """ "file:line in function" of the innermost call in a thread that is neither Python's, a package's nor flowrl's;
    of the innermost one at all if there is none."""
    paths = sysconfig.get_paths()
    others = (
        paths["stdlib"],
        paths["purelib"],
        paths["platlib"],
        os.path.dirname(sys.modules["flowrl"].__file__ or ""),
    )
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith((*others, "<")):
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}" if found is not None else ""


if __name__ == "__main__":
    run_child(socket.socket(fileno=int(sys.argv[-1])), *sys.argv[1:-1])
