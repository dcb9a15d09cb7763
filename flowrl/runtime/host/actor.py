"""The Ray actor of a host: Ray places, starts and ends it; messages never pass through Ray.

The engine has an event loop and a thread of its own, so that Ray's calls are answered even while a node blocks its
loop. The thread survives what ends other loops (SystemExit in a task), which fails the run. CPUs are pinned before
anything imports torch.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from types import FrameType
from typing import Any, TypeVar

from flowrl.channel.endpoint import Address
from flowrl.graph.node import Node
from flowrl.runtime.activity.hostloop import HostLoop
from flowrl.runtime.checkpoints.rundir import PRIVATE
from flowrl.runtime.host.host_engine import HostEngine, HostSpec

R = TypeVar("R")
BLOCKED_S = 1.0
IMPORTING = 50_000
"""New objects between two garbage collections while modules load: nearly all of them stay. Python's 700 make
the import of vLLM take a sixth longer."""


def pin(cores: tuple[int, ...]) -> None:
    """Bind every thread of this process, and so all it starts later, to `cores`.

    On another machine than the plan's the numbers count through the cores that are there.
    """
    if not cores:
        return
    mine = sorted(os.sched_getaffinity(0))
    if not set(cores) <= set(mine):
        cores = tuple({mine[core % len(mine)] for core in cores})
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue


class HostActor:
    """Wrapped by `ray.remote` in the launcher; every method returns plain data."""

    def __init__(self, spec: HostSpec) -> None:
        self._collect_every = gc.get_threshold()
        gc.set_threshold(IMPORTING, *self._collect_every[1:])
        os.umask(PRIVATE)
        pin(spec.cores)
        self._spec = spec
        self._loop = HostLoop()
        self._thread = threading.Thread(target=self._turn_loop, name="flowrl-engine", daemon=True)
        self._thread.start()
        self._engine = asyncio.run_coroutine_threadsafe(self._make(spec), self._loop).result()
        self._done = threading.Event()
        self._still: tuple[str, str, float] | None = None
        """(node, line of code, since) of a loop that stands still."""
        threading.Thread(target=self._watch, name="flowrl-watch", daemon=True).start()

    @staticmethod
    async def _make(spec: HostSpec) -> HostEngine:
        return HostEngine(spec)

    def _turn_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException as error:  # what a task raised through the loop: it is told, and the loop goes on
                if self._loop.is_closed():
                    os._exit(1)  # the end of this process is heard of
                self._loop.call_soon(self._engine.fail, error)

    async def _on_loop(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def open(self) -> dict[str, Any]:
        return await self._on_loop(self._engine.open())

    async def wire(self, addresses: Mapping[str, Address], gangs: Mapping[str, str]) -> dict[str, Any] | None:
        return await self._on_loop(self._engine.guarded(self._engine.wire(addresses, gangs)))

    async def setup(self) -> dict[str, Any] | None:
        """None, or the failure of a node's set-up as plain data."""
        failure: dict[str, Any] | None = await self._on_loop(self._engine.guarded(self._engine.setup()))
        gc.freeze()  # what is there now stays: a collection of all of it would stand in the way of messages
        gc.set_threshold(*self._collect_every)
        return failure

    async def run(self) -> dict[str, Any] | None:
        """Until every node here has ended. None, or the failure that ended the host."""
        return await self._on_loop(self._engine.guarded(self._engine.run()))

    async def waits(self) -> list[dict[str, Any]]:
        """What every node here is doing and waiting for; of a loop that stands still, what holds it."""
        asking = asyncio.ensure_future(self._on_loop(self._engine.waits()))
        while not asking.done():
            if (still := self._still) is not None:
                return [self._standing_still(*still)]
            await asyncio.wait((asking,), timeout=BLOCKED_S)
        return asking.result()

    def _standing_still(self, node: str, where: str, since: float) -> dict[str, Any]:
        replica_id = f"{node}/{self._spec.places[0].replica}" if node else self._spec.host
        waits = [("return", where, time.monotonic() - since)]
        return {
            "node": replica_id,
            "alive": [where],
            "moves": -1,
            "waits": waits,
            "open": 0,
            "ended": False,
            "still": where,
        }

    async def stop(self) -> list[dict[str, Any]]:
        """Close nodes and sockets; in whatever state the run is. Returns how nodes failed to close."""
        self._done.set()
        return await self._on_loop(self._engine.stop())

    def _watch(self) -> None:
        """Report a loop that stood still for a second, with the line of code that holds it."""
        while not self._done.wait(BLOCKED_S):
            alive = threading.Event()
            start = time.monotonic()
            self._loop.call_soon_threadsafe(alive.set)
            if alive.wait(BLOCKED_S):
                continue
            frame = sys._current_frames().get(self._thread.ident or 0)
            culprit = _culprit(frame)
            self._still = (*culprit, start)
            alive.wait()
            self._still = None
            self._loop.call_soon_threadsafe(self._engine.loop_blocked, culprit, time.monotonic() - start)


def _culprit(frame: FrameType | None) -> tuple[str, str]:
    """(node, "file:line in function") of the innermost frame that belongs to a node, "" if none does."""
    where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Node):
            return owner.name, f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "", where
