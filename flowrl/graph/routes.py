"""Which nodes receive a trainer's weights, and how. Trainer ranks and generators get the same routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class WeightRoute:
    """One generator replica as a reader of one trainer's weights."""

    consumer: str
    """Node replica, as "generator/1"."""
    transport: str
    """shm | tcp | nccl | ipc"""
    num_workers: int = 1
    """vLLM worker processes of the replica: its GPUs, 1 on CPU."""


def through_hosts(routes: Sequence[WeightRoute]) -> tuple[WeightRoute, ...]:
    """The same readers, reached through host memory; for small data that needs no GPU transfer."""
    return tuple(route if route.transport == "shm" else replace(route, transport="tcp") for route in routes)


def common_transport(routes: Sequence[WeightRoute]) -> str:
    """The transport that serves all readers; shared memory if there are none."""
    kinds = {route.transport for route in routes}
    if kinds <= {"shm"}:
        return "shm"
    if kinds <= {"shm", "tcp"}:
        return "tcp"
    if len(kinds) == 1:
        return kinds.pop()
    readers = ", ".join(f"{route.consumer} by {route.transport}" for route in routes)
    raise ConfigError(
        f"one trainer cannot publish over different GPU transports at once ({readers}); "
        "place its generators in the same way: all on their own GPUs, all on the trainer's, or all without GPUs"
    )


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
