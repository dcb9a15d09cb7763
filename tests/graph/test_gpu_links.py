"""Which GPUs and cores processes get on machines whose links are known: parsing, choosing, and a run's plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, Machine
from flowrl.commands.machine_findings import links_finding
from flowrl.graph.analysis.place import HostPlan, best_linked, gang_gpus, spare_cores
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.machine import QUERY, GpuLinks, RunTool, ask_nvidia_smi, core_list, gpu_names, parse_links, read_links
from flowrl.runtime.driver.resources import visible_devices
from tests.graph.graph_nodes import grpo

TEXTS = Path(__file__).parent / "topologies"
CARDS = {"h100x8_nvswitch": "NVIDIA H100 80GB HBM3", "a100x8_pairs": "NVIDIA A100 80GB PCIe"}


def told(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text()


def links(name: str) -> GpuLinks:
    found = parse_links(told(name))
    assert found is not None
    return found


H100, PAIRS, L40S = links("h100x8_nvswitch"), links("a100x8_pairs"), links("l40sx4_two_sockets")


def answering(topology: str, cards: Sequence[str]) -> RunTool:
    rows = "\n".join(f"{at}, GPU-{at:02d}aa, {card}, 00000000:{0x10 + at:02X}:00.0" for at, card in enumerate(cards))
    return lambda *arguments: {("topo", "-m"): topology, QUERY: rows}.get(arguments)


# What nvidia-smi prints


def test_a_matrix_with_network_cards_and_underlined_heads_is_read() -> None:
    assert {link for at, row in enumerate(H100.links) for other, link in enumerate(row) if at != other} == {"NV18"}
    assert H100.cores[3] == (*range(52), *range(104, 156)) and H100.cores[4] == (*range(52, 104), *range(156, 208))


def test_pairs_and_sockets_are_read() -> None:
    assert PAIRS.links[0] == ("X", "PXB", "NODE", "NV12", "SYS", "SYS", "SYS", "SYS")
    assert [PAIRS.closeness(0, other) for other in (1, 2, 3, 4)] == [3, 1, 22, 0]
    assert PAIRS.groups(PAIRS.has_nvlink) == [[0, 3], [1, 2], [4, 7], [5, 6]]
    assert PAIRS.cores[0] == tuple(range(32)) and PAIRS.cores[7] == tuple(range(32, 64))
    assert L40S.cores == ((),) * 4, "the driver does not tell"


@pytest.mark.parametrize("text", ["", "No devices were found\n", "\tGPU0\tGPU1\nGPU0\t X \n", "GPU0\tNV1\n"])
def test_what_is_no_matrix_is_not_guessed(text: str) -> None:
    assert parse_links(text) is None
    assert read_links(None, answering(text, ["NVIDIA L40S"])) is None


def test_without_the_command_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ask_nvidia_smi.cache_clear()
    assert read_links(None, ask_nvidia_smi) is None
    ask_nvidia_smi.cache_clear()


def test_this_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    rows = answering("", ["NVIDIA A100 80GB PCIe"] * 8)(*QUERY)
    answers = f'topo) cat "{TEXTS}/a100x8_pairs.txt";; *name*) printf "%s\\n" "{rows}";; *) echo "81920, 8.0";;'
    command.write_text(f'#!/bin/sh\necho "$1" >> "{asked}"\ncase "$1" in {answers} esac\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    ask_nvidia_smi.cache_clear()
    for _ in range(2):
        (machine,) = Cluster.here().machines
        assert (
            machine.links == PAIRS.of([4, 7])
            and machine.gpus == 2
            and (machine.gpu_bytes, machine.capability) == (80 << 30, 8.0)
        )
    ask_nvidia_smi.cache_clear()
    assert asked.read_text().split().count("topo") == 1


@pytest.mark.parametrize(
    ("visible", "gib", "capability"),
    [
        ("GPU-01", 80, 8.0),
        ("GPU-00", 4, 7.5),
        ("GPU-01,GPU-00", 4, 7.5),
        (" GPU-01,-1,GPU-00", 80, 8.0),
        ("1", 4, 7.5),  # CUDA may number cards that differ in another order
    ],
)
def test_a_card_that_is_not_visible_limits_nothing(
    visible: str, gib: int, capability: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = answering("", ["NVIDIA T400 4GB", "NVIDIA A100 80GB PCIe"])(*QUERY)
    command = tmp_path / "nvidia-smi"
    answers = f'*name*) printf "%s\\n" "{rows}";; *memory*) printf "4096, 7.5\\n81920, 8.0\\n";;'
    command.write_text(f'#!/bin/sh\ncase "$1" in {answers} esac\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ask_nvidia_smi.cache_clear()
    (machine,) = Cluster.here().machines
    ask_nvidia_smi.cache_clear()
    assert (machine.gpu_bytes, machine.capability) == (gib << 30, capability)


@pytest.mark.parametrize(("visible", "gpus"), [("", 0), ("-1", 0), ("0,1,", 2), ("0,-1,1", 1), (" 3 , GPU-a", 2)])
def test_gpus_after_a_name_that_is_none_are_not_visible(
    visible: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(gpu_names()) == gpus


def test_cores_that_the_driver_does_not_tell_are_read_from_sysfs(tmp_path: Path) -> None:
    for at, node in enumerate((0, 0, 1, -1)):
        card = tmp_path / "bus/pci/devices" / f"0000:{0x10 + at:02x}:00.0"
        card.mkdir(parents=True)
        (card / "numa_node").write_text(f"{node}\n")
    for node, cores in enumerate(("0-15", "16-31")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(f"{cores}\n")
    found = read_links(None, answering(told("l40sx4_two_sockets"), ["NVIDIA L40S"] * 4), sysfs=tmp_path)
    assert found is not None
    assert found.cores == (tuple(range(16)), tuple(range(16)), tuple(range(16, 32)), ())


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, [*range(8)]),
        ("6,5", [6, 5]),
        ("GPU-03aa, GPU-00", [3, 0]),
        ("0,8", None),
        ("MIG-0a", None),
        ("GPU-0", None),  # several begin so
        ("", None),
    ],
)
def test_devices_are_those_that_the_process_may_use(visible: str | None, gpus: list[int] | None) -> None:
    found = read_links(visible, answering(told("a100x8_pairs"), ["NVIDIA A100 80GB PCIe"] * 8))
    assert found == (None if gpus is None else PAIRS.of(gpus))


def test_cuda_orders_different_cards_by_their_speed() -> None:
    ask = answering(told("l40sx4_two_sockets"), ["NVIDIA L40S", "NVIDIA T4", "NVIDIA L40S", "NVIDIA L40S"])
    assert read_links(None, ask) is None
    assert read_links(None, ask, ordered=True) is not None
    assert read_links("GPU-03", ask) is not None, "a UUID has no order"


def test_lists_of_cores() -> None:
    assert core_list("0-2,8,10-11") == (0, 1, 2, 8, 10, 11)
    assert core_list("N/A") == core_list("") == core_list("0-") == ()


# The choice


def test_a_process_gets_a_linked_pair_and_leaves_the_others_theirs() -> None:
    assert best_linked(PAIRS, range(8), 2) == [0, 3]
    assert best_linked(PAIRS, [1, 2, 3, 5, 6], 1) == [3], "its partner is taken: 1 and 2 stay together"
    assert sorted(best_linked(PAIRS, range(8), 4)) == [0, 1, 2, 3]
    assert best_linked(L40S, [1, 2, 3], 2) == [2, 3]
    assert best_linked(H100, [1, 2, 3, 4, 5], 2) == gang_gpus([1, 2, 3, 4, 5], 2) == [2, 3]


def test_a_large_machine_is_not_searched_set_by_set() -> None:
    """32 GPUs in fours; NVLink joins 0, 8, 16, 24, and so on."""
    links = tuple(tuple("NV4" if one % 8 == other % 8 else "SYS" for other in range(32)) for one in range(32))
    assert sorted(best_linked(GpuLinks(links, ((),) * 32), range(32), 4)) == [0, 8, 16, 24]


def machines(most: int = 8) -> st.SearchStrategy[GpuLinks]:
    def joined(size: int) -> st.SearchStrategy[GpuLinks]:
        pairs = list(combinations(range(size), 2))
        links = st.lists(
            st.sampled_from(["NV12", "NV4", "PIX", "NODE", "SYS"]), min_size=len(pairs), max_size=len(pairs)
        )
        return links.map(lambda drawn: made(size, dict(zip(pairs, drawn, strict=True))))

    return st.integers(1, most).flatmap(joined)


def made(size: int, links: dict[tuple[int, int], str]) -> GpuLinks:
    def link(one: int, other: int) -> str:
        return "X" if one == other else links[min(one, other), max(one, other)]

    return GpuLinks(tuple(tuple(link(i, j) for j in range(size)) for i in range(size)), ((),) * size)


def worst(links: GpuLinks, gpus: Sequence[int]) -> int:
    """2: NVLink between all; 1: on one node; 0: on several."""
    close = min((links.closeness(one, other) for one, other in combinations(gpus, 2)), default=99)
    return 2 if close > 10 else min(close, 1)


@given(machines(), st.data())
def test_the_choice_is_free_and_has_the_best_worst_link(links: GpuLinks, data: st.DataObject) -> None:
    free = sorted(data.draw(st.sets(st.integers(0, len(links) - 1))))
    count = data.draw(st.integers(0, len(free)))
    chosen = best_linked(links, free, count)
    assert len(set(chosen)) == count and set(chosen) <= set(free)
    best = max((worst(links, some) for some in combinations(free, count)), default=0)
    assert worst(links, chosen) == best
    assert worst(links, chosen) >= worst(links, gang_gpus(free, count)), "never worse than without knowing"


@given(machines(6), st.integers(1, 6), st.data())
def test_ranks_one_by_one_get_what_they_would_get_together(links: GpuLinks, ranks: int, data: st.DataObject) -> None:
    free = [*range(len(links))]
    ranks = min(ranks, len(free))
    near: list[int] = []
    for left in reversed(range(ranks)):
        near += best_linked(links, [gpu for gpu in free if gpu not in near], 1, near=near, further=left)
    assert len(set(near)) == ranks
    assert worst(links, near) == worst(links, best_linked(links, free, ranks))


@given(st.integers(1, 8), st.sampled_from(["NV18", "PIX", "SYS"]), st.data())
def test_where_all_are_alike_the_order_is_plain(size: int, link: str, data: st.DataObject) -> None:
    alike = made(size, dict.fromkeys(combinations(range(size), 2), link))
    free = sorted(data.draw(st.sets(st.integers(0, size - 1))))
    count = data.draw(st.integers(0, len(free)))
    assert sorted(best_linked(alike, free, count)) == sorted(gang_gpus(free, count))


# A run's plan


def hosts(known: GpuLinks | None, num_gpus: int, cores: int, **needs: dict[str, float]) -> dict[str, HostPlan]:
    parts = grpo()
    for name, changes in needs.items():
        parts.graph.placed[name] = replace(parts.graph.placed[name], **changes)  # type: ignore[arg-type]
    plan = make_plan(parts.graph, Cluster((Machine(tuple(range(cores)), gpus=num_gpus, links=known),)))
    assert plan.homeless == ()
    return {host.name: host for host in plan.hosts if host.gpus}


def gpus(found: dict[str, HostPlan]) -> dict[str, tuple[int, ...]]:
    return {name: host.gpus for name, host in found.items()}


def test_generators_of_two_gpus_and_the_ranks_of_a_trainer_are_on_linked_gpus() -> None:
    needs = {"generator": {"replicas": 2, "cpus": 1, "gpus": 2}, "trainer": {"replicas": 4, "cpus": 1, "gpus": 1}}
    found = gpus(hosts(PAIRS, 8, 64, **needs))
    assert [found["generator/0"], found["generator/1"]] == [(0, 3), (1, 2)]
    assert [found[f"trainer/{rank}"] for rank in range(4)] == [(4,), (7,), (6,), (5,)], "a pair after the other"
    plain = gpus(hosts(None, 8, 64, **needs))
    assert [plain["generator/0"], plain["trainer/1"]] == [(0, 1), (5,)]


def test_two_ranks_are_on_one_socket() -> None:
    needs = {"generator": {"cpus": 1, "gpus": 1}, "trainer": {"replicas": 2, "cpus": 1, "gpus": 1}}
    assert gpus(hosts(None, 4, 32, **needs)) == {"generator/0": (0,), "trainer/0": (1,), "trainer/1": (2,)}
    assert gpus(hosts(L40S, 4, 32, **needs)) == {"generator/0": (0,), "trainer/0": (2,), "trainer/1": (3,)}


def test_a_gang_in_turns_is_linked_too() -> None:
    parts = grpo()
    parts.graph.time_share(parts.generator, parts.trainer)
    for name, replicas, count in (("generator", 1, 2), ("trainer", 2, 1)):
        parts.graph.placed[name] = replace(parts.graph.placed[name], replicas=replicas, cpus=1, gpus=count)
    plan = make_plan(parts.graph, Cluster((Machine(tuple(range(64)), gpus=8, links=PAIRS),)))
    assert {host.name: host.gpus for host in plan.hosts if host.gpus} == {
        "generator/0": (0, 3),
        "trainer/0": (0,),
        "trainer/1": (3,),
    }


def test_switched_gpus_keep_their_plain_order() -> None:
    needs = {"generator": {"replicas": 2, "cpus": 1, "gpus": 2}, "trainer": {"replicas": 4, "cpus": 1, "gpus": 1}}
    assert gpus(hosts(H100, 8, 208, **needs)) == gpus(hosts(None, 8, 208, **needs))


def test_hosts_have_cores_beside_their_gpus() -> None:
    needs: dict[str, dict[str, float]] = {"generator": {"gpus": 2}, "trainer": {"replicas": 4, "gpus": 1}}
    for known in (H100, PAIRS):
        cores = 1 + max(known.cores[-1])
        for host in hosts(known, 8, cores, **needs).values():
            beside = {core for gpu in host.gpus for core in known.cores[gpu]}
            assert len(host.cores) > 5 and set(host.cores) <= beside
    plain = hosts(None, 8, 64, **needs)
    assert any(not set(host.cores) <= set(PAIRS.cores[host.gpus[0]]) for host in plain.values())


def test_cores_elsewhere_do_where_there_are_too_few() -> None:
    """A container with the cores of one socket alone."""
    needs: dict[str, dict[str, float]] = {"generator": {"cpus": 1, "gpus": 4}, "trainer": {"replicas": 4, "gpus": 1}}
    found = hosts(PAIRS, 8, 16, **needs)
    assert all(host.cores for host in found.values())
    assert max(core for host in found.values() for core in host.cores) < 16


@given(st.integers(1, 8), st.sets(st.integers(0, 63)), st.booleans())
def test_spare_cores_are_given_once_and_in_equal_numbers(num_gpus: int, free: set[int], known: bool) -> None:
    machine = Machine(tuple(range(64)), gpus=num_gpus, links=PAIRS.of(range(num_gpus)) if known else None)
    parts = spare_cores(sorted(free), machine)
    given_away = [core for part in parts for core in part]
    assert len(given_away) == len(set(given_away)) and set(given_away) <= free
    assert {len(part) for part in parts} == {min(15, len(free) // (num_gpus + 1))}


def test_a_ray_of_the_runs_own_gives_the_very_devices_of_the_plan() -> None:
    plan = [HostPlan("a/0", ("a/0",), gpus=(4, 7)), HostPlan("b/0", ("b/0",), gpus=(2,)), HostPlan("core", ())]
    reserved = {"a/0": ["0", "1"], "b/0": ["2"], "core": []}
    names = [f"{number}" for number in range(8)]
    assert visible_devices(plan, reserved, names) == {"a/0": ("4", "7"), "b/0": ("2",), "core": ()}
    assert visible_devices(plan, reserved)["a/0"] == ("1", "2"), "on a cluster those that Ray reserved, in order"


# flowrl doctor


def test_doctor_tells_links_and_cores() -> None:
    assert links_finding(H100).found == (
        "NVLink between 0-7; 0-3 beside cores 0-51,104-155; 4-7 beside cores 52-103,156-207"
    )
    assert links_finding(PAIRS).found == (
        "NVLink between 0,3 | 1,2 | 4,7 | 5,6; 0-3 beside cores 0-31; 4-7 beside cores 32-63"
    )
    assert links_finding(L40S).found == "no NVLink"
    assert links_finding(None).status == "skipped"
