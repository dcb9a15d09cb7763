"""The available hardware: this machine, or a cluster that the user describes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import ConfigError

GB = 1 << 30
CLUSTER_EXAMPLE = "2x cpus=32 gpus=8 memory=256"


@dataclass(frozen=True)
class Machine:
    """One machine: the cores flowrl may use there, its GPUs and its memory (0: unknown)."""

    cores: tuple[int, ...]
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Cluster:
    """The machines of a run. The first is the driver's."""

    machines: tuple[Machine, ...]

    @property
    def num_cores(self) -> int:
        return sum(len(machine.cores) for machine in self.machines)

    @property
    def num_gpus(self) -> int:
        return sum(machine.gpus for machine in self.machines)

    @staticmethod
    def here() -> Cluster:
        """This machine, as far as this process may use it (affinity, cgroup, CUDA_VISIBLE_DEVICES)."""
        return Cluster((Machine(tuple(sorted(os.sched_getaffinity(0))), _gpus_here(), _memory_here()),))

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read "2x cpus=32 gpus=8 memory=256" (memory in GiB); several kinds are joined by commas."""
        return Cluster(tuple(machine for part in text.split(",") for machine in _parse_machines(part.strip())))


def _parse_machines(part: str) -> tuple[Machine, ...]:
    match = re.fullmatch(r"(?:(\d+)\s*x\s+)?cpus=(\d+)(?:\s+gpus=(\d+))?(?:\s+memory=(\d+))?", part)
    if match is None or match[1] == "0" or match[2] == "0":
        raise ConfigError(f'cluster {part!r} is not a valid cluster; write it like "{CLUSTER_EXAMPLE}" (memory in GiB)')
    count, cpus, gpus, memory = (
        int(group or default) for group, default in zip(match.groups(), (1, 1, 0, 0), strict=True)
    )
    return (Machine(tuple(range(cpus)), gpus, memory * GB),) * count


def _gpus_here() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def _memory_here() -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)
