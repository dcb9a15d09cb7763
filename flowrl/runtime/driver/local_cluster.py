"""A run in one process: its hosts are objects on the driver's own event loop, in place of Ray's actors.

`flowrl run --here` uses them, and so do the tests of graphs. A graph is made to fit into one process: a trainer has one
rank, and what needs a GPU is refused.

The loop of such a run (`HereLoop`) counts only the time in which it runs. While a node stands in a debugger, or blocks
the loop in another way, nothing else of the run moves, so no time-out and no watch may count that time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.graph import Graph
from flowrl.runtime.process.engine import ProcessEngine, ProcessSpec
from flowrl.wire.activity import NodeLoop


class LocalCluster:
    """A stand-in for `RayCluster`: it starts hosts in this process, and has no processes that could die."""

    started = True
    lost = ""
    addresses: tuple[str, ...] = ()
    limit_s = 60.0

    def __init__(self, engine: Callable[[ProcessSpec], ProcessEngine] = ProcessEngine) -> None:
        self.actors: dict[str, LocalHost] = {}
        self.engine = engine

    def place(self, slots: Any) -> None:
        """There are no devices to reserve."""

    def own_devices(self) -> None:
        """Nothing to do: the device names of every host are made up."""

    def processes(self) -> dict[str, int]:
        return {}

    def head(self) -> None:
        return None

    def spawn(self, actor_class: type, index: int, slot: Any, spec: ProcessSpec) -> LocalHost:
        self.actors[slot.process] = LocalHost(self.engine(spec), slot.gpus)
        return self.actors[slot.process]

    def kill(self, host: str) -> None:
        """A host has no process; `stop` has cancelled its tasks."""

    def stop(self) -> None:
        """There is no Ray to stop."""


class LocalHost:
    """One host's engine with the methods of `ProcessActor`."""

    def __init__(self, engine: ProcessEngine, num_gpus: int) -> None:
        self.engine = engine
        self._gpus = [f"{engine.spec.process}/{index}" for index in range(num_gpus)]
        """Names of the GPUs that Ray would reserve."""
        self.open = LocalMethod(self._opened)
        self.wire = LocalMethod(lambda addresses, gangs, devices: engine.guarded(engine.wire(addresses, gangs)))
        self.setup = LocalMethod(lambda: engine.guarded(engine.setup()))
        self.run = LocalMethod(lambda: engine.guarded(engine.run()))
        self.waits = LocalMethod(engine.waits)
        self.stop = LocalMethod(engine.stop)

    async def _opened(self) -> dict[str, Any]:
        return {**await self.engine.open(), "gpus": self._gpus}


class HereCluster(LocalCluster):
    """The hosts of `flowrl run --here`, whose nodes load their models side by side, after all imports."""

    def __init__(self, engine: Callable[[ProcessSpec], ProcessEngine]) -> None:
        super().__init__(engine)
        self._imported: asyncio.Task[None] | None = None

    def spawn(self, actor_class: type, index: int, slot: Any, spec: ProcessSpec) -> LocalHost:
        host = super().spawn(actor_class, index, slot, spec)
        host.setup = LocalMethod(lambda: host.engine.guarded(self._set_up(host.engine)))
        return host

    async def _set_up(self, engine: ProcessEngine) -> None:
        if self._imported is None:
            self._imported = asyncio.create_task(asyncio.to_thread(self._import_packages))
        await asyncio.shield(self._imported)
        await engine.setup()

    def _import_packages(self) -> None:
        for host in self.actors.values():
            for replica in host.engine.replicas.values():
                replica.node.preload()

    def stop(self) -> None:
        """Let go of what the nodes had: a library's last words would come when Python has ended."""
        self.actors.clear()
        gc.collect()


class LocalMethod:
    """A coroutine function that is called as a method of a Ray actor: `await wrap_future(m.remote(...).future())`."""

    def __init__(self, body: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._body = body

    def remote(self, *args: Any) -> LocalReference:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        task = asyncio.get_running_loop().create_task(self._body(*args))
        task.add_done_callback(lambda _: _settle(task, answer))
        return LocalReference(answer)


@dataclass(frozen=True)
class LocalReference:
    """What `remote` returns."""

    answer: concurrent.futures.Future[Any]

    def future(self) -> concurrent.futures.Future[Any]:
        return self.answer


def _settle(task: asyncio.Task[Any], answer: concurrent.futures.Future[Any]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    if task.cancelled():
        answer.set_exception(RuntimeError("the call was cancelled"))
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


MOST_COUNTED_S = 0.1
"""The most that is counted of the time between two looks for events: more of it, the loop stood."""


class PausingSelector(selectors.DefaultSelector):
    """Measures for how long the loop has stood in all: in a debugger, or in code that blocks it."""

    def __init__(self) -> None:
        super().__init__()
        self._before_s = 0.0
        """Up to the last look for events."""
        self._looked_s = time.monotonic()

    @property
    def stood_s(self) -> float:
        """Up to now; it grows while the loop stands."""
        return self._before_s + max(0.0, time.monotonic() - self._looked_s - MOST_COUNTED_S)

    def select(self, timeout: float | None = None) -> Any:
        self._before_s = self.stood_s
        self._looked_s = math.inf  # waiting for events is no standing
        events = super().select(timeout)
        self._looked_s = time.monotonic()
        return events


class HereLoop(NodeLoop):
    """The loop of a run in one process; its time leaves out the time in which it stood."""

    def __init__(self) -> None:
        self._pauses = PausingSelector()
        super().__init__(self._pauses)

    def time(self) -> float:
        return super().time() - self._pauses.stood_s


def fit_here(graph: Graph) -> list[str]:
    """Make the graph fit into one process; returns what was changed, as sentences. Raises ConfigError where it cannot.

    Nodes that took turns on the cores of a machine do so in one process, too.
    """
    changes = []
    for name, placed in graph.placed.items():
        if placed.gpus_each:
            raise ConfigError(
                f"--here: node {name} has {placed.gpus_each:g} GPUs, and one process cannot divide GPUs between vLLM "
                "and a trainer; leave --here out, or debug on the CPU with FLOWRL_DEVICE=cpu and a small model"
            )
        if not placed.node.gang:
            continue
        for shared in ("sequence_parallel_size", "tensor_parallel_size"):
            if getattr(placed.node, shared, 1) > 1:
                setattr(placed.node, shared, 1)
                changes.append(f"{name} has {shared} 1, because its ranks need processes")
        if placed.replicas > 1:
            graph.placed[name] = replace(placed, replicas=1)
            changes.append(f"{name} has 1 rank instead of {placed.replicas}, because ranks need processes")
    return changes


class HereProcess(ProcessEngine):
    """The engine of a host in `flowrl run --here`."""

    def build_graph(self) -> Graph:
        graph = super().build_graph()
        fit_here(graph)
        return graph
