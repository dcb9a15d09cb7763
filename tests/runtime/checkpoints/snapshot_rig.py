"""Runs a graph's host in this process, cuts it as a checkpoint does, and lets a second host go on from the snapshot.

Everything is the real engine but for the driver, which here gives out tickets and asks for cuts, and Ray. Nodes work
in virtual time, so that a cut finds the same moment each time. What they have to tell goes into SEEN.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from flowrl import Cluster, Machine
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.load import rebuild_graph
from flowrl.runtime.checkpoints.snapshots import read_state
from flowrl.runtime.driver.run_checkpoints import Snapshotter
from flowrl.runtime.process.context import ReplicaPlace
from flowrl.runtime.process.engine import ProcessEngine, ProcessSpec
from flowrl.testing import VirtualClock
from flowrl.testing.rig_engine import NoAccounting, RigOrders
from flowrl.wire.connection import IpcTransport
from flowrl.wire.endpoint import Endpoint

GRAPHS = Path(__file__).parent / "graphs_snapshot"
CLUSTER = Cluster((Machine((0, 1), memory_bytes=8 << 30),))
SEEN: list[Any] = []
LOST: list[Any] = []
"""Ledger events of samples that were lost."""

TOLD: list[str] = []
"""Warnings."""


class OneHost(RigOrders):
    """Whose process ends with a snapshot."""

    async def ask_all(self, kind: str, body: Callable[[str], Any] = lambda host: {}) -> list[Any]:
        return [] if kind == "resume" else await super().ask_all(kind, body)


@asynccontextmanager
async def running(name: str, config: dict[str, Any], directory: Path | None) -> AsyncIterator[tuple[Snapshotter, Any]]:
    """The graph's host at work, from the checkpoint in `directory` if there is one: (its snapshotter, its task)."""
    file = str(GRAPHS / f"{name}.py")
    graph, _ = rebuild_graph(file, config)
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
    endpoint.on("samples", lambda host, body: None)
    endpoint.on("ended", lambda host, body: None)
    endpoint.on("statistics", lambda host, body: None)
    endpoint.on("warning", lambda host, body: TOLD.append(f"{body['node']}: {body['text']}"))
    sizes = {replica_id.split("/")[0]: 0 for replica_id in host.nodes}
    for replica_id in host.nodes:
        sizes[replica_id.split("/")[0]] += 1
    places = tuple(
        ReplicaPlace(node, int(index), sizes[node], "/tmp", 0, None, (0,), (), None, 0, run_id)
        for node, index in (replica_id.split("/") for replica_id in host.nodes)
    )
    engine = ProcessEngine(
        ProcessSpec(host.name, run_id, os.getpid(), file, config, places, plan, (0,), IpcTransport())
    )
    address = (await engine.open())["address"]
    endpoint.connect(host.name, address)
    await engine.wire({"driver": endpoint.address, host.name: address}, dict.fromkeys(sizes, ""))
    await engine.setup()
    orders = OneHost(endpoint, plan, [host.name], None)  # type: ignore[arg-type]
    snapshotter = Snapshotter(orders, graph.nodes, Path("/tmp"), keep=0)
    if directory is not None:
        await snapshotter.put_back(read_state(directory))
    task = asyncio.create_task(engine.guarded(engine.run()))
    try:
        yield snapshotter, task
    finally:
        await engine.stop()
        await endpoint.close()


def run_with_cuts(name: str, tmp_path: Path, *cuts_s: float, **config: Any) -> None:
    """Run the graph; after each of `cuts_s` virtual seconds snapshot it, throw its host away, go on with a new one."""

    async def body() -> None:
        for told in (SEEN, LOST, TOLD):
            told.clear()
        directory: Path | None = None
        for number, cut_s in enumerate(cuts_s):
            async with running(name, config, directory) as (snapshotter, task):
                await asyncio.sleep(cut_s)  # of virtual time
                directory = tmp_path / f"cut{number}"
                directory.mkdir(parents=True)
                taking = asyncio.create_task(snapshotter.take({}, directory, NoAccounting()))
                await asyncio.wait((taking, task), timeout=20, return_when=asyncio.FIRST_COMPLETED)
                assert taking.done(), task.result() if task.done() else "the snapshot does not come to an end"
                taking.result()
        async with running(name, config, directory) as (_, task), asyncio.timeout(30):
            assert await task is None

    VirtualClock().run(body())
