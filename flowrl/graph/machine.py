"""The available hardware: this machine, or a cluster that the user describes."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.graph.gpu_links import GpuLinks, links_here, visible_cards
from flowrl.graph.open_files import most_files
from flowrl.machine.cpu import cpu_flags
from flowrl.machine.orphans import run_program

GB = 1 << 30
CLUSTER_EXAMPLE = "2 x 8 x H100"
CARDS = {
    "T4": 15,
    "V100": 32,
    "A10": 22.5,
    "A10G": 22.5,
    "L4": 22.5,
    "RTX4090": 24,
    "RTX5090": 31.8,
    "L40S": 45,
    "RTX6000": 48,
    "A100-40": 40,
    "A100": 80,
    "H100": 79.6,
    "H200": 140.4,
    "B200": 178,
}
"""Card -> its memory in GiB, as nvidia-smi shows it."""
CAPABILITIES = {
    "T4": 7.5,
    "V100": 7.0,
    "A10": 8.6,
    "A10G": 8.6,
    "L4": 8.9,
    "RTX4090": 8.9,
    "RTX5090": 12.0,
    "L40S": 8.9,
    "RTX6000": 8.9,
    "A100-40": 8.0,
    "A100": 8.0,
    "H100": 9.0,
    "H200": 9.0,
    "B200": 10.0,
}
"""Card -> its compute capability, by NVIDIA's list."""
OPTION = r"(cpus|gpus|memory|shm|gpu)=(\S+)"
CORES_A_GPU = 16


@dataclass(frozen=True)
class Machine:
    """One machine: the cores flowrl may use there, its GPUs and its memory. 0 bytes: unknown."""

    cores: tuple[int, ...]
    gpus: int = 0
    memory_bytes: int = 0
    gpu_bytes: int = 0
    """Memory of each GPU."""
    shm_bytes: int = 0
    """Room in /dev/shm, which is a part of the memory."""
    capability: float = 0.0
    """The least compute capability of its GPUs; 0: unknown."""
    links: GpuLinks | None = None
    """How its GPUs are connected; None: not known."""
    max_files: int = 0
    """The most files that a process may open there; 0: unknown."""
    cpu_flags: frozenset[str] = frozenset()
    """The feature flags of its CPU, by the kernel's names; empty: unknown."""


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
        gpus = len(gpu_names())
        cores = tuple(sorted(os.sched_getaffinity(0)))
        gpu_bytes, capability = _gpus_told() if gpus else (0, 0.0)
        links, flags = _links_here(gpus), cpu_flags()
        found = Machine(cores, gpus, _memory_here(), gpu_bytes, _shm_here(), capability, links, most_files(), flags)
        return Cluster((found,))

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read "2 x 8 x H100" (machines x GPUs x card) or "2x cpus=32 gpus=8 memory=256"; commas separate several kinds
        of machines. A card is a name or its memory, such as 24GB. Options may follow a card: cpus, memory and shm
        (GiB)."""
        return Cluster(tuple(machine for part in text.split(",") for machine in _parse_machines(part.strip())))


def _parse_machines(part: str) -> tuple[Machine, ...]:
    by_card = re.fullmatch(rf"(\d+)\s*x\s*(\d+)\s*x\s*([^\s=]+)((?:\s+{OPTION})*)", part, re.IGNORECASE)
    listed = re.fullmatch(rf"(?:(\d+)\s*x\s+)?((?:{OPTION}\s*)+)", part)
    if by_card is None and listed is None:
        raise _not_a_cluster(part)
    if by_card is not None:
        count, gpus, card, options = int(by_card[1]), int(by_card[2]), by_card[3], by_card[4]
        given = {"gpus": str(gpus), "gpu": card, **_options(part, options)}
        room = _number(part, "memory", given.get("memory", str(max(64, 2 * gpus * _card_gib(part, card)))))
        given = {"cpus": str(CORES_A_GPU * max(1, gpus)), "shm": str(room / 2), **given, "memory": str(room)}
    else:
        assert listed is not None
        count, given = int(listed[1] or 1), _options(part, listed[2])
    cpus = int(_number(part, "cpus", given.get("cpus", "0")))
    if count < 1 or cpus < 1:
        raise _not_a_cluster(part)
    machine = Machine(
        tuple(range(cpus)),
        int(_number(part, "gpus", given.get("gpus", "0"))),
        int(_number(part, "memory", given.get("memory", "0")) * GB),
        int(_card_gib(part, given["gpu"]) * GB) if "gpu" in given else 0,
        int(_number(part, "shm", given.get("shm", "0")) * GB),
        CAPABILITIES.get(given.get("gpu", "").upper(), 0.0),
    )
    return (machine,) * count


def _options(part: str, text: str) -> dict[str, str]:
    found = re.findall(OPTION, text)
    if len({name for name, _ in found}) < len(found):
        raise _not_a_cluster(part)
    return dict(found)


def _number(part: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _not_a_cluster(part) from None
    if not 0 <= value < 1e9 or (name in ("cpus", "gpus") and value != int(value)):
        raise _not_a_cluster(part)
    return value


def _card_gib(part: str, card: str) -> float:
    """GiB of a card, which is a name or a size such as 24GB."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)", card, re.IGNORECASE):
        return float(match[1])
    if card.upper() in CARDS:
        return CARDS[card.upper()]
    near = difflib.get_close_matches(card.upper(), CARDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(CARDS)}; or write its memory, as 24GB"
    raise ConfigError(f"cluster {part!r} names the card {card!r}, which is not known; {hint}")


def _not_a_cluster(part: str) -> ConfigError:
    return ConfigError(
        f'cluster {part!r} is not a valid cluster; write it like "{CLUSTER_EXAMPLE}" (machines x GPUs x card, or its '
        'memory as 24GB), or "2x cpus=32 gpus=8 memory=256" (memory in GiB)'
    )


def gpu_names() -> tuple[str, ...]:
    """The GPUs of this machine that this process may use, in the order in which a plan counts them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = (name.strip() for name in visible.split(","))
        return tuple(takewhile(lambda name: name not in ("", "-1"), names))  # CUDA ignores what follows an invalid name
    found = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return tuple(str(index) for index in range(len(found)))


def _visible() -> str | None:
    """CUDA_VISIBLE_DEVICES as CUDA reads it; None if it is not set."""
    return ",".join(gpu_names()) if "CUDA_VISIBLE_DEVICES" in os.environ else None


def _links_here(gpus: int) -> GpuLinks | None:
    links = links_here(_visible()) if gpus else None
    return links if links is not None and len(links) == gpus else None


def _gpus_told() -> tuple[int, float]:
    """(bytes of the smallest GPU, the least compute capability), as nvidia-smi reports them; 0 for one not reported."""
    command = ["nvidia-smi", "--query-gpu=memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = run_program(command, within_s=10)
        done.check_returncode()
        told = done.stdout
    except (OSError, subprocess.SubprocessError):
        return 0, 0.0
    cards, numbers = told.splitlines(), visible_cards(_visible())
    if numbers and max(numbers) < len(cards):
        told = "\n".join(cards[number] for number in numbers)
    sizes = [int(size) for size in re.findall(r"^(\d+),", told, re.MULTILINE)]
    capabilities = [float(found) for found in re.findall(r", *(\d+\.\d+)$", told, re.MULTILINE)]
    return min(sizes, default=0) << 20, min(capabilities, default=0.0)


def _shm_here() -> int:
    """Free bytes in /dev/shm; 0 if this machine has no /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _memory_here() -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text(encoding="utf-8").strip()).isdigit():
            limits.append(int(text))
    return min(limits)
