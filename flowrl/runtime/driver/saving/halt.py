"""Halts trainers between batches for a checkpoint: all ranks of a gang must have finished the same batches.

The main trainer, and trainers that train the same batches, wait at a barrier (`barrier.BatchEnd`). The other trainers
count their own versions, so no version of the main trainer tells which batch they are at. They are halted: each rank's
gate closes, and a rank that has taken fewer batches than another rank also takes the missing batches. All ranks of a
gang are sent their parts of a batch together, so a missing part has arrived or is in transit.

Waits: for those parts. The pause for the checkpoint then waits for the work that the ranks have started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from flowrl.runtime.driver.processes.orders import Orders


@asynccontextmanager
async def halted(orders: Orders, gangs: Sequence[str]) -> AsyncIterator[None]:
    """Inside, no gang of these trainers starts a batch, and all ranks of a gang have started the same batches."""
    ranks_of = [orders.replicas(name) for name in gangs]
    try:
        await asyncio.gather(*(_halt(orders, ranks) for ranks in ranks_of))
        yield
    finally:
        await asyncio.gather(*(orders.gate(rank, "halt", open_=True) for ranks in ranks_of for rank in ranks))


async def _halt(orders: Orders, ranks: Sequence[str]) -> None:
    taken = await asyncio.gather(*(orders.gate(rank, "halt", open_=False) for rank in ranks))
    wanted = {port: max(counts[port] for counts in taken) for port in taken[0]}
    await asyncio.gather(*(orders.reach(rank, wanted) for rank in ranks))
