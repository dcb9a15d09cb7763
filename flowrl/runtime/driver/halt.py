"""Trainers at a batch's end, for a checkpoint: the ranks of each gang have to stand behind the same batch.

The main trainer, and those that train the same batches, come to a barrier (`barrier.BatchEnd`). The
others make versions of their own, so that no number of the main trainer says where they stand. They are halted: each
rank's gate closes, and a rank that has taken a batch less than another takes that one too. All ranks of a gang are
sent their parts together, so it is there or on its way.

Waits: for those parts. What the ranks are doing then ends with the pause for the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from flowrl.runtime.driver.orders import Orders


@asynccontextmanager
async def halted(orders: Orders, gangs: Sequence[str]) -> AsyncIterator[None]:
    """Inside, no gang of these trainers begins a batch, and its ranks have all begun the same ones."""
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
