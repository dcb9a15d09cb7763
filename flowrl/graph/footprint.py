"""The memory that a node replica takes, predicted from sizes: `Node.footprint`, for `flowrl check`.

The formulas are those of docs/memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowrl.graph.routes import WeightTransport

MemoryPlace = Literal["device", "host", "shm"]
"""device: the memory of each GPU of the replica, or of the machine if the replica has no GPU; host: the memory of the
machine; shm: the machine's /dev/shm."""
Stay = Literal["always", "lease", "away", "loading", "export"]
"""When a term takes memory. always; lease: while the replica holds its lease, or always if it shares no devices; away:
while it does not hold the lease; loading: while it loads; export: while a checkpoint is exported."""


@dataclass(frozen=True)
class MemoryTerm:
    """One thing that takes memory."""

    name: str
    num_bytes: int
    place: MemoryPlace = "device"
    stay: Stay = "always"


@dataclass(frozen=True)
class Share:
    """What is known about a replica's place when its memory is predicted."""

    replicas: int
    first: bool
    """Whether it is replica 0, which publishes and exports for its gang."""
    gpus: float
    device_bytes: int
    """Memory of each of its GPUs; 0: it has none, or that is unknown."""
    time_shared: bool
    token_budget: int | None
    """The most tokens of a micro-batch that it receives; None: no node declares a number."""
    longest_sample: int | None
    longest_asked: int | None = None
    """Tokens of the longest prompt or context that it is asked to continue; None: unknown."""
    sends: tuple[WeightTransport, ...] = ()
    """The transport to each reader of its weights."""
    readers: tuple[str, ...] = ()
    """Dtypes of the readers' parameters, as `Facts.weights_dtype` says."""
    receives: tuple[WeightTransport, ...] = ()


@dataclass(frozen=True)
class Footprint:
    """The memory of one replica."""

    terms: tuple[MemoryTerm, ...]
    problems: tuple[str, ...] = ()
    """Problems that exist even if no other replica takes memory, as complete sentences."""

    def num_bytes(self, *stays: Stay, place: MemoryPlace = "device") -> int:
        return sum(term.num_bytes for term in self.terms if term.place == place and term.stay in stays)
