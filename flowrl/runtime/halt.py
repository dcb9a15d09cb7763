"""Trainers at a batch's end, for a checkpoint: the ranks of each gang have to stand behind the same batch.

The main trainer, and those that train the same batches, come to a barrier (`flowrl.runtime.barrier.BatchEnd`). The
others make versions of their own, so that no number of the main trainer says where they stand. They are halted: each
rank's gate closes, and a rank that has taken a batch less than another takes that one too. All ranks of a gang are
sent their parts together, so it is there or on its way.

Waits: for those parts. What the ranks are doing then ends with the freeze of the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.runtime.driver import Driver


@asynccontextmanager
async def halted(driver: Driver) -> AsyncIterator[None]:
    """Inside, no trainer with versions of its own begins a batch, and its ranks have all begun the same ones."""
    nodes = driver.job.graph.nodes
    gangs = [driver.replicas(name) for name in driver.job.plan.own_clock if nodes[name].gang]
    try:
        await asyncio.gather(*(_halt(driver, ranks) for ranks in gangs))
        yield
    finally:
        await asyncio.gather(*(driver.gate(rank, "halt", open_=True) for ranks in gangs for rank in ranks))


async def _halt(driver: Driver, ranks: list[str]) -> None:
    taken = await asyncio.gather(*(driver.gate(rank, "halt", open_=False) for rank in ranks))
    wanted = {port: max(counts[port] for counts in taken) for port in taken[0]}
    await asyncio.gather(*(driver.reach(rank, wanted) for rank in ranks))
