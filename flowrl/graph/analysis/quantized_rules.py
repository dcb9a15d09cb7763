"""Generators whose weights are quantized: the hardware that they need, and what corrects the gap to the trainer's
policy."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph.analysis.flow import reachable
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.facts import Facts
from flowrl.graph.graph import Graph, owner
from flowrl.graph.machine import Cluster


def capability_problems(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Nodes on GPUs or CPUs that are known to lack a capability that the node needs."""
    for host in plan.hosts:
        machine = cluster.machines[host.machine]
        has = machine.capability if host.gpus else 0.0
        for replica in host.nodes:
            name = replica.partition("/")[0]
            facts = graph.nodes[name].facts()
            if 0 < has < facts.least_capability:
                yield (
                    f"{name} computes in {facts.quantization}, which needs GPUs of compute capability "
                    f"{facts.least_capability} or more (L4, RTX4090, L40S, H100 and newer), but those of machine "
                    f"{host.machine} have {has}; leave --engine.quantization out, or choose other GPUs."
                )
            if facts.cpu_flags and machine.cpu_flags and not facts.cpu_flags & machine.cpu_flags:
                yield (
                    f"{name} keeps its KV cache in fp8, which vLLM does on GPUs and on CPUs with AVX512 or AMX, and "
                    f"the CPU of machine {host.machine} has neither; leave --engine.kv-cache-dtype out."
                )


def gap_notes(graph: Graph) -> Iterator[str]:
    """What corrects the gap between a quantized generator and its trainer, as "node: note"."""
    for name, gap, facts in _gaps(graph):
        if facts.correction:
            yield f"{name}: {gap}; the loss corrects that by {facts.correction}"


def gap_warnings(graph: Graph) -> Iterator[str]:
    """Nodes that take the logprobs of a quantized generator for the trainer's, without a correction."""
    for name, gap, facts in _gaps(graph):
        if not facts.correction:
            yield f"{gap}, and {name} takes them for the trainer's without a correction; {facts.correct_by}."


def _gaps(graph: Graph) -> Iterator[tuple[str, str, Facts]]:
    """(node, its gap as a sentence, its facts) for the nodes to which the gap matters: they get samples of a quantized
    generator over a path on which no node makes data of them (`Facts.as_data`). A node that sends weights, but none to
    this generator, is left out."""
    weights = [(owner(edge.out), owner(edge.into)) for edge in graph.edges if edge.kind == "latest"]
    senders = {sender for sender, _ in weights}
    as_data = frozenset(name for name, node in graph.nodes.items() if node.facts().as_data)
    for generator in dict.fromkeys(into for _, into in weights):
        if not (quantization := graph.nodes[generator].facts().quantization):
            continue
        gap = f"{generator} samples in {quantization}, with other logprobs than the trainer's (behavior_gap)"
        reached = reachable(graph, generator, not_past=as_data)
        for name in (name for name in graph.nodes if name in reached):
            facts = graph.nodes[name].facts()
            if facts.correction is not None and ((name, generator) in weights or name not in senders):
                yield name, gap, facts
