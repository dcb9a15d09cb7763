"""Assigns each node replica to a process, and cores and GPUs to each process.

Cheap nodes (no cpus, no gpus) share the host "core". Every replica of another node has its own host;
nodes that are `together` share one, replica by replica. Hosts of one `time_share` share devices.

Invariant: a core or GPU belongs to one host, or to several that requested a part of it or use it alternately. The
ranks of a gang are on different GPUs, because NCCL refuses two ranks on one.

If the machine's links are known, a process with several GPUs, and the ranks of a gang, get GPUs with the fastest
links between them (`linked`), and every host gets cores on the NUMA nodes of its GPUs. If a gang with its class's
default number of cores does not fit, its ranks share one rank's cores, because they work in lockstep anyway. Anything
else that does not fit is reported and not placed. Cores that are left go to hosts with GPUs. On a machine without
GPUs where all hosts take turns, each of them has all cores.

Which of the free GPUs a process or gang gets: sets of GPUs are compared first by their worst link (NVLink, one NUMA
node, several nodes), then by the sum of their links, then by their links to the free GPUs that are left: these should
be few and slow. Ties are decided by plain order, so where all links are equal the choice is the same as where they
are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import comb
from typing import Literal

from flowrl.graph.graph import Graph, Placed
from flowrl.graph.machine import NVLINK, Cluster, GpuLinks, Machine

MOST_SETS = 2000
"""If there are at most this many sets, all are compared; if more, only those that grow from each GPU by its best
links."""


def gang_gpus(free: Sequence[int], count: int) -> list[int]:
    """`count` of the free devices: a block of consecutive numbers that starts at a multiple of its size if there is
    one, else any block, else the first devices. Devices with neighbouring numbers usually have the fastest link and the
    same memory."""
    there = set(free)
    blocks = [range(first, first + count) for first in free if there.issuperset(range(first, first + count))]
    aligned = [block for block in blocks if count and block[0] % count == 0]
    return list(next(iter([*aligned, *blocks]), free[:count]))


def best_linked(
    links: GpuLinks, free: Sequence[int], count: int, *, near: Sequence[int] = (), further: int = 0
) -> list[int]:
    """Choose `count` of the free GPUs, for a process or for the next rank of a gang.

    `near`: the GPUs of the gang's ranks so far, in their order. `further`: how many more GPUs its later ranks need.
    """
    size = min(len(free), count + further)
    if not count or size < count:
        return list(free[:count])

    # The plain choice comes first, so that it wins ties.
    candidates: list[Sequence[int]] = [gang_gpus(free, size)]
    known = sorted({*free, *near})
    if len({links.closeness(one, other) for one, other in combinations(known, 2)}) != 1:
        if comb(len(free), size) <= MOST_SETS:
            candidates += combinations(free, size)
        else:
            candidates += (_grow_set(links, first, free, size, near) for first in free)

    def rate_links(chosen: Sequence[int]) -> tuple[int, int, int]:
        """The worst link as 2 NVLink, 1 one NUMA node, 0 several nodes; then all links; then the links given up."""
        inside = [links.closeness(one, other) for one, other in combinations((*near, *chosen), 2)]
        worst = min(inside, default=0)
        left = [gpu for gpu in free if gpu not in chosen]
        broken = sum(links.closeness(one, other) for one in chosen for other in left)
        return 2 if worst > NVLINK else min(worst, 1), sum(inside), -broken

    # Each GPU follows the one to which it has the best link, because consecutive ranks exchange most.
    best: Sequence[int] = max(candidates, key=rate_links)
    rest = sorted(best)
    chain = [*near[-1:]] or [rest.pop(0)]
    while rest:
        chain.append(max(rest, key=lambda gpu: links.closeness(chain[-1], gpu)))
        rest.remove(chain[-1])
    return chain[len(near[-1:]) :][:count]


def _grow_set(links: GpuLinks, first: int, free: Sequence[int], size: int, near: Sequence[int]) -> list[int]:
    """`size` free GPUs: `first`, and one by one those with the best links to the others and to `near`."""
    chosen = [first]
    while len(chosen) < size:
        rest = [gpu for gpu in free if gpu not in chosen]
        chosen.append(max(rest, key=lambda gpu: sum(links.closeness(gpu, one) for one in (*near, *chosen))))
    return sorted(chosen)


CORE = "core"
ROUNDING = 1e-6
MOST_SPARE = 15
"""The most cores that a GPU gets in addition to those that its hosts request; no process uses more."""
CoresFrom = Literal["", "default", "given", "left over", "in turns"]
"""Why a host has its cores: its class's default, a number that was given, further cores that no host requested, or
those of all hosts with which it takes turns. "" for the host "core", which has no cores of its own."""


@dataclass(frozen=True)
class HostPlan:
    """One process of the run."""

    name: str
    """ "core", or "generator/0" after its first node."""
    nodes: tuple[str, ...]
    """Node replicas in it, as "reward/1"."""
    machine: int = 0
    """Index into the cluster's machines."""
    cpus: float = 0
    cores: tuple[int, ...] = ()
    """Cores of that machine to bind to; empty: not bound."""
    num_gpus: float = 0
    gpus: tuple[int, ...] = ()
    """Indices of that machine's GPUs."""
    lease: str = ""
    """Name of the lease under which hosts use the same devices alternately, "" if the host does not share devices."""
    cores_from: CoresFrom = ""


@dataclass(frozen=True)
class PlacedUnit:
    """Nodes that share hosts, replica by replica, and the needs of each of these hosts."""

    nodes: tuple[Placed, ...]
    cpus: float
    gpus: float

    @property
    def name(self) -> str:
        return self.nodes[0].name

    @property
    def replicas(self) -> int:
        return self.nodes[0].replicas

    @property
    def gang(self) -> bool:
        """Whether its replicas are ranks of one gang."""
        return any(placed.node.gang for placed in self.nodes)

    @property
    def shrinks(self) -> bool:
        """Whether this is a gang with its class's default cpus; then its ranks may share one rank's cores."""
        gang = all(placed.node.gang or not placed.heavy for placed in self.nodes)
        return gang and self.replicas > 1 and all(placed.cpus is None for placed in self.nodes)


@dataclass(frozen=True)
class DeviceSlot:
    """The devices of one host."""

    machine: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...]


class Devices:
    """Cores and GPUs that are still free, as fractions of one device."""

    def __init__(
        self,
        machines: Iterable[tuple[int, Iterable[int], Iterable[int]]],
        links: Mapping[int, GpuLinks] | None = None,
    ) -> None:
        self._machines = [
            (machine, dict.fromkeys(cores, 1.0), dict.fromkeys(gpus, 1.0)) for machine, cores, gpus in machines
        ]
        self.links: Mapping[int, GpuLinks] = links or {}
        """Machine -> how its GPUs are joined, where that is known."""

    @staticmethod
    def of_cluster(cluster: Cluster) -> Devices:
        links = {at: machine.links for at, machine in enumerate(cluster.machines) if machine.links is not None}
        return Devices(((index, m.cores, range(m.gpus)) for index, m in enumerate(cluster.machines)), links)

    def take_devices(
        self, cpus: float, gpus: float, *, apart: Iterable[DeviceSlot] = (), further: float = 0
    ) -> DeviceSlot | None:
        """Take devices from the first machine that has enough, without the GPUs of `apart`; None if no machine has.

        The GPUs are close to those of `apart` and leave room for `further` more GPUs close to them. The cores are on
        the NUMA nodes of the GPUs, if these have enough.
        """
        used = [(slot.machine, gpu) for slot in apart for gpu in slot.gpus]
        for machine, cores_left, gpus_left in self._machines:
            links = self.links.get(machine)
            choose = gang_gpus
            if links is not None:
                near = [gpu for index, gpu in used if index == machine]
                choose = partial(best_linked, links, near=near, further=int(further))
            boards = _pick_devices({gpu: n for gpu, n in gpus_left.items() if (machine, gpu) not in used}, gpus, choose)
            if boards is None:
                continue
            beside = set() if links is None else {core for gpu in boards for core in links.cores[gpu]}
            local = {core: left for core, left in cores_left.items() if core in beside}
            cores = (_pick_devices(local, cpus) if local else None) or _pick_devices(cores_left, cpus)
            if cores is None:
                continue
            for core, part in cores.items():
                cores_left[core] -= part
            for gpu, part in boards.items():
                gpus_left[gpu] -= part
            return DeviceSlot(machine, tuple(sorted(cores)), tuple(sorted(boards)))
        return None

    def free_cores(self, machine: int) -> tuple[int, ...]:
        """Cores of a machine that are completely free."""
        return tuple(
            core for index, cores, _ in self._machines if index == machine for core in cores if cores[core] == 1
        )


def _pick_devices(
    left: dict[int, float], amount: float, choose: Callable[[list[int], int], list[int]] = gang_gpus
) -> dict[int, float] | None:
    """Whole devices for the whole part of `amount`, one shared device for the rest. `choose`: (free devices, count) ->
    those to take."""
    whole, part = int(amount + ROUNDING), amount - int(amount + ROUNDING)
    free = [device for device in left if left[device] > 1 - ROUNDING]
    if len(free) < whole:
        return None
    picked = dict.fromkeys(choose(free, whole), 1.0)
    if part > ROUNDING:
        shared = [device for device in left if device not in picked and left[device] >= part - ROUNDING]
        if not shared:
            return None
        picked[min(shared, key=lambda device: left[device])] = part
    return picked


def place_replicas(graph: Graph, cluster: Cluster) -> tuple[tuple[HostPlan, ...], tuple[str, ...]]:
    """The hosts of `graph`, and the names of those for which `cluster` has no devices left."""
    free, homeless, hosts = Devices.of_cluster(cluster), [], []
    for lease, units in device_pools(graph, cluster):
        lent = Devices((), free.links)
        for unit in sorted(units, key=lambda unit: -unit.replicas * (unit.cpus + unit.gpus)):
            slots: list[DeviceSlot] = []
            for replica in range(unit.replicas):
                nodes = tuple(f"{placed.name}/{replica}" for placed in unit.nodes)
                apart = slots if unit.gang else []
                further = (unit.replicas - replica - 1) * unit.gpus if unit.gang else 0
                wish = partial(Devices.take_devices, cpus=unit.cpus, gpus=unit.gpus, apart=apart, further=further)
                slot = wish(lent) or wish(free)
                if slot is None:
                    homeless.append(nodes[0])
                    slot = DeviceSlot(0, (), ())
                else:
                    slots.append(slot)
                hosts.append(
                    HostPlan(nodes[0], nodes, slot.machine, unit.cpus, slot.cores, unit.gpus, slot.gpus, lease)
                )
            if lease:
                lent = _lend_devices([host for host in hosts if host.lease == lease], free.links)
    hosts = list(_add_spare_cores(graph, hosts, free, cluster))
    in_units = {placed.name for unit in placed_units(graph) for placed in unit.nodes}
    light = [placed for placed in graph.placed.values() if placed.name not in in_units]
    core = tuple(f"{placed.name}/{replica}" for placed in light for replica in range(placed.replicas))
    taken = {core for host in hosts if host.machine == 0 for core in host.cores}
    cores = tuple(core for core in free.free_cores(0) if core not in taken) or cluster.machines[0].cores
    return (*((HostPlan(CORE, core, cores=cores),) if core else ()), *hosts), tuple(homeless)


def _lend_devices(hosts: Sequence[HostPlan], links: Mapping[int, GpuLinks]) -> Devices:
    """The devices of a lease's hosts so far; all count as free for one more unit."""
    cores: dict[int, set[int]] = {}
    gpus: dict[int, set[int]] = {}
    for host in hosts:
        cores.setdefault(host.machine, set()).update(host.cores)
        gpus.setdefault(host.machine, set()).update(host.gpus)
    return Devices([(machine, sorted(cores[machine]), sorted(gpus[machine])) for machine in sorted(cores)], links)


def _add_spare_cores(graph: Graph, hosts: Sequence[HostPlan], free: Devices, cluster: Cluster) -> Iterator[HostPlan]:
    """The hosts. Those without a number of cores set by the user also get spare cores, if they have at least one GPU,
    or if all hosts of their machine take turns.

    The spare cores of a machine are divided equally: one share for each GPU, and one for the processes without a GPU.
    So the share of a GPU does not depend on whether the others are used. Hosts that use a GPU alternately also use its
    cores alternately.
    """
    machines = range(len(cluster.machines))
    spare = {index: spare_cores(free.free_cores(index), cluster.machines[index]) for index in machines}
    said = {placed.name for placed in graph.placed.values() if placed.cpus is not None}
    for host in hosts:
        if said & {name.partition("/")[0] for name in host.nodes}:
            yield replace(host, cores_from="given")
            continue
        here = [other for other in hosts if other.machine == host.machine]
        why: CoresFrom = "default"
        more: list[int] = []
        if cluster.machines[host.machine].gpus:
            if host.num_gpus >= 1:
                more = [core for gpu in host.gpus for core in spare[host.machine][gpu]]
        elif host.lease and all(other.lease == host.lease for other in here):
            # The free cores, and those of the hosts with which it takes turns. The replicas of one node work at the
            # same time, so they divide them.
            node = host.nodes[0].partition("/")[0]
            replicas = [other for other in here if other.nodes[0].partition("/")[0] == node]
            own = {core for other in replicas for core in other.cores}
            others = {core for other in here for core in other.cores}
            further = sorted({*free.free_cores(host.machine), *others} - own)
            size = min(MOST_SPARE, len(further) // len(replicas))
            more = further[replicas.index(host) * size :][:size]
        if more:
            why = "left over" if host.gpus else "in turns"
        yield replace(host, cpus=host.cpus + len(more), cores=tuple(sorted({*host.cores, *more})), cores_from=why)


def spare_cores(free: Sequence[int], machine: Machine) -> list[list[int]]:
    """GPU -> its part of the free cores of its machine: equally many for each, first those on the GPU's NUMA node."""
    size, left = min(MOST_SPARE, len(free) // (machine.gpus + 1)), list(free)
    found: list[list[int]] = [[] for _ in range(machine.gpus)]
    if machine.links is not None:
        for gpu, beside in enumerate(machine.links.cores):
            local = [core for core in left if core in beside]
            others = sum(other == beside for other in machine.links.cores[gpu:])
            found[gpu] = local[: min(size, len(local) // others)]
            left = [core for core in left if core not in found[gpu]]
    for mine in found:
        count = size - len(mine)
        mine += left[:count]
        del left[:count]
    return found


def device_pools(graph: Graph, cluster: Cluster) -> tuple[tuple[str, tuple[PlacedUnit, ...]], ...]:
    """(lease, units) in order: units of one lease share devices; a unit with lease "" shares with none."""
    leases = {name: "+".join(names) for names in merge_units(graph.time_shared) for name in names}
    found: dict[str, list[PlacedUnit]] = {}
    for unit in placed_units(graph):
        lease = next((leases[placed.name] for placed in unit.nodes if placed.name in leases), "")
        found.setdefault(lease or f"/{unit.name}", []).append(unit)
    if sum(unit_need(pool)[0] for pool in found.values()) > cluster.num_cores + ROUNDING:
        for pool in found.values():
            pool[:] = [replace(unit, cpus=unit.cpus / unit.replicas) if unit.shrinks else unit for unit in pool]
    return tuple(("" if lease.startswith("/") else lease, tuple(pool)) for lease, pool in found.items())


def unit_need(pool: Iterable[PlacedUnit]) -> tuple[float, float]:
    """(cores, GPUs) for units that alternate on the same devices: the needs of the largest of them."""
    pool = tuple(pool)
    return max(u.cpus * u.replicas for u in pool), max(u.gpus * u.replicas for u in pool)


def placed_units(graph: Graph) -> list[PlacedUnit]:
    """The units of all hosts except "core", before replicas are expanded."""
    partners = {name: names for names in merge_units(graph.sharing) for name in names}
    found: list[PlacedUnit] = []
    for placed in graph.placed.values():
        mine = [graph.placed[name] for name in graph.placed if name in partners.get(placed.name, (placed.name,))]
        heavy = [other for other in mine if other.heavy]
        if heavy and placed is heavy[0]:
            nodes = (placed, *(other for other in mine if other is not placed))
            found.append(PlacedUnit(nodes, max(n.cpus_each for n in nodes), max(n.gpus_each for n in nodes)))
    return found


def merge_units(groups: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Groups of names; groups that share a name are merged."""
    found: list[tuple[str, ...]] = []
    for group in groups:
        touching = [other for other in found if set(other) & set(group)]
        found = [other for other in found if other not in touching]
        found.append(tuple(dict.fromkeys(name for part in (*touching, group) for name in part)))
    return tuple(found)
