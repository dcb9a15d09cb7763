"""Which nodes receive a trainer's weights, and how. Trainer ranks and generators get the same routes.

`WeightTransport` names the ways that exist. The plan chooses one for every reader; `flowrl.weights.publish` makes the
sender behind each, `flowrl.weights.receive` the receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from flowrl.errors import ConfigError


class WeightTransport(StrEnum):
    """A way to transport weights, by its name in `graph.json` and in manifests."""

    SHM = "shm"
    """Host memory of the machine on which both trainer and reader are."""
    TCP = "tcp"
    """Host memory, copied once to every other machine."""
    NCCL = "nccl"
    """A broadcast between GPUs."""

    @property
    def in_host_memory(self) -> bool:
        """Whether the weights wait in host memory, so that trainer and reader need not work at the same time."""
        return self in (WeightTransport.SHM, WeightTransport.TCP)

    def at(self, place: str) -> str:
        """Where a reader finds a version: the value of `Weights.transport`."""
        return f"{self}:{place}"

    @classmethod
    def parse(cls, location: str) -> tuple[WeightTransport, str]:
        """(transport, place) of a location that `at` made."""
        name, _, place = location.partition(":")
        return cls(name), place


@dataclass(frozen=True)
class WeightRoute:
    """One generator replica as a reader of one trainer's weights."""

    consumer: str
    """Node replica, as "generator/1"."""
    transport: WeightTransport
    num_workers: int = 1
    """vLLM worker processes of the replica: its GPUs, 1 on CPU."""
    dtype: str = ""
    """Dtype of the reader's parameters, from `Facts.weights_dtype`."""


def through_hosts(routes: Sequence[WeightRoute]) -> tuple[WeightRoute, ...]:
    """The same readers, reached through host memory; for small data that needs no GPU transfer."""
    local, remote = WeightTransport.SHM, WeightTransport.TCP
    return tuple(route if route.transport is local else replace(route, transport=remote) for route in routes)


def common_transport(routes: Sequence[WeightRoute]) -> WeightTransport:
    """The transport that serves all readers; shared memory if there are none."""
    kinds = {route.transport for route in routes} or {WeightTransport.SHM}
    if len(kinds) == 1:
        return kinds.pop()
    if all(kind.in_host_memory for kind in kinds):
        return WeightTransport.TCP
    readers = ", ".join(f"{route.consumer} by {route.transport}" for route in routes)
    raise ConfigError(
        f"one trainer cannot publish between GPUs and through host memory at once ({readers}); "
        "place its generators in the same way: all on their own GPUs, or all without GPUs"
    )


NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of weights, by dtype."""


def readers_dtype(dtypes: Iterable[str], *, auto: str) -> str | None:
    """The widest dtype of readers that declare `dtypes`; "auto" is replaced by `auto`.

    None if there are no readers, if one dtype is not known, or if two different dtypes are equally wide.
    """
    found = {auto if dtype == "auto" else dtype for dtype in dtypes}
    if not found or not found <= NUM_BYTES.keys():
        return None
    most = max(NUM_BYTES[dtype] for dtype in found)
    first, *others = (dtype for dtype in found if NUM_BYTES[dtype] == most)
    return None if others else first


def rank_offset(routes: Sequence[WeightRoute], consumer: str) -> int:
    """The first rank of `consumer`'s workers in the group whose rank 0 is the sending trainer rank."""
    offset = 1
    for route in routes:
        if route.consumer == consumer:
            return offset
        offset += route.num_workers
    raise ValueError(f"{consumer} is not among the readers {[route.consumer for route in routes]}")


def world_size(routes: Sequence[WeightRoute]) -> int:
    """The number of processes: the sender and every worker of every reader."""
    return 1 + sum(route.num_workers for route in routes)
