"""How the GPUs of a machine are connected, and which cores are near each: `nvidia-smi topo -m`, and sysfs.

`parse_links` is pure. `links_here` queries this machine; what the machine does not report is not guessed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flowrl.machine.orphans import run_program

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""nvidia-smi underlines its column heads, even when it writes to a pipe."""
ON_ONE_NODE = {"PIX": 4, "PXB": 3, "PHB": 2, "NODE": 1}
"""PCIe link within one NUMA node -> closeness: over one switch, several switches, one host bridge, several bridges."""
NVLINK = 10
"""Closeness of GPUs connected by NVLink, to which the number of its lanes is added."""
QUERY = ("--query-gpu=index,uuid,name,pci.bus_id", "--format=csv,noheader")

Ask = Callable[..., str | None]
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
    gpus = [row for row in rows if re.fullmatch(r"GPU\d+", row[0]) and len(row) >= len(gpu_columns(columns)) + 1]
    if not gpus or [row[0] for row in gpus] != gpu_columns(columns):
        return None
    links = tuple(tuple(row[columns[name]] for name in gpu_columns(columns)) for row in gpus)
    beside = columns.get("CPU Affinity", len(head))
    return GpuLinks(links, tuple(core_list(row[beside] if beside < len(row) else "") for row in gpus))


def gpu_columns(names: Sequence[str] | dict[str, int]) -> list[str]:
    """The column heads that name GPUs; the others are network cards and affinities."""
    return [name for name in names if re.fullmatch(r"GPU\d+", name)]


def core_list(text: str) -> tuple[int, ...]:
    """The cores of a list in the kernel's format, such as 0-3,8-11; () if `text` is not such a list."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return ()
    spans = (span.partition("-") for span in text.split(","))
    return tuple(sorted({core for low, _, high in spans for core in range(int(low), int(high or low) + 1)}))


def links_here(visible: str | None) -> GpuLinks | None:
    """The links of this machine's GPUs that CUDA_VISIBLE_DEVICES, `visible`, names; None if they are not known."""
    return read_links(visible, ask_nvidia_smi, ordered=os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def read_links(visible: str | None, ask: Ask, *, ordered: bool = False, sysfs: Path = Path("/sys")) -> GpuLinks | None:
    """Like `links_here`. `ordered`: CUDA numbers its devices as nvidia-smi does, even if the cards differ."""
    links = parse_links(ask("topo", "-m") or "")
    cards = _cards(ask(*QUERY))
    if links is None or len(cards) != len(links):
        return None
    beside = (cores or _cores_of(card[3], sysfs) for cores, card in zip(links.cores, cards, strict=True))
    links = replace(links, cores=tuple(beside))
    numbers = _numbers(visible, cards, ordered)
    return links.of(numbers) if numbers else None


def visible_cards(visible: str | None) -> list[int]:
    """nvidia-smi's numbers of the devices that CUDA_VISIBLE_DEVICES, `visible`, names; [] if that is not known."""
    cards = _cards(ask_nvidia_smi(*QUERY))
    return _numbers(visible, cards, os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID") if cards else []


def _cards(told: str | None) -> list[list[str]]:
    """The columns of QUERY for each card; [] if it was not answered."""
    cards = [[cell.strip() for cell in line.split(",")] for line in (told or "").splitlines()]
    return cards if all(len(card) == 4 for card in cards) else []


def _numbers(visible: str | None, cards: Sequence[Sequence[str]], ordered: bool) -> list[int]:
    """nvidia-smi's numbers of the visible devices. []: CUDA may number cards that differ in another order."""
    names = [str(index) for index in range(len(cards))] if visible is None else visible.split(",")
    numbers = [_number(name.strip(), cards) for name in names if name.strip()]
    mixed = len({card[2] for card in cards}) > 1 and not ordered and all(name.strip().isdigit() for name in names)
    return [] if mixed or None in numbers else [number for number in numbers if number is not None]


def _number(name: str, cards: Sequence[Sequence[str]]) -> int | None:
    """nvidia-smi's number of the device that CUDA_VISIBLE_DEVICES names by number or UUID."""
    if name.isdigit():
        return int(name) if int(name) < len(cards) else None
    found = [at for at, card in enumerate(cards) if name.startswith("GPU-") and card[1].startswith(name)]
    return found[0] if len(found) == 1 else None


def _cores_of(bus_id: str, sysfs: Path) -> tuple[int, ...]:
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
