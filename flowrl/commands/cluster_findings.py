"""What `flowrl doctor` finds out about Ray: its own or a joined cluster, and tcp between the machines of a joined
cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.commands.finding import Finding
from flowrl.errors import ConfigError, FlowrlError
from flowrl.runtime.driver.ray_cluster import RayCluster, compare_versions, probe, versions_of_nodes
from flowrl.wire.connection import CurveKeys

WITHIN_S = 60.0


def ray_findings(address: str) -> Iterator[Finding]:
    """Start a local Ray, or join the cluster at `address`, and leave it again."""
    if address:
        os.environ["RAY_ADDRESS"] = address
    joined = bool(os.environ.get("RAY_ADDRESS"))
    cluster, began = RayCluster(), time.perf_counter()
    try:
        cluster.start(graph_dir=Path(__file__).parent, num_cpus=2, num_gpus=0)
        seconds = time.perf_counter() - began
        if not joined:
            yield Finding("ray", "ok", f"started in {seconds:.1f} s", numbers={"start_s": seconds})
            return
        machines = cluster.machines()
        found = f"joined in {seconds:.1f} s: {len(machines.machines)} machines, {machines.num_cores} cores, "
        yield Finding("ray", "ok", f"{found}{machines.num_gpus} GPUs", numbers={"start_s": seconds})
        yield from _joined_findings()
    except ConfigError as problem:
        told, _, remedy = str(problem).partition("; ")
        yield Finding("ray", "failed", told, remedy or "see docs/clusters.md")
    except FlowrlError as problem:
        yield Finding("ray", "failed", str(problem), "look at Ray's logs, and for other Rays on this machine")
    finally:
        cluster.stop()


def _joined_findings() -> Iterator[Finding]:
    nodes = versions_of_nodes()
    wrong = list(compare_versions(probe()(), nodes))
    if wrong:
        for problem in wrong:
            told, _, remedy = problem.rpartition("; ")
            yield Finding("machines", "failed", told, remedy)
        yield Finding("tcp, CURVE", "skipped", "machines differ")
        return
    yield Finding("machines", "ok", f"the same versions on {len(nodes)}: {', '.join(nodes)}")
    yield from _links()


def _links() -> Iterator[Finding]:
    """A round trip with CURVE from each machine to each other one."""
    import ray

    keys = CurveKeys.new()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    actors = {node: _echoing(node, address, keys) for node, address in addresses.items()}
    try:
        urls = {node: ray.get(actor.url.remote(), timeout=WITHIN_S) for node, actor in actors.items()}
        for node, actor in actors.items():
            for other, url in urls.items():
                if other != node or len(actors) == 1:
                    answer = ray.get(actor.reach.remote(url), timeout=WITHIN_S)
                    yield _link(f"{addresses[node]} to {addresses[other]}", answer)
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _link(name: str, answer: tuple[float, float] | str) -> Finding:
    if isinstance(answer, str):
        told, _, remedy = answer.rpartition("; ")
        return Finding(f"tcp, CURVE {name}", "failed", told, f"{remedy}: flowrl uses ports that the kernel chooses")
    numbers = {"round_trip_s": answer[0], "bytes_per_s": answer[1]}
    found = f"{answer[1] / 1e9:.2f} GB/s, round trip {1e6 * answer[0]:.0f} µs"
    return Finding(f"tcp, CURVE {name}", "ok", found, numbers=numbers)


def _echoing(node: str, address: str, keys: CurveKeys) -> Any:
    """An actor on that machine, which listens at its address and reaches others."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(EchoActor).options(num_cpus=0, scheduling_strategy=where).remote(keys, address)


class EchoActor:
    """One machine's end of the links; that flowrl is installed there was checked before."""

    def __init__(self, keys: CurveKeys, ip: str) -> None:
        from flowrl.commands.machine_findings import Echo

        self._echo = Echo(keys, ip)

    def url(self) -> str:
        return self._echo.url

    def reach(self, url: str) -> tuple[float, float] | str:
        """(round trip in seconds, bytes per second), or what is wrong."""
        from flowrl.commands.machine_findings import measure_link

        try:
            return measure_link(url, self._echo.keys)
        except ConfigError as problem:
            return str(problem)
