"""Turns of an In port, on an inbox in memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np

from flowrl.messages import Prompt
from flowrl.wire.activity import Activity, Lease
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.in_ports import Inbound
from flowrl.wire.items import OpenItems


class Taken:
    """A delivery that says whether it was acked."""

    def __init__(self, number: int) -> None:
        body = Prompt(f"s{number}", f"g{number}", f"p{number}", 0, 0, 1, number, "", np.zeros(1, np.int32))
        self.envelope = Envelope(bytes([number] * 16), number, body.group_id, 0, body)
        self.acked = False

    def ack(self) -> None:
        self.acked = True


class MemoryInbox:
    def __init__(self, deliveries: list[Taken]) -> None:
        self._deliveries: Iterator[Taken] = iter(deliveries)

    async def take(self) -> Taken:
        return next(self._deliveries)


class Losses:
    def trace_invocation(self, item: Any, *, begins: bool) -> None:
        pass


class Turns:
    """The driver's side of a lease: what was taken and given back."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.given_back = asyncio.Event()

    async def request(self, host: str, kind: str, body: dict[str, Any]) -> None:
        self.told.append(kind)

    def notify(self, host: str, kind: str, body: dict[str, Any]) -> None:
        self.told.append(kind)
        self.given_back.set()


def test_a_turn_that_is_cancelled_ends_for_freeze_and_lease_and_acks_nothing() -> None:
    async def main() -> None:
        first, driver, activity = Taken(1), Turns(), Activity("reader/0")
        inbox: Any = MemoryInbox([first, Taken(2)])
        losses: Any = Losses()
        port = Inbound(
            "reader.prompts",
            inbox,
            OpenItems("reader"),
            activity,
            losses,
            Lease("shared", "reader/0", driver),
            sink=False,
        )
        inside = asyncio.Event()

        async def read() -> None:
            async for _ in port.iterate():
                inside.set()
                await asyncio.Event().wait()

        reading = asyncio.create_task(read())
        await inside.wait()
        assert activity.working == 1
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        del reading
        gc.collect()
        await asyncio.wait_for(driver.given_back.wait(), 5)
        await asyncio.wait_for(activity.idle(), 5)
        assert (activity.working, driver.told, first.acked) == (0, ["lock", "unlock"], False)

    asyncio.run(main())
