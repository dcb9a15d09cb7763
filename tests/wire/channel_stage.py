"""A stage in a process of its own, for test_channel_replay.py: takes, maps, sends on, and dies when told.

usage: python -m tests.wire.channel_stage ADDRESS EPOCH STEP COUNT [TRANSPORT]
Kills itself with SIGKILL right after the COUNT-th STEP ("take", "send", "ack"; "none" for never); stops itself, with
SIGSTOP, where it has a transport, with which it is on another machine.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from flowrl.graph.dispatch_rules import SHARE
from flowrl.messages import Float32, Message
from flowrl.wire import connection
from flowrl.wire.connection import Address, TcpTransport
from flowrl.wire.edges import Delivery, EndOfStream, Inbox, OutEdge
from flowrl.wire.encoding.schema import Envelope, message_id
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.items import Custody
from flowrl.wire.lanes import LaneSpec


@dataclass(frozen=True)
class Item(Message):
    index: int
    values: Float32


INTO = LaneSpec("source/0 -> map/0", "source -> map", "source/0", "map/0", "A", "M", 8, "queue", ("Item",))
BEATS = (0.1, 0.4)
"""Seconds between heartbeats, and of silence that breaks a connection."""
OUT = LaneSpec("map/0 -> sink/0", "map -> sink", "map/0", "sink/0", "M", "A", 8, "queue", ("Item",))


def to_text(address: Address | TcpTransport) -> str:
    return base64.b64encode(pickle.dumps(address)).decode()


def from_text(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def run_id(parent: int) -> str:
    """A run of its own for each process that tests: its files are removed by their run's name."""
    return f"replay {parent}"


class Fate:
    """Counts steps and ends the process at the chosen one."""

    def __init__(self, step: str, count: int, number: int = signal.SIGKILL) -> None:
        self._end = (step, count)
        self._number = number
        self._done: Counter[str] = Counter()

    def step(self, name: str) -> None:
        self._done[name] += 1
        if (name, self._done[name]) == self._end:
            os.kill(os.getpid(), self._number)


async def stage(parent: Address, incarnation: int, fate: Fate, transport: TcpTransport | None = None) -> None:
    endpoint = Endpoint(
        "M", run_id=run_id(os.getppid()), driver_pid=os.getppid(), incarnation=incarnation, transport=transport
    )
    print(to_text(await endpoint.open()), flush=True)
    endpoint.connect("A", parent)
    inbox, edge = Inbox("map.in"), OutEdge([endpoint.sender(OUT)], SHARE)
    inbox.add_lane(endpoint.receiver(INTO))
    custody: Custody[bytes] = Custody()
    deliveries: dict[bytes, Delivery] = {}
    idle = asyncio.Event()

    def ack(ids: Iterable[bytes]) -> None:
        for id in ids:
            deliveries.pop(id).ack()
            fate.step("ack")
        if not deliveries:
            idle.set()

    edge.on_taken(lambda children: ack(id for child in children for id in custody.arrived(child)))
    try:
        while True:
            delivery = await inbox.take()
            item, body = delivery.envelope, delivery.envelope.body
            fate.step("take")
            assert isinstance(body, Item)
            deliveries[item.id] = delivery
            idle.clear()
            custody.begin(item.id)
            child = Envelope(message_id([item.id], "out", 0), body=Item(body.index, np.sqrt(body.values)))
            custody.child([item.id], child.id)
            await edge.send(child)
            fate.step("send")
            ack(custody.end(item.id))
    except EndOfStream:
        edge.close()
    await idle.wait()
    await endpoint.request("A", "done")
    await endpoint.close()


if __name__ == "__main__":
    _, address, incarnation, step, count, *apart = sys.argv
    if apart:
        connection.BEAT_EVERY_S, connection.SILENT_S = BEATS
    fate = Fate(step, int(count), signal.SIGSTOP if apart else signal.SIGKILL)
    uvloop.run(stage(from_text(address), int(incarnation), fate, from_text(apart[0]) if apart else None))
