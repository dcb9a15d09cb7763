"""The memory of a graph as text: what every process takes by term, and which replicas use every device when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.graph.analysis.residents import DeviceUse, MachineUse, Resident
from flowrl.graph.machine import GB

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
        yield (resident.replica, where, *(gib(named[name]) for name in TERMS), gib(host))


def device_rows(devices: Sequence[DeviceUse]) -> Iterator[tuple[str, ...]]:
    """A row for each GPU: its memory, the most that is in it at once, and which replicas use it when."""
    for device in devices:
        has = gib(device.num_bytes) if device.num_bytes else "unknown"
        there = "; ".join(_there(resident) for resident in device.residents)
        yield f"{device.machine}:{device.gpu}", has, gib(device.peak), there


def _there(resident: Resident) -> str:
    when = "in its turns" if resident.host.lease else "always"
    return f"{resident.replica} {gib(resident.always + resident.while_active)} {when}" + (
        f" ({gib(resident.always)} between them)" if resident.host.lease else ""
    )


def machine_rows(machines: Sequence[MachineUse]) -> Iterator[tuple[str, ...]]:
    """A row for each machine: its memory and /dev/shm, and the most that is in them."""
    for machine in machines:
        memory = gib(machine.memory_bytes) if machine.memory_bytes else "unknown"
        shm = gib(machine.shm_bytes) if machine.shm_bytes else "unknown"
        yield f"{machine.machine}", f"{gib(machine.host)} of {memory}", f"{gib(machine.shm)} of {shm}"


def gib(num_bytes: int) -> str:
    """GiB with two digits; "-" for nothing."""
    return f"{num_bytes / GB:.2f}" if num_bytes else "-"
