"""What Ray reserves for each host, and which GPUs each host sees.

The plan says which hosts share a device. Ray supports fractions of devices, but places each fraction wherever there is
room. So each GPU of the plan is reserved as a whole, by one host, and Ray does not set CUDA_VISIBLE_DEVICES. In the
run's own Ray, which no other job uses, the plan's indices are the machine's devices. On a joined cluster, other jobs
may use the devices that the plan counted first, so the ids that Ray names are assigned to the plan's indices in order.

Invariant: a host sees the GPUs that its plan names and no others; a host whose plan names none sees none.
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
    """Host -> its claim. Hosts that share devices by a lease reserve them once: each core in equal parts, each GPU by
    the first of these hosts."""
    taken: set[tuple[int, int]] = set()
    found = {}
    for host in hosts:
        new = {(host.machine, gpu) for gpu in host.gpus} - taken
        taken |= new
        cpus = math.floor(host.cpus / _sharers(host, hosts) * RAY_PARTS) / RAY_PARTS
        found[host.name] = Claim(cpus, len(new))
    return found


def _sharers(host: HostPlan, hosts: Sequence[HostPlan]) -> int:
    """The largest number of hosts of the same lease that use one of this host's cores."""
    lease = [other for other in hosts if host.lease and other.lease == host.lease and other.machine == host.machine]
    return max((sum(core in other.cores for other in lease) for core in host.cores), default=1) or 1


def visible_devices(
    hosts: Sequence[HostPlan], reserved: Mapping[str, Sequence[str]], own: Sequence[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Host -> ids of the GPUs that it sees, in the order of its plan. `reserved`: host -> ids that Ray reserved for it.
    `own`: the ids of the devices of the only machine, if all of them are the run's."""
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
    """Sort key of device names: either all are numbers, or all are UUIDs."""
    return (int(name) if name.isdigit() else 0), name
