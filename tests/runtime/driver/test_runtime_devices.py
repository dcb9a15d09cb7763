"""Every host sees the GPUs of its plan and no others; Ray reserves each of them once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, Machine
from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.place import HostPlan
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.nodes.engine_options import largest_kv_cache
from flowrl.runtime.driver.resources import (
    MALLOC_VARIABLE,
    ProcessSlot,
    malloc_variables,
    process_environment,
    process_slots,
    visible_devices,
)
from flowrl.training.model import products
from tests.graph.graph_nodes import Grpo, grpo
from tests.rigs.run_process import ROOT, Run

SIGHTED = ROOT / "tests" / "runtime" / "checkpoints" / "graphs_devices" / "sighted.py"


def placed(parts: Grpo, gpus: int, **needs: dict[str, float]) -> Plan:
    for name, changes in needs.items():
        parts.graph.placed[name] = replace(parts.graph.placed[name], **changes)  # type: ignore[arg-type]
    return make_plan(parts.graph, Cluster((Machine(tuple(range(16)), gpus=gpus),)))


def claims(hosts: Sequence[HostPlan]) -> dict[str, tuple[float, int]]:
    """Process -> the cores and the GPUs that Ray reserves for it."""
    return {slot.process: (slot.cpus, slot.gpus) for slot in process_slots(hosts)}


def gpus(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {host.name: host.gpus for host in plan.hosts if host.gpus}


def test_hosts_in_turns_reserve_each_gpu_once() -> None:
    parts = grpo(num_generators=2, num_trainers=4)
    parts.graph.time_share(parts.generator, parts.trainer)
    plan = placed(parts, 4, trainer={"cpus": 1, "gpus": 1}, generator={"cpus": 1, "gpus": 2})
    found = claims(plan.hosts)
    assert found["core"] == (0, 0)
    assert [found[f"trainer/{rank}"] for rank in range(4)] == [(0.5, 1), (0.5, 1), (1, 1), (1, 1)]
    assert [found[f"generator/{index}"] for index in range(2)] == [(0.5, 0)] * 2
    reserved = {"trainer/0": ["7"], "trainer/1": ["3"], "trainer/2": ["10"], "trainer/3": ["4"]}
    seen = visible_devices(plan.hosts, {host.name: reserved.get(host.name, []) for host in plan.hosts})
    assert [seen[f"trainer/{rank}"] for rank in range(4)] == [("3",), ("4",), ("7",), ("10",)]
    assert [seen[f"generator/{index}"] for index in range(2)] == [("3", "4"), ("7", "10")]
    assert seen["core"] == ()
    own = visible_devices(plan.hosts, {}, own=("4", "5", "6", "7"))
    assert (own["trainer/3"], own["generator/1"], own["core"]) == (("7",), ("6", "7"), ())


def test_two_that_ask_for_half_a_gpu_share_it_and_reserve_it_whole() -> None:
    plan = placed(grpo(num_generators=2), 2, generator={"cpus": 1, "gpus": 0.5})
    assert gpus(plan) == {"generator/0": (0,), "generator/1": (0,)}
    assert [claims(plan.hosts)[f"generator/{index}"][1] for index in range(2)] == [1, 0]


def test_ranks_of_a_gang_are_on_different_gpus_though_half_a_one_would_do() -> None:
    parts = grpo(num_trainers=2)
    assert gpus(placed(parts, 2, trainer={"cpus": 1, "gpus": 0.5})) == {"trainer/0": (0,), "trainer/1": (1,)}
    needs = {"trainer": {"cpus": 1, "gpus": 0.5}, "generator": {"cpus": 1, "gpus": 0.5}}
    assert gpus(placed(parts, 2, **needs)) == {"generator/0": (0,), "trainer/0": (0,), "trainer/1": (1,)}
    report = check(parts.graph, Cluster((Machine(tuple(range(8)), gpus=1),)))
    assert any("the 2 ranks of trainer need different GPUs" in text for text in report.problems)


def test_neighbouring_gpus_are_preferred() -> None:
    plan = placed(grpo(num_generators=2), 6, trainer={"cpus": 1, "gpus": 1}, generator={"cpus": 1, "gpus": 2})
    assert gpus(plan) == {"generator/0": (0, 1), "generator/1": (2, 3), "trainer/0": (4,)}
    hosts = make_plan(grpo().graph, Cluster((Machine(tuple(range(8)), gpus=4),))).hosts
    assert {host.gpus for host in hosts} == {()}


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 0.5, 1, 2])), min_size=2, max_size=2), st.booleans())
def test_every_gpu_of_the_plan_is_reserved_once_and_seen_where_it_is_planned(
    needs: list[tuple[int, float]], time_shared: bool
) -> None:
    parts = grpo()
    for name, (replicas, share) in zip(("generator", "trainer"), needs, strict=True):
        parts.graph.placed[name] = replace(parts.graph.placed[name], replicas=replicas, cpus=1, gpus=share)
    if time_shared:
        parts.graph.time_share(parts.generator, parts.trainer)
    plan = make_plan(parts.graph, Cluster((Machine(tuple(range(8)), gpus=8),)))
    found, next_id, reserved = claims(plan.hosts), 0, dict[str, list[str]]()
    for host in plan.hosts:
        reserved[host.name] = [str(next_id + index) for index in range(found[host.name][1])]
        next_id += found[host.name][1]
    assert next_id == len({gpu for host in plan.hosts for gpu in host.gpus})
    seen = visible_devices(plan.hosts, reserved)
    assert all(
        one.gpus == other.gpus for one in plan.hosts for other in plan.hosts if seen[one.name] == seen[other.name]
    )
    assert sum(cpus for cpus, _ in found.values()) <= 8


def test_devices_are_counted_on_every_machine() -> None:
    hosts = [HostPlan("a/0", ("a/0",), 0, gpus=(0,)), HostPlan("b/0", ("b/0",), 1, gpus=(0,))]
    assert [gpus for _, gpus in claims(hosts).values()] == [1, 1]
    assert visible_devices(hosts, {"a/0": ["2"], "b/0": ["GPU-5"]}) == {"a/0": ("2",), "b/0": ("GPU-5",)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hosts_of_a_real_ray_see_the_gpus_of_their_plan(tmp_path: Path) -> None:
    """Ray takes what CUDA_VISIBLE_DEVICES names as the GPUs of the machine, and asks no driver."""
    run = Run(SIGHTED, tmp_path / "run", timeout_s=280, env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert run.wait() == 0, run.stderr
    words = {path.name: path.read_text() for path in (tmp_path / "run").glob("*-[0-9]")}
    assert words == {
        "source-0": " sees ",
        "trainer-0": "0 sees 4",
        "trainer-1": "1 sees 5",
        "generator-0": "0,1 sees 4,5",
        "reference-0": "2 sees 6",
        "critic-0": "2 sees 6",
        "judge-0": " sees ",
    }


def test_settings_of_libraries_reach_every_process_on_other_machines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"NCCL_DEBUG": "INFO", "VLLM_USE_V1": "1", "HF_HOME": "/models", "CUDA_LAUNCH_BLOCKING": "1"}
    given |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    given |= {"FI_PROVIDER": "efa", "UCX_TLS": "rc", "TRITON_CACHE_DIR": "/cache", "LD_LIBRARY_PATH": "/opt/lib"}
    given[products.PLAIN] = "1"
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    for alone in (False, True):
        found = process_environment(ProcessSlot("trainer/0", 1, 1, (0, 1)), alone=alone)
        assert {name: found[name] for name in given} == given
        assert found["NCCL_SOCKET_IFNAME"] == "eth7"
        assert found.get("VLLM_HOST_IP") == ("127.0.0.1" if alone else None)
        assert "CUDA_VISIBLE_DEVICES" not in found, "the plan decides"


def test_processes_that_compute_on_cores_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New pages in every pass cost a fifth of an update (`python -m benchmarks.training.kernels`)."""
    for name in (MALLOC_VARIABLE, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)

    def found(cpus: float, gpus: int) -> str | None:
        return process_environment(ProcessSlot("trainer/0", cpus, gpus, ())).get(MALLOC_VARIABLE)

    assert "glibc.malloc.arena_max=1:" in str(found(1, 0)) and found(0.5, 0) == found(2, 0)
    assert found(0, 0) is None, "a host of cheap nodes"
    assert found(1, 1) is None
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")
    assert found(1, 0) is None
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libgomp.so.1")
    assert found(1, 0)
    monkeypatch.setenv(MALLOC_VARIABLE, "glibc.malloc.hugetlb=1")
    assert found(1, 0) is None, "the user's own settings stay: processes inherit them"


def test_what_a_process_has_used_once_goes_back_to_the_kernel() -> None:
    """With `keeping`, freed memory between blocks in use stays resident until it is released."""
    code = """
import ctypes, re
from flowrl.weights.vllm_process.engine_process import release_freed_memory
def resident(): return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(ctypes.c_size_t(4 << 20)) for _ in range(64)]
for block in blocks: ctypes.memset(ctypes.c_void_p(block), 1, 4 << 20)
for block in blocks[:-1]: libc.free(block)
kept = resident()
release_freed_memory()
print(kept - resident())
"""
    env = {**os.environ, **malloc_variables({})}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200 << 20


@pytest.mark.parametrize(
    ("weights", "most"), [(None, 1 << 30), (1, 256 << 20), (513 << 20, 513 << 20), (1 << 40, 1 << 30)]
)
def test_a_kv_cache_on_a_cpu_is_at_most_as_large_as_the_weights(weights: int | None, most: int) -> None:
    assert largest_kv_cache(weights) == most
