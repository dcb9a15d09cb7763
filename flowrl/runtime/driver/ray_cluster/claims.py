"""What Ray reserves for each host, and which GPUs each host sees.

The plan says which hosts share a device. Ray knows fractions of devices, but puts each fraction where there is room,
so one host reserves every GPU of the plan as a whole, and Ray sets no variable. In a Ray of the run's own, which no
other job uses, the plan's indices are the machine's devices. On a cluster other jobs may hold those that the plan
counted first, so the ids that Ray names are assigned to the plan's indices in order.

Invariant: a host sees the GPUs that its plan names and no others; without any it sees none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.graph.analysis.place import HostPlan

RAY_PARTS = 10_000
"""Ray counts resources in ten-thousandths. Shares are rounded down, so their sum never exceeds the whole."""


@dataclass(frozen=True)
class Claim:
    """What Ray reserves for one host."""

    cpus: float
    gpus: int


def claims(hosts: Sequence[HostPlan]) -> dict[str, Claim]:
    """Host -> its claim. Hosts that use devices in turn reserve them once: every core in equal parts, every GPU by
    the first of them."""
    taken: set[tuple[int, int]] = set()
    found = {}
    for host in hosts:
        new = {(host.machine, gpu) for gpu in host.gpus} - taken
        taken |= new
        cpus = math.floor(host.cpus / _sharers(host, hosts) * RAY_PARTS) / RAY_PARTS
        found[host.name] = Claim(cpus, len(new))
    return found


def _sharers(host: HostPlan, hosts: Sequence[HostPlan]) -> int:
    """The largest number of hosts of its lease that use one of its cores."""
    lease = [other for other in hosts if host.lease and other.lease == host.lease and other.machine == host.machine]
    return max((sum(core in other.cores for other in lease) for core in host.cores), default=1) or 1


def visible_devices(
    hosts: Sequence[HostPlan], reserved: Mapping[str, Sequence[str]], own: Sequence[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Host -> ids of the GPUs that it sees, its plan's in order. `reserved`: host -> ids that Ray reserved for it.
    `own`: the ids of the only machine's devices, if all are the run's."""
    if own is not None:
        return {host.name: tuple(own[gpu] for gpu in host.gpus) for host in hosts}
    names: dict[tuple[int, int], str] = {}
    for machine in {host.machine for host in hosts}:
        mine = [host for host in hosts if host.machine == machine]
        indices = sorted({gpu for host in mine for gpu in host.gpus})
        ids = sorted({name for host in mine for name in reserved[host.name]}, key=_by_number)
        assert len(ids) == len(indices), (machine, indices, ids)
        names |= {(machine, index): name for index, name in zip(indices, ids, strict=True)}
    return {host.name: tuple(names[host.machine, gpu] for gpu in host.gpus) for host in hosts}


def _by_number(name: str) -> tuple[int, str]:
    """Devices are named by number, or all by UUID."""
    return (int(name) if name.isdigit() else 0), name
