"""`flowrl doctor`: what this machine or a cluster can do; every line with a problem has a remedy."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.commands.machine_findings import Finding, as_text
from flowrl.errors import ConfigError, FlowrlError
from flowrl.runtime.driver.ray_cluster import RayCluster, compare_versions, probe, versions_of_nodes
from flowrl.runtime.telemetry.standard_streams import print_text
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
    """Whether the machines of the cluster have the same versions, and how they reach each other over tcp with CURVE."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = versions_of_nodes()
    if wrong := list(compare_versions(probe()(), nodes)):
        for problem in wrong:
            told, _, remedy = problem.rpartition("; ")
            yield Finding("machines", "failed", told, remedy)
        yield Finding("tcp, CURVE", "skipped", "machines differ")
        return
    yield Finding("machines", "ok", f"the same versions on {len(nodes)}: {', '.join(nodes)}")

    # An actor on each machine listens at its address, and reaches each other one.
    keys = CurveKeys.new()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    actors: dict[str, Any] = {}
    for node, address in addresses.items():
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(EchoActor).options(num_cpus=0, scheduling_strategy=where)
        actors[node] = actor.remote(keys, address)
    try:
        urls = {node: ray.get(actor.url.remote(), timeout=WITHIN_S) for node, actor in actors.items()}
        for node, actor in actors.items():
            for other, url in urls.items():
                if other != node or len(actors) == 1:
                    answer = ray.get(actor.reach.remote(url), timeout=WITHIN_S)
                    yield _link_finding(f"tcp, CURVE {addresses[node]} to {addresses[other]}", answer)
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _link_finding(name: str, answer: tuple[float, float] | str) -> Finding:
    if isinstance(answer, str):
        told, _, remedy = answer.rpartition("; ")
        return Finding(name, "failed", told, f"{remedy}: flowrl uses ports that the kernel chooses")
    numbers = {"round_trip_s": answer[0], "bytes_per_s": answer[1]}
    found = f"{answer[1] / 1e9:.2f} GB/s, round trip {1e6 * answer[0]:.0f} µs"
    return Finding(name, "ok", found, numbers=numbers)


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


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `flowrl doctor`."""

    address: str = ""
    """Head of a Ray cluster to join, HOST:6379; empty: RAY_ADDRESS if it is set, else start a local Ray."""
    ray: bool = True
    """Start or join Ray."""
    json: bool = False
    """Print a JSON object instead of lines."""


def print_findings(options: DoctorOptions) -> int:
    """Print the findings; returns the exit status: 0, or 1 if something failed."""
    from flowrl.commands.machine_findings import machine_findings

    parts: Iterable[Finding] = machine_findings()
    if options.ray:
        parts = itertools.chain(parts, ray_findings(options.address))
    findings = list(parts)
    failed = sum(finding.status == "failed" for finding in findings)
    if options.json:
        print_text(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print_text(as_text(findings))
        print_text(f"doctor: {f'{failed} failed' if failed else 'ok'}")
    return 1 if failed else 0
