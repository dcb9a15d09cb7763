"""What each process of a run gets: what Ray reserves for it, the GPUs that it sees, and its environment variables.

The plan says which processes share a device. Ray supports fractions of devices, but places each fraction wherever there
is room. So each GPU of the plan is reserved as a whole, by one process, and Ray does not set CUDA_VISIBLE_DEVICES. In
the run's own Ray, which no other job uses, the plan's indices are the machine's devices. On a joined cluster, other
jobs may use the devices that the plan counted first, so the ids that Ray names are assigned to the plan's indices in
order.

Invariant: a process sees the GPUs that its plan names and no others; one whose plan names none sees none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.graph.analysis.place import HostPlan

START_S = 600.0
RAY_PARTS = 10_000
"""Ray counts resources in ten-thousandths. Shares are rounded down, so their sum never exceeds the whole."""
HOST_VARIABLE = "FLOWRL_HOST"
"""Name of the process, such as generator/0. Ray gives all processes the same title; tools read this."""
MEETING_VARIABLE = "FLOWRL_MEETING_S"
"""Environment variable with the seconds in which the ranks of a gang have to meet."""
FORWARDED = (
    *("NCCL_", "FI_", "UCX_", "VLLM_", "HF_", "CUDA_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("FLOWRL_PLAIN_", "LD_LIBRARY_PATH"),
)
"""Beginnings of the names of environment variables that every process gets, also on another machine; the plan decides
about CUDA_VISIBLE_DEVICES."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
"""Environment variables that make gloo, NCCL and vLLM listen on this machine only."""
MALLOC_VARIABLE = "GLIBC_TUNABLES"
"""Read when a process starts. Other C libraries ignore it, and an older glibc ignores names that it does not know."""
MALLOC_TUNABLES = {
    "arena_max": 1,
    "mmap_threshold": 1 << 40,
    "trim_threshold": 1 << 40,
    "top_pad": 64 << 20,
    "hugetlb": 1,
}


@dataclass(frozen=True)
class ProcessSlot:
    """The resources that Ray reserves for one process on its machine; `environment` derives its variables from them."""

    process: str
    cpus: float
    gpus: int
    """Whole devices that Ray reserves; the process sees those of its plan, see `process_slots`."""
    cores: tuple[int, ...]
    machine: int = 0
    """Index into the cluster's machines."""


def process_slots(hosts: Sequence[HostPlan]) -> tuple[ProcessSlot, ...]:
    """The slot of each process. Processes that share devices by a lease reserve them once: each core in equal parts,
    each GPU by the first of these processes."""
    taken: set[tuple[int, int]] = set()
    slots = []
    for host in hosts:
        new = {(host.machine, gpu) for gpu in host.gpus} - taken
        taken |= new
        lease = [other for other in hosts if host.lease and other.lease == host.lease and other.machine == host.machine]
        sharers = max((sum(core in other.cores for other in lease) for core in host.cores), default=1) or 1
        cpus = math.floor(host.cpus / sharers * RAY_PARTS) / RAY_PARTS
        slots.append(ProcessSlot(host.name, cpus, len(new), host.cores, host.machine))
    return tuple(slots)


def visible_devices(
    hosts: Sequence[HostPlan], reserved: Mapping[str, Sequence[str]], own: Sequence[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Process -> ids of the GPUs that it sees, in the order of its plan. `reserved`: process -> ids that Ray reserved
    for it. `own`: the ids of the devices of the only machine, if all of them are the run's."""
    if own is not None:
        return {host.name: tuple(own[gpu] for gpu in host.gpus) for host in hosts}
    names: dict[tuple[int, int], str] = {}
    for machine in {host.machine for host in hosts}:
        mine = [host for host in hosts if host.machine == machine]
        indices = sorted({gpu for host in mine for gpu in host.gpus})
        # Either all ids are numbers, or all are UUIDs.
        ids = sorted(
            {name for host in mine for name in reserved[host.name]},
            key=lambda name: (int(name) if name.isdigit() else 0, name),
        )
        assert len(ids) == len(indices), (machine, indices, ids)
        names |= {(machine, index): name for index, name in zip(indices, ids, strict=True)}
    return {host.name: tuple(names[host.machine, gpu] for gpu in host.gpus) for host in hosts}


def process_environment(slot: ProcessSlot, *, alone: bool = False, start_s: float = START_S) -> dict[str, str]:
    """Variables that set every library's thread count to the process's number of cores before anything is imported.

    Processes that have cores and no GPU compute models on the cores, and keep the memory that they have allocated.
    `alone`: all processes are on one machine, so no library has to accept connections from another machine. `start_s`:
    how long vLLM's engine may take to load, and the ranks of a gang to meet.
    """
    threads = str(max(1, len(slot.cores)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
    return {
        **dict.fromkeys(names, threads),
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # the plan decides, see `process_slots`
        "PYTHONUNBUFFERED": "1",
        HOST_VARIABLE: slot.process,
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_s)),
        MEETING_VARIABLE: str(math.ceil(start_s)),
        **(LOOPBACK if alone else {}),
        **(malloc_variables(os.environ) if slot.cpus and not slot.gpus else {}),
        **forwarded_variables(os.environ),
    }


def forwarded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The user's settings of libraries, which every process gets, also on other machines."""
    mine = {name: text for name, text in variables.items() if name.startswith(FORWARDED) or name in LOOPBACK}
    return {name: text for name, text in mine.items() if name != "CUDA_VISIBLE_DEVICES"}


def malloc_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that keeps its memory; none if `variables` choose an allocator or its settings.

    By default glibc gives each large tensor its own mapping, or a part of a thread's heap that shrinks as soon as it
    can, so the kernel clears the tensor's pages again in every pass. These settings make one heap for all threads,
    which keeps its memory, in huge pages if the kernel provides them. With them, an update of SmolLM2 takes 0.8 of its
    time (`python -m benchmarks.training.kernels`, with and without --plain-malloc).
    """
    if MALLOC_VARIABLE in variables or "malloc" in variables.get("LD_PRELOAD", ""):
        return {}
    return {MALLOC_VARIABLE: ":".join(f"glibc.malloc.{name}={value}" for name, value in MALLOC_TUNABLES.items())}
