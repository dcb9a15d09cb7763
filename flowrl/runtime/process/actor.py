"""The Ray actor of a process: Ray places, starts and ends it; messages never pass through Ray.

The engine has its own event loop and thread, so the actor answers Ray's calls even while a node blocks the loop. The
thread survives exceptions that end other loops (SystemExit in a task); they fail the run. The process is pinned to its
cores before anything imports torch.
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

from flowrl.graph.machine import raise_limit
from flowrl.graph.node import Node
from flowrl.machine.proxies import reach_directly
from flowrl.runtime.checkpoints.rundir import PRIVATE
from flowrl.runtime.process.engine import ProcessEngine, ProcessSpec
from flowrl.wire.activity import HostLoop
from flowrl.wire.endpoint import Address
from flowrl.wire.run_files import leave_heir

R = TypeVar("R")
BLOCKED_S = 1.0
NOBODYS_BLOCK_S = 10.0
"""Length from which a block is reported that no node's code has caused: imports of modules cause shorter ones."""
IMPORTING = 50_000
"""New objects between two garbage collections during module imports, which create mostly permanent objects. With
Python's default of 700 the import of vLLM takes a sixth longer."""


def pin_threads(cores: tuple[int, ...]) -> None:
    """Bind every thread of this process, and so every later thread, to `cores`.

    If this machine does not have these cores, the numbers are mapped, modulo their count, to the available cores.
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


def enter_directory(spec: ProcessSpec) -> None:
    """Change to the driver's working directory, if this machine has the driver's files.

    Ray starts processes of a joined cluster in its copy of the graph's directory. On a machine that does not have the
    graph's file at the driver's path, only this copy exists.
    """
    if spec.directory and os.path.isfile(spec.graph_file) and os.path.isdir(spec.directory):
        os.chdir(spec.directory)


class ProcessActor:
    """Wrapped by `ray.remote` in the launcher; every method returns plain data."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._collect_every = gc.get_threshold()
        gc.set_threshold(IMPORTING, *self._collect_every[1:])
        os.umask(PRIVATE)
        raise_limit()
        pin_threads(spec.cores)
        enter_directory(spec)
        reach_directly(*spec.machines)
        self._spec = spec
        ray = sys.modules.get("ray")
        self._gpus: list[str] = []
        """Ids of the GPUs that Ray reserves for this process; none outside of Ray."""
        if ray is not None and ray.is_initialized():
            self._gpus += ray.get_runtime_context().get_accelerator_ids()["GPU"]
        self._loop = HostLoop()
        self._thread = threading.Thread(target=self._run_loop, name="flowrl-engine", daemon=True)
        self._thread.start()

        async def make_engine() -> ProcessEngine:
            return ProcessEngine(spec)

        self._engine = asyncio.run_coroutine_threadsafe(make_engine(), self._loop).result()
        self._done = threading.Event()
        self._still: tuple[str, str, float] | None = None
        """(node, line of code, since) while the loop is blocked."""
        threading.Thread(target=self._watch_loop, name="flowrl-watch", daemon=True).start()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException as error:  # raised by a task through the loop: report it, and continue
                if self._loop.is_closed():
                    os._exit(1)  # the driver notices the end of this process
                self._loop.call_soon(self._engine.fail, error)

    async def _run_on_loop(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def open(self) -> dict[str, Any]:
        answer = await self._run_on_loop(self._engine.open())
        await asyncio.to_thread(leave_heir, self._spec.run_id)
        return {**answer, "gpus": self._gpus}

    async def wire(
        self,
        addresses: Mapping[str, Address],
        gangs: Mapping[str, str],
        devices: Mapping[str, tuple[str, ...]] | None = None,
    ) -> dict[str, Any] | None:
        """Connect the nodes. `devices`: process -> the GPUs that it sees; None: every GPU of the machine."""
        if devices is not None:  # before any node is built: nodes may ask CUDA for its devices
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[self._spec.process])
        return await self._run_on_loop(self._engine.guarded(self._engine.wire(addresses, gangs)))

    async def setup(self) -> dict[str, Any] | None:
        """Set up the nodes. Returns None, or the failure of a node's set-up as plain data."""
        failure: dict[str, Any] | None = await self._run_on_loop(self._engine.guarded(self._engine.setup()))
        gc.freeze()  # the present objects are permanent: collecting them again would delay messages
        gc.set_threshold(*self._collect_every)
        return failure

    async def run(self) -> dict[str, Any] | None:
        """Run until every node here has ended. Returns None, or the failure that ended the process."""
        return await self._run_on_loop(self._engine.guarded(self._engine.run()))

    async def waits(self) -> list[dict[str, Any]]:
        """What every node here does and waits for; if the loop is blocked, the code that blocks it."""
        asking = asyncio.ensure_future(self._run_on_loop(self._engine.waits()))
        while not asking.done():
            if (still := self._still) is not None:
                node, where, since_s = still
                return [
                    {
                        "replica_id": f"{node}/{self._spec.places[0].replica}" if node else self._spec.process,
                        "alive": [where],
                        "moves": -1,
                        "waits": [("return", where, time.monotonic() - since_s)],
                        "open": 0,
                        "ended": False,
                        "still": where,
                    }
                ]
            await asyncio.wait((asking,), timeout=BLOCKED_S)
        return asking.result()

    async def stop(self) -> list[dict[str, Any]]:
        """Close nodes and sockets, in any state of the run. Returns the nodes' failures to close."""
        self._done.set()
        return await self._run_on_loop(self._engine.stop())

    def _watch_loop(self) -> None:
        """Report when the loop is blocked for a second, with the line of code that blocks it."""
        while not self._done.wait(BLOCKED_S):
            alive = threading.Event()
            start = time.monotonic()
            self._loop.call_soon_threadsafe(alive.set)
            if alive.wait(BLOCKED_S):
                continue
            frame = sys._current_frames().get(self._thread.ident or 0)
            culprit = find_culprit(frame)
            self._still = (*culprit, start)
            alive.wait()
            self._still = None
            for_s = time.monotonic() - start
            if culprit[0] or for_s >= NOBODYS_BLOCK_S:
                self._loop.call_soon_threadsafe(self._engine.warn_of_block, culprit, for_s)


def find_culprit(frame: FrameType | None) -> tuple[str, str]:
    """(node, "file:line in function") of the innermost frame that belongs to a node, "" if none does."""
    where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Node):
            return owner.name, f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "", where
