"""Lends time-shared GPUs to the trainers during a checkpoint, one trainer after the other, to export their weights.

A trainer gets its GPU when the node that has it gives it back, at the end of that node's last open invocation. During a
pause, that end might never come, because an invocation may wait for something that is paused. So the other nodes give
their GPUs back first, while the graph still runs: they take nothing new, and get the GPUs again after the checkpoint.

Waits: for the open invocations of the nodes that have a GPU that a trainer also uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from flowrl.graph.analysis.place import HostPlan
from flowrl.runtime.driver.processes.barrier import Locks
from flowrl.runtime.driver.processes.orders import Orders


class SharedDevices:
    """The GPU leases of one run."""

    def __init__(self, locks: Locks, orders: Orders) -> None:
        self._locks = locks
        self._orders = orders

    @asynccontextmanager
    async def for_trainers(self) -> AsyncIterator[None]:
        """Inside, the GPUs that trainers share with other nodes go only to trainers."""
        trainers = set(self._orders.plan.trainers)
        sharing = [host for host in self._orders.plan.hosts if host.lease and host.gpus]
        training = {host.lease: set[str]() for host in sharing}
        for host in sharing:
            if trainers & _names(host):
                training[host.lease].add(host.name.split("/")[0])
        others = [host for host in sharing if training[host.lease] and not trainers & _names(host)]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._gate, others, open_=True)
            await self._gate(others, open_=False)
            for lease, parties in training.items():
                if parties:
                    await stack.enter_async_context(self._locks.reserved(lease, parties))
            yield

    async def _gate(self, hosts: list[HostPlan], *, open_: bool) -> None:
        replicas = [replica for host in hosts for replica in host.nodes]
        await asyncio.gather(*(self._orders.gate(replica, "devices", open_=open_) for replica in replicas))


def _names(host: HostPlan) -> set[str]:
    return {replica.partition("/")[0] for replica in host.nodes}
