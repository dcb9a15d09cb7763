"""The peers of benchmarks/channels/lanes.py: raw pyzmq, Ray actor calls, ray.util.queue and memcpy.

Every `rate` sends `count` payloads of `size` bytes to another process and returns messages per second
until the other side has confirmed the last; every `round_trip` returns the median in seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import zmq

SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def pyzmq(target: Any, *args: Any) -> Iterator[tuple[Any, Any]]:
    """(PUSH to, PULL from) a process running `target(push url, pull url, *args)` over ipc."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        there, back = f"ipc://{folder}/there", f"ipc://{folder}/back"
        context: Any = zmq.Context()
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.sndhwm = pull.rcvhwm = 0
        push.bind(there)
        pull.bind(back)
        process = SPAWN.Process(target=target, args=(there, back, *args), daemon=True)
        process.start()
        pull.recv()
        yield push, pull
        process.join()
        context.destroy(linger=0)


def _pyzmq_peer(there: str, back: str) -> tuple[Any, Any]:
    context: Any = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.rcvhwm = push.sndhwm = 0
    pull.connect(there)
    push.connect(back)
    push.send(b"ready")
    return pull, push


def _pyzmq_sink(there: str, back: str, count: int, window: int) -> None:
    pull, push = _pyzmq_peer(there, back)
    every = max(1, window // 2) if window else count
    for index in range(1, count + 1):
        pull.recv(copy=False)
        if index % every == 0 or index == count:
            push.send(b"")
    push.close(linger=-1)


def _pyzmq_echo(there: str, back: str, count: int) -> None:
    pull, push = _pyzmq_peer(there, back)
    for _ in range(count):
        push.send(pull.recv())
    push.close(linger=-1)


def pyzmq_rate(size: int, count: int, window: int = 0) -> float:
    """Blocking sockets, one frame a message. `window`: at most so many unconfirmed, 0 for no bound."""
    payload, copy = os.urandom(size), size < 1 << 16
    every = max(1, window // 2)
    with pyzmq(_pyzmq_sink, count, window) as (push, pull):
        began = perf_counter()
        confirmed = 0
        for index in range(count):
            if window and index - confirmed >= window:
                pull.recv()
                confirmed += every
            push.send(payload, copy=copy, track=False)
        while confirmed < count:
            pull.recv()
            confirmed += every if window else count
        return count / (perf_counter() - began)


def pyzmq_round_trip(size: int, count: int) -> float:
    payload = os.urandom(size)
    with pyzmq(_pyzmq_echo, count) as (push, pull):
        times = []
        for _ in range(count):
            began = perf_counter()
            push.send(payload)
            pull.recv()
            times.append(perf_counter() - began)
    return median(times)


class Rayside:
    """Ray's own ways between two processes, between `start` (it takes seconds) and `close`."""

    def start(self) -> None:
        import ray
        from ray.util.queue import Queue

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        self._ray, self._queue = ray, Queue

        @ray.remote(num_cpus=0)
        class Sink:
            def take(self, payload: np.ndarray[Any, Any]) -> None:
                pass

            def echo(self, payload: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
                return payload

            def drain(self, queue: Any, count: int) -> None:
                for _ in range(count):
                    queue.get()

        self._sink: Any = Sink.remote()  # type: ignore[attr-defined]
        ray.get(self._sink.take.remote(np.zeros(1)))

    def actor_rate(self, size: int, count: int, window: int = 256) -> float:
        """Calls with at most `window` unanswered."""
        payload = np.zeros(size, np.uint8)
        open_: deque[Any] = deque()
        began = perf_counter()
        for _ in range(count):
            if len(open_) == window:
                self._ray.get(open_.popleft())
            open_.append(self._sink.take.remote(payload))
        self._ray.get(list(open_))
        return count / (perf_counter() - began)

    def actor_round_trip(self, size: int, count: int) -> float:
        payload = np.zeros(size, np.uint8)
        times = []
        for _ in range(count):
            began = perf_counter()
            self._ray.get(self._sink.echo.remote(payload))
            times.append(perf_counter() - began)
        return median(times)

    def queue_rate(self, size: int, count: int, capacity: int = 256) -> float:
        payload = np.zeros(size, np.uint8)
        queue = self._queue(maxsize=capacity)
        began = perf_counter()
        drained = self._sink.drain.remote(queue, count)
        for _ in range(count):
            queue.put(payload)
        self._ray.get(drained)
        rate = count / (perf_counter() - began)
        queue.shutdown()
        return rate

    def close(self) -> None:
        self._ray.shutdown()


def memcpy_rate(size: int, count: int) -> float:
    """Copies of one warm buffer into another, in one thread."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    began = perf_counter()
    for _ in range(count):
        np.copyto(target, source)
    return count / (perf_counter() - began)
