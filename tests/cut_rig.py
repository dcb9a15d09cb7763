"""Runs a graph's host in this process, cuts it as a checkpoint does, and lets a second host go on from the cut.

Everything is the real engine but for the driver, which here gives out tickets and asks for cuts, and Ray. What a
graph's nodes have to tell goes into SEEN.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from flowrl import Cluster, Machine
from flowrl.channel.endpoint import Endpoint
from flowrl.graph.load import rebuild
from flowrl.graph.plan import make_plan
from flowrl.runtime.checkpoint import read_state
from flowrl.runtime.context import Place
from flowrl.runtime.cutter import Cutter
from flowrl.runtime.engine import HostEngine, HostSpec

GRAPHS = Path(__file__).parent / "graphs_cut"
CLUSTER = Cluster((Machine((0, 1), memory_bytes=8 << 30),))
SEEN: list[Any] = []
LOST: list[Any] = []
"""Ledger events of samples that were lost."""

TOLD: list[str] = []
"""Warnings."""


class Driver:
    """What `Cutter` needs of a driver, for one host."""

    def __init__(self, endpoint: Endpoint, engine: HostEngine, graph: Any, plan: Any) -> None:
        self.hosts = {engine.spec.host: None}
        self.books: Any = self
        self.job: Any = self
        self.tickets: Any = self
        self.versions: dict[str, int] = {}
        self.graph, self.plan = graph, plan
        self._endpoint = endpoint
        self._engine = engine

    async def ask(self, host: str, kind: str, body: Any = None) -> Any:
        return await self._endpoint.request(host, kind, body if body is not None else {})

    async def ask_hosts(self, kind: str, body: Any = lambda host: {}) -> list[Any]:
        if kind == "thaw":  # the process of a cut ends here
            return []
        return [await self.ask(host, kind, body(host)) for host in self.hosts]

    async def on_node(self, track: str, method: str, **arguments: Any) -> Any:
        (host,) = self.hosts
        return await self.ask(host, "node", {"track": track, "method": method, "arguments": arguments})

    def replicas(self, node: str) -> list[str]:
        return [track for track in self._engine.replicas if track.startswith(f"{node}/")]

    head = ""

    @property
    def ledger(self) -> Driver:
        return self

    def frozen(self) -> Driver:
        return self

    def copy(self, path: Path) -> None:
        pass


@asynccontextmanager
async def running(name: str, config: dict[str, Any], directory: Path | None) -> AsyncIterator[tuple[Cutter, Any]]:
    """The graph's host at work, from the checkpoint in `directory` if there is one: (its cutter, its task)."""
    file = str(GRAPHS / f"{name}.py")
    graph, _ = rebuild(file, config)
    plan = make_plan(graph, CLUSTER)
    (host,) = plan.hosts
    run_id = uuid.uuid4().hex[:10]
    tickets = count()
    endpoint = Endpoint("driver", run_id=run_id, driver_pid=os.getpid())
    await endpoint.open()

    async def admit(host: str, body: Any) -> int:
        return next(tickets)

    endpoint.on("admit", admit)
    endpoint.on("ledger", lambda host, body: LOST.extend(event for event in body["events"] if event[0] == "lost"))
    endpoint.on("ended", lambda host, body: None)
    endpoint.on("statistics", lambda host, body: None)
    endpoint.on("warning", lambda host, body: TOLD.append(f"{body['node']}: {body['text']}"))
    sizes = {track.split("/")[0]: 0 for track in host.nodes}
    for track in host.nodes:
        sizes[track.split("/")[0]] += 1
    places = tuple(
        Place(node, int(index), sizes[node], "/tmp", 0, None, (0,), (), None, 0, run_id)
        for node, index in (track.split("/") for track in host.nodes)
    )
    engine = HostEngine(HostSpec(host.name, run_id, os.getpid(), file, config, places, plan, (0,), False))
    address = (await engine.open())["address"]
    endpoint.connect(host.name, address)
    await engine.wire({"driver": endpoint.address, host.name: address}, dict.fromkeys(sizes, ""))
    await engine.setup()
    cutter = Cutter(Driver(endpoint, engine, graph, plan))  # type: ignore[arg-type]
    if directory is not None:
        await cutter.put_back(read_state(directory))
    task = asyncio.create_task(engine.guarded(engine.run()))
    try:
        yield cutter, task
    finally:
        await engine.stop()
        await endpoint.close()


def run_with_cuts(name: str, tmp_path: Path, *cuts_s: float, **config: Any) -> None:
    """Run the graph; after each of `cuts_s` seconds cut it, throw its host away, and go on with a new one."""

    async def body() -> None:
        for told in (SEEN, LOST, TOLD):
            told.clear()
        directory: Path | None = None
        for number, cut_s in enumerate(cuts_s):
            async with running(name, config, directory) as (cutter, task):
                await asyncio.sleep(cut_s)
                directory = tmp_path / f"cut{number}"
                directory.mkdir()
                taking = asyncio.create_task(cutter.take({}, directory))
                await asyncio.wait((taking, task), timeout=20, return_when=asyncio.FIRST_COMPLETED)
                assert taking.done(), task.result() if task.done() else "the cut does not come to an end"
                taking.result()
        async with running(name, config, directory) as (_, task), asyncio.timeout(30):
            assert await task is None

    asyncio.run(body())
