"""The available hardware: this machine, or a cluster that the user describes.

The links of its GPUs (`nvidia-smi topo -m`) and the cores near each (sysfs): `parse_links` is pure, `read_links` asks
the machine, and what the machine does not report is not guessed. Open files: every process of a run is connected to
every other, so the number grows with the number of processes; the shell's limit is often 1,024, and a process may
raise it itself up to the hard limit.
"""

from __future__ import annotations

import difflib
import os
import re
import resource
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.machine.cpu import cpu_flags
from flowrl.machine.orphans import run_program

OF_A_PEER = 5
"""Descriptors for a peer on another machine: one for the socket, two for its monitor, and one for the stream in each
direction. A peer on the same machine takes 3."""
OF_A_PROCESS = 256
"""Descriptors that a process opens in addition: libraries, devices, shared memory, data."""
ENOUGH = 1 << 16
"""No limit is raised further, because some programs go through all descriptors that they may have when they start
another program."""


def most_files() -> int:
    """The most descriptors that this process can have after `raise_limit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_plain_limit(soft), min(_plain_limit(hard), ENOUGH))


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as `most_files`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _plain_limit(soft) < (most := most_files()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def files_needed(num_peers: int) -> int:
    """Descriptors of a process that is connected to `num_peers` others."""
    return OF_A_PROCESS + OF_A_PEER * num_peers


def files_problem(num_peers: int, most: int) -> str:
    """The error if a process with `num_peers` peers can have at most `most` descriptors; "" if these are enough."""
    if (needed := files_needed(num_peers)) <= most:
        return ""
    return (
        f"a process that is connected to {num_peers} others needs {needed} open files, and this machine allows {most}; "
        f"raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, docker run --ulimit nofile={needed}), or use "
        "fewer replicas"
    )


def require_files(num_peers: int) -> None:
    """Raise ConfigError if this process cannot have the descriptors for `num_peers` peers."""
    if problem := files_problem(num_peers, most_files()):
        raise ConfigError(problem)


def _plain_limit(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""nvidia-smi underlines its column heads, even when it writes to a pipe."""
ON_ONE_NODE = {"PIX": 4, "PXB": 3, "PHB": 2, "NODE": 1}
"""PCIe link within one NUMA node -> closeness: over one switch, several switches, one host bridge, several bridges."""
NVLINK = 10
"""Closeness of GPUs connected by NVLink, to which the number of its lanes is added."""
QUERY = ("--query-gpu=index,uuid,name,pci.bus_id", "--format=csv,noheader")

RunTool = Callable[..., str | None]
"""ask(arguments) -> what nvidia-smi prints; None: it prints nothing."""


@dataclass(frozen=True)
class GpuLinks:
    """The GPUs of one machine, by their numbers."""

    links: tuple[tuple[str, ...], ...]
    """GPU -> its link to each GPU, as nvidia-smi names it: NV18 (18 lanes of NVLink), PIX, PXB, PHB, NODE, SYS."""
    cores: tuple[tuple[int, ...], ...]
    """GPU -> the cores of its NUMA node; (): not known."""

    def __len__(self) -> int:
        return len(self.links)

    def closeness(self, one: int, other: int) -> int:
        """The larger, the faster; 0 between NUMA nodes."""
        link = self.links[one][other]
        lanes = re.fullmatch(r"NV(\d+)", link)
        return NVLINK + int(lanes[1]) if lanes else ON_ONE_NODE.get(link, 0)

    def has_nvlink(self, one: int, other: int) -> bool:
        return self.closeness(one, other) > NVLINK

    def groups(self, joined: Callable[[int, int], bool]) -> list[list[int]]:
        """The GPUs in groups whose members are joined directly or through other members; each group in order."""
        found: list[list[int]] = []
        for gpu in range(len(self)):
            mine = [group for group in found if any(joined(gpu, other) for other in group)]
            found = [group for group in found if group not in mine]
            found.append(sorted([gpu, *(other for group in mine for other in group)]))
        return sorted(found)

    def of(self, gpus: Sequence[int]) -> GpuLinks:
        """The links of only `gpus`, renumbered in that order."""
        links = tuple(tuple(self.links[one][other] for other in gpus) for one in gpus)
        return GpuLinks(links, tuple(self.cores[gpu] for gpu in gpus))


def parse_links(text: str) -> GpuLinks | None:
    """Read what `nvidia-smi topo -m` prints; None if this is not a matrix of GPUs."""
    lines = [COLOUR.sub("", line) for line in text.splitlines()]
    rows = [[cell.strip() for cell in line.split("\t")] for line in lines if "\t" in line]
    head = next((row for row in rows if "GPU0" in row[1:]), [])
    columns = {name: at for at, name in enumerate(head) if name}
    names = [name for name in columns if re.fullmatch(r"GPU\d+", name)]  # others are network cards and affinities
    gpus = [row for row in rows if re.fullmatch(r"GPU\d+", row[0]) and len(row) >= len(names) + 1]
    if not gpus or [row[0] for row in gpus] != names:
        return None
    links = tuple(tuple(row[columns[name]] for name in names) for row in gpus)
    beside = columns.get("CPU Affinity", len(head))
    return GpuLinks(links, tuple(core_list(row[beside] if beside < len(row) else "") for row in gpus))


def core_list(text: str) -> tuple[int, ...]:
    """The cores of a list in the kernel's format, such as 0-3,8-11; () if `text` is not such a list."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return ()
    spans = (span.partition("-") for span in text.split(","))
    return tuple(sorted({core for low, _, high in spans for core in range(int(low), int(high or low) + 1)}))


def read_links(
    visible: str | None, ask: RunTool, *, ordered: bool = False, sysfs: Path = Path("/sys")
) -> GpuLinks | None:
    """The links of the GPUs that CUDA_VISIBLE_DEVICES, `visible`, names; None if they are not known. `ordered`: CUDA
    numbers its devices as nvidia-smi does, even if the cards differ."""
    links = parse_links(ask("topo", "-m") or "")
    cards = _gpu_cards(ask(*QUERY))
    if links is None or len(cards) != len(links):
        return None
    beside = (cores or _cores_near(card[3], sysfs) for cores, card in zip(links.cores, cards, strict=True))
    links = replace(links, cores=tuple(beside))
    numbers = _gpu_numbers(visible, cards, ordered)
    return links.of(numbers) if numbers else None


def _gpu_cards(told: str | None) -> list[list[str]]:
    """The columns of QUERY for each card; [] if it was not answered."""
    cards = [[cell.strip() for cell in line.split(",")] for line in (told or "").splitlines()]
    return cards if all(len(card) == 4 for card in cards) else []


def _gpu_numbers(visible: str | None, cards: Sequence[Sequence[str]], ordered: bool) -> list[int]:
    """nvidia-smi's numbers of the visible devices. []: CUDA may number cards that differ in another order."""
    names = [str(index) for index in range(len(cards))] if visible is None else visible.split(",")
    names = [name.strip() for name in names if name.strip()]
    if len({card[2] for card in cards}) > 1 and not ordered and all(name.isdigit() for name in names):
        return []
    numbers = []
    for name in names:
        found = [at for at, card in enumerate(cards) if name.startswith("GPU-") and card[1].startswith(name)]
        if name.isdigit():
            found = [int(name)] if int(name) < len(cards) else []
        if len(found) != 1:
            return []
        numbers += found
    return numbers


def _cores_near(bus_id: str, sysfs: Path) -> tuple[int, ...]:
    """Cores of the NUMA node of a PCI device, such as 00000000:1B:00.0; () if the kernel does not know the node."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = (sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text(encoding="utf-8").strip()
        return core_list((sysfs / f"devices/system/node/node{node}/cpulist").read_text(encoding="utf-8").strip())
    except OSError:  # no such device; or its node is -1
        return ()


@cache
def ask_nvidia_smi(*arguments: str) -> str | None:
    """What nvidia-smi prints; None if it is missing or fails. Cached: a call may take seconds, and nothing changes."""
    try:
        done = run_program(["nvidia-smi", *arguments], within_s=30)
        done.check_returncode()
        return done.stdout
    except (OSError, subprocess.SubprocessError):
        return None


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
        gpus, cores = len(gpu_names()), tuple(sorted(os.sched_getaffinity(0)))
        # As CUDA reads it; None if it is not set.
        visible = ",".join(gpu_names()) if "CUDA_VISIBLE_DEVICES" in os.environ else None
        ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        gpu_bytes, capability = _ask_gpus(visible, ordered) if gpus else (0, 0.0)
        links = read_links(visible, ask_nvidia_smi, ordered=ordered) if gpus else None
        links = links if links is not None and len(links) == gpus else None

        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
            if path.is_file() and (text := path.read_text(encoding="utf-8").strip()).isdigit():
                limits.append(int(text))
        try:
            shm = os.statvfs("/dev/shm")
            shm_bytes = shm.f_bavail * shm.f_frsize
        except OSError:  # this machine has none
            shm_bytes = 0
        return Cluster(
            (Machine(cores, gpus, min(limits), gpu_bytes, shm_bytes, capability, links, most_files(), cpu_flags()),)
        )

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
        given = {"gpus": str(gpus), "gpu": card, **_machine_options(part, options)}
        room = _number_of(part, "memory", given.get("memory", str(max(64, 2 * gpus * _card_gib(part, card)))))
        given = {"cpus": str(CORES_A_GPU * max(1, gpus)), "shm": str(room / 2), **given, "memory": str(room)}
    else:
        assert listed is not None
        count, given = int(listed[1] or 1), _machine_options(part, listed[2])
    cpus = int(_number_of(part, "cpus", given.get("cpus", "0")))
    if count < 1 or cpus < 1:
        raise _not_a_cluster(part)
    machine = Machine(
        tuple(range(cpus)),
        int(_number_of(part, "gpus", given.get("gpus", "0"))),
        int(_number_of(part, "memory", given.get("memory", "0")) * GB),
        int(_card_gib(part, given["gpu"]) * GB) if "gpu" in given else 0,
        int(_number_of(part, "shm", given.get("shm", "0")) * GB),
        CAPABILITIES.get(given.get("gpu", "").upper(), 0.0),
    )
    return (machine,) * count


def _machine_options(part: str, text: str) -> dict[str, str]:
    found = re.findall(OPTION, text)
    if len({name for name, _ in found}) < len(found):
        raise _not_a_cluster(part)
    return dict(found)


def _number_of(part: str, name: str, text: str) -> float:
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


def _ask_gpus(visible: str | None, ordered: bool) -> tuple[int, float]:
    """(bytes of the smallest GPU, the least compute capability), as nvidia-smi reports them; 0 for one not reported."""
    command = ["nvidia-smi", "--query-gpu=memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = run_program(command, within_s=10)
        done.check_returncode()
        told = done.stdout
    except (OSError, subprocess.SubprocessError):
        return 0, 0.0
    lines, cards = told.splitlines(), _gpu_cards(ask_nvidia_smi(*QUERY))
    numbers = _gpu_numbers(visible, cards, ordered) if cards else []
    if numbers and max(numbers) < len(lines):
        told = "\n".join(lines[number] for number in numbers)
    sizes = [int(size) for size in re.findall(r"^(\d+),", told, re.MULTILINE)]
    capabilities = [float(found) for found in re.findall(r", *(\d+\.\d+)$", told, re.MULTILINE)]
    return min(sizes, default=0) << 20, min(capabilities, default=0.0)
