"""The specification of a lane, as plain data, and the statistics of its ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from flowrl.channel.encoding.multiparts import lane_number
from flowrl.channel.encoding.schema import schema_of
from flowrl.messages.base import message_type


@dataclass(frozen=True)
class LaneSpec:
    """The specification of a lane. Both ends are made from equal specs."""

    name: str
    edge: str
    producer: str
    """Name of the node replica, for example "generator/0"."""
    consumer: str
    producer_host: str
    consumer_host: str
    capacity: int
    kind: Literal["queue", "latest"] = "queue"
    types: tuple[str, ...] = ()
    """Names of the message classes; both ends must have them with the same fields."""

    @property
    def number(self) -> int:
        """The 32-bit number that identifies the lane on the wire."""
        return lane_number(self.name)

    def schemas(self) -> tuple[tuple[str, int], ...]:
        """(name, schema hash) of every type, as this process knows them."""
        return tuple((name, schema_of(message_type(name)).hash) for name in self.types)


def schema_problem(spec: LaneSpec, schemas: Iterable[tuple[str, int]]) -> str:
    """Why the sender's schemas do not match those of this process, "" if they do."""
    here = dict(spec.schemas())
    for name, number in schemas:
        if here.get(name) != number:
            return (
                f"lane {spec.name!r} carries {name} of schema {number:#010x} at {spec.producer}, but "
                f"{here.get(name, 0):#010x} at {spec.consumer}; run the same code in both processes"
            )
    return ""


def session_number(producer_incarnation: int, consumer_incarnation: int) -> int:
    """The session of these two incarnations."""
    return producer_incarnation << 16 | consumer_incarnation


@dataclass(frozen=True)
class LaneStatistics:
    """Statistics of one end of a lane at one moment. The counts of the other end are 0."""

    depth: int = 0
    """Messages between the nodes: sent, or waiting at this end, and not yet taken."""
    sent: int = 0
    received: int = 0
    acked: int = 0
    unacked: int = 0
    """Messages kept until their ack."""
    unacked_bytes: int = 0
    blocked_s: float = 0.0
    """Seconds in which sends on the edge waited at this producer; all its lanes of the edge report the same value."""
    credits: int = 0
    capacity: int = 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
