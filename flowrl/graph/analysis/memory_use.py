"""Which replicas use the memory of every device, machine and /dev/shm, and whether it fits.

A time-shared device holds what its processes always keep there, plus the largest of the amounts that they have there
while they hold the lease. On any other device, all of this is there at the same time. If a process has no GPU, what
it would have on a device counts as memory of its machine.

`process_rows` and `device_rows` are the same as text: what every process takes by term, and which replicas use every
device when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowrl.graph.analysis.numbers import longest_asked
from flowrl.graph.analysis.place import HostPlan
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.graph import Graph, port_owner
from flowrl.graph.machine import GB, Cluster
from flowrl.graph.node import Footprint, Share


@dataclass(frozen=True)
class Resident:
    """One node replica whose memory is predicted."""

    replica: str
    host: HostPlan
    footprint: Footprint

    @property
    def always(self) -> int:
        return self.footprint.num_bytes("always")

    @property
    def while_active(self) -> int:
        return self.footprint.num_bytes("lease")


@dataclass(frozen=True)
class DeviceUse:
    """The memory of one GPU."""

    machine: int
    gpu: int
    num_bytes: int
    """What it has; 0: unknown."""
    residents: tuple[Resident, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are in it at the same time."""
        by_lease: dict[str, list[int]] = {}  # lease, or replica without a lease -> the sizes while one is active
        for resident in self.residents:
            by_lease.setdefault(resident.host.lease or resident.replica, []).append(resident.while_active)
        return sum(resident.always for resident in self.residents) + sum(max(sizes) for sizes in by_lease.values())


@dataclass(frozen=True)
class MachineUse:
    """The memory of one machine, and its /dev/shm, which is a part of that memory."""

    machine: int
    memory_bytes: int
    shm_bytes: int
    host: int
    """The most that its processes have in its memory, /dev/shm included."""
    activations: int
    """The part of `host` that only full micro-batches take."""
    shm: int


def find_residents(graph: Graph, plan: Plan, cluster: Cluster) -> tuple[Resident, ...]:
    """The replicas that can predict their memory."""
    budgets: dict[str, int] = {}  # node -> the largest token budget of the nodes that send to it
    for edge in graph.edges:
        budget, name = graph.nodes[port_owner(edge.out)].facts().token_budget, port_owner(edge.into)
        if budget is not None:
            budgets[name] = max(budget, budgets.get(name, budget))
    found = []
    for host in plan.hosts:
        for replica in host.nodes:
            name, _, number = replica.partition("/")
            sent = [way for way in plan.weights if way.producer == replica]
            received = [way for way in plan.weights if way.consumer == replica]
            share = Share(
                replicas=graph.placed[name].replicas,
                first=number == "0",
                gpus=host.num_gpus,
                device_bytes=cluster.machines[host.machine].gpu_bytes if host.num_gpus else 0,
                time_shared=bool(host.lease),
                token_budget=budgets.get(name),
                longest_sample=plan.numbers.longest_sample,
                longest_asked=longest_asked(graph, name),
                sends=tuple(way.transport for way in sent if way.transport is not None),
                readers=tuple(way.dtype for way in sent),
                receives=tuple(way.transport for way in received if way.transport is not None),
            )
            footprint = graph.nodes[name].footprint(share)
            if footprint is not None:
                found.append(Resident(replica, host, footprint))
    return tuple(found)


def device_uses(found: Sequence[Resident], cluster: Cluster) -> tuple[DeviceUse, ...]:
    """Every GPU that is used by a replica whose memory is predicted."""
    places = sorted({(resident.host.machine, gpu) for resident in found for gpu in resident.host.gpus})
    return tuple(
        DeviceUse(
            machine,
            gpu,
            cluster.machines[machine].gpu_bytes,
            tuple(r for r in found if r.host.machine == machine and gpu in r.host.gpus),
        )
        for machine, gpu in places
    )


def machine_uses(found: Sequence[Resident], cluster: Cluster) -> tuple[MachineUse, ...]:
    """Every machine that is used by a replica whose memory is predicted."""
    uses = []
    for index in sorted({resident.host.machine for resident in found}):
        machine, shm, activations = cluster.machines[index], 0, 0
        by_stay: Counter[str] = Counter()  # in host memory, without /dev/shm
        for resident in (resident for resident in found if resident.host.machine == index):
            for term in resident.footprint.terms:
                if term.place == "shm":
                    shm += term.num_bytes
                elif term.place == "host" or not resident.host.gpus:
                    by_stay[term.stay] += term.num_bytes
                    activations += term.num_bytes if (term.stay, term.name) == ("lease", "activations") else 0
        steady = by_stay["always"] + by_stay["lease"] + by_stay["away"]
        most = steady + max(by_stay["loading"], by_stay["export"]) + shm
        uses.append(MachineUse(index, machine.memory_bytes, machine.shm_bytes, most, activations, shm))
    return tuple(uses)


def memory_problems(found: Sequence[Resident], cluster: Cluster) -> Iterator[str]:
    """Check 9: devices and machines whose memory is too small, with what takes the memory."""
    names = [resident.replica.partition("/")[0] for resident in found]
    own = [(name, text) for name, resident in zip(names, found, strict=True) for text in resident.footprint.problems]
    for name, problem in dict.fromkeys(own):
        yield f"node {name}: {problem}."
    told: set[tuple[str, ...]] = set()
    for device in device_uses(found, cluster):
        there = tuple(resident.replica.partition("/")[0] for resident in device.residents)
        if device.num_bytes and device.peak_bytes > device.num_bytes and there not in told:
            told.add(there)
            parts = "; ".join(f"{resident.replica}: {_device_terms(resident)}" for resident in device.residents)
            yield (
                f"GPU {device.gpu} of machine {device.machine} has {device.num_bytes / GB:.1f} GiB, and "
                f"{device.peak_bytes / GB:.1f} are needed at the same time ({parts}); use more ranks, offloading, "
                "smaller models, or time_share."
            )
    for machine in machine_uses(found, cluster):
        needed = machine.host - machine.activations
        if machine.memory_bytes and needed > machine.memory_bytes:
            yield (
                f"machine {machine.machine} has {machine.memory_bytes / GB:.1f} GiB of memory, and its processes need "
                f"{needed / GB:.1f}; offload less, use fewer replicas, or smaller models."
            )
        if machine.shm_bytes and machine.shm > machine.shm_bytes:
            yield (
                f"/dev/shm of machine {machine.machine} has {machine.shm_bytes / GB:.2f} GiB, and published weights "
                f"take up to {machine.shm / GB:.2f}; make it larger (docker run --shm-size, or an emptyDir with "
                "medium: Memory)."
            )


def _device_terms(resident: Resident) -> str:
    terms = [term for term in resident.footprint.terms if term.place == "device" and term.stay in ("always", "lease")]
    return ", ".join(f"{term.name} {term.num_bytes / GB:.1f}" for term in terms if term.num_bytes >= GB // 20)


def memory_warnings(found: Sequence[MachineUse]) -> Iterator[str]:
    """Check 10: machines whose memory is too small only if micro-batches are full."""
    for machine in found:
        if machine.memory_bytes and machine.host > machine.memory_bytes:
            yield (
                f"machine {machine.machine} has {machine.memory_bytes / GB:.1f} GiB of memory, and its processes need "
                f"{machine.host / GB:.1f} if micro-batches are full; lower --token-budget, or use "
                "--zero.gradient-checkpointing."
            )


def _machine_problems(machine: MachineUse) -> Iterator[str]:
    if machine.memory_bytes and machine.host - machine.activations > machine.memory_bytes:
        yield (
            f"machine {machine.machine} has {machine.memory_bytes / GB:.1f} GiB of memory, and its processes need "
            f"{(machine.host - machine.activations) / GB:.1f}; offload less, use fewer replicas, or smaller models."
        )
    if machine.shm_bytes and machine.shm > machine.shm_bytes:
        yield (
            f"/dev/shm of machine {machine.machine} has {machine.shm_bytes / GB:.2f} GiB, and published weights take "
            f"up to {machine.shm / GB:.2f}; make it larger (docker run --shm-size, or an emptyDir with medium: Memory)."
        )


TERMS = ("weights", "gradients", "optimizer", "activations", "KV cache", "buffers", "runtime")


def process_rows(found: Sequence[Resident]) -> Iterator[tuple[str, ...]]:
    """A row for each process: its terms on each of its devices (or in host memory), and what it has on the host."""
    for resident in found:
        terms = [term for term in resident.footprint.terms if term.place == "device" and term.stay != "away"]
        named = {name: sum(term.num_bytes for term in terms if term.name == name) for name in TERMS}
        host = sum(
            term.num_bytes for term in resident.footprint.terms if term.place != "device" and term.stay != "loading"
        )
        where = f"{len(resident.host.gpus)} GPU" if resident.host.gpus else "memory"
        yield (resident.replica, where, *(gib_text(named[name]) for name in TERMS), gib_text(host))


def device_rows(devices: Sequence[DeviceUse]) -> Iterator[tuple[str, ...]]:
    """A row for each GPU: its memory, the most that is in it at once, and which replicas use it when."""
    for device in devices:
        there = []
        for one in device.residents:
            active = f"{one.replica} {gib_text(one.always + one.while_active)}"
            in_turns = f"in its turns ({gib_text(one.always)} between them)"
            there.append(f"{active} {in_turns if one.host.lease else 'always'}")
        has = gib_text(device.num_bytes) if device.num_bytes else "unknown"
        yield f"{device.machine}:{device.gpu}", has, gib_text(device.peak_bytes), "; ".join(there)


def machine_rows(machines: Sequence[MachineUse]) -> Iterator[tuple[str, ...]]:
    """A row for each machine: its memory and /dev/shm, and the most that is in them."""
    for machine in machines:
        memory = gib_text(machine.memory_bytes) if machine.memory_bytes else "unknown"
        shm = gib_text(machine.shm_bytes) if machine.shm_bytes else "unknown"
        yield f"{machine.machine}", f"{gib_text(machine.host)} of {memory}", f"{gib_text(machine.shm)} of {shm}"


def gib_text(num_bytes: int) -> str:
    """GiB with two digits; "-" for nothing."""
    return f"{num_bytes / GB:.2f}" if num_bytes else "-"
