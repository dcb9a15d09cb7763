"""Checks 3, 4 and the lineage part of 6: cycles, feedback and admission, fan-outs that merge again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from flowrl.graph.analysis.branches import Branches
from flowrl.graph.analysis.flow import admitted_port, cycles, past, reachable, source_ports
from flowrl.graph.analysis.numbers import Numbers, versions_overtaken
from flowrl.graph.graph import Admission, Edge, Graph, OnLimit, carried, owner, port_name
from flowrl.graph.ports import In, Out, Port
from flowrl.messages import Prompt, Weights


def cycle_problems(graph: Graph) -> Iterator[str]:
    """Check 3: samples never run in a cycle. Weights return over a latest edge, requests over a call edge."""
    for cycle in cycles([edge for edge in graph.edges if edge.kind == "queue"]):
        path = ", ".join(edge.name for edge in cycle)
        weights = [edge for edge in cycle if issubclass(carried(edge.out), Weights)]
        if weights:
            ports = f"{port_name(weights[0].out)}, {port_name(weights[0].into)}"
            yield f"the cycle {path} has no latest edge and will fill up and stop; connect it with g.latest({ports})."
        else:
            yield (
                f"the cycle {path} has no latest edge: its streams could not end, and samples in it could not be "
                f"counted; let {owner(cycle[0].out)} send a request with g.call and wait for the reply, or make "
                f"one edge a g.latest(...)."
            )
    for cycle in cycles([edge for edge in graph.edges if edge.kind == "call"]):
        path = ", ".join(edge.name for edge in cycle)
        yield f"the requests {path} wait for each other in a cycle; let one node answer without requests of its own."


def feedback_problems(graph: Graph) -> Iterator[str]:
    """Check 4: a trainer of samples made with its own weights needs an admission that counts these weights."""
    admission = graph.admission
    for edge in feedback(graph):
        port = port_name(edge.into)
        if admission is None:
            yield (
                f"{edge.name} makes a feedback loop, but nothing bounds staleness; write "
                f"g.admit({_source(graph, edge)}, until={port}, staleness=1)."
            )
        elif not any(edge.into is until for until in admission.until):
            names = ", ".join(port_name(until) for until in (*admission.until, edge.into))
            yield f"{edge.name} makes a feedback loop, but g.admit does not wait for it; write until=({names})."
    if admission is not None:
        yield from _until_problems(graph, admission)
        yield from _unadmitted(graph, admission)


def feedback(graph: Graph) -> list[Edge]:
    """Latest edges whose consumer sends messages that reach their producer again."""
    latest = [edge for edge in graph.edges if edge.kind == "latest"]
    return [edge for edge in latest if owner(edge.out) in reachable(graph, owner(edge.into))]


def _source(graph: Graph, edge: Edge) -> str:
    """The Out port that g.admit most likely has to name."""
    sources = [port for port in source_ports(graph) if owner(edge.into) in past(graph, port)]
    prompts = [port for port in sources if issubclass(carried(port), Prompt)]
    return next((port_name(port) for port in (*prompts, *sources)), "SOURCE.PORT")


def _until_problems(graph: Graph, admission: Admission) -> Iterator[str]:
    reached = past(graph, admission.out)
    for port in admission.until:
        edges = [edge for edge in graph.edges if edge.kind == "latest" and edge.into is port]
        if not edges:
            fits = [port_name(edge.into) for edge in graph.edges if edge.kind == "latest"]
            hint = f"name {' or '.join(fits)}" if fits else f"connect weights by g.latest(..., {port_name(port)})"
            yield f"g.admit waits until {port_name(port)}, which is not the end of a latest edge; {hint}."
        for edge in edges:
            if owner(edge.out) not in reached:
                yield (
                    f"g.admit gives tickets to {port_name(admission.out)}, but nothing that it sends reaches "
                    f"{owner(edge.out)}, whose weights end the tickets; connect the two, or admit the source "
                    f"of its samples."
                )


def _unadmitted(graph: Graph, admission: Admission) -> Iterator[str]:
    trainers = {owner(edge.out) for edge in graph.edges if any(edge.into is port for port in admission.until)}
    for port in source_ports(graph):
        if owner(port) != owner(admission.out) and past(graph, port) & trainers:
            yield (
                f"{port_name(port)} also feeds {', '.join(sorted(past(graph, port) & trainers))}, but only "
                f"{port_name(admission.out)} is admitted, so nothing bounds the staleness of its groups; mix both "
                f"sources in one node."
            )


def admission_problems(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Checks 4 and 5: the arguments of g.admit."""
    admission = graph.admission
    if admission is None:
        return
    if admission.staleness < 0:
        yield f"g.admit has staleness={admission.staleness}; it needs 0 (synchronous) or more."
    if admission.on_limit not in get_args(OnLimit):
        yield f"g.admit has on_limit={admission.on_limit!r}; it needs one of {', '.join(get_args(OnLimit))}."
    if admission.look_ahead < 1:
        yield f"g.admit has look_ahead={admission.look_ahead}; it needs 1 (admission order) or more."
    if admission.look_ahead > 1 and admission.on_limit == "mask":
        yield 'g.admit has look_ahead, but on_limit="mask" has no window; leave look_ahead out.'
    if numbers.groups_per_batch is None:
        yield (
            "no node declares how many groups make a batch, so the number of tickets is unknown; add a batcher such as "
            "TokenBatch, or declare groups_per_batch in your batcher's facts()."
        )
    elif numbers.groups_per_batch > 0 and admission.staleness >= 0 and numbers.ahead is not None and numbers.ahead < 0:
        cost = versions_overtaken(admission.look_ahead, numbers.groups_per_batch)
        most = admission.staleness * numbers.groups_per_batch + 1
        yield (
            f"g.admit has look_ahead={admission.look_ahead}, which can age a group by {cost} versions, but "
            f"staleness={admission.staleness}; use look_ahead={most} at most, or staleness={cost} at least."
        )


def branch_problems(graph: Graph) -> Iterator[str]:
    """Check 6: at the end of each branch, every sample can be counted and recorded."""
    branches = Branches(graph)
    yield from _source_problems(graph)
    yield from _broadcast_problems(graph, branches)
    for name, node in graph.nodes.items():
        for port in node.ports.values() if branches.counts(name) else ():
            if isinstance(port, In):
                yield from _arrival_problems(graph, branches, port)
    admission = graph.admission
    if admission is not None and admission.on_limit == "mask":
        beyond = branches.beyond(admission.out)
        for name in (name for name in branches.own_clock if name in beyond):
            yield (
                f"{name} trains on other batches than {branches.trainers[0]}, so its versions do not give the age of "
                f'tokens and on_limit="mask" cannot mask them; feed both from one port, or use on_limit="wait".'
            )


def _source_problems(graph: Graph) -> Iterator[str]:
    """Every replica of a source sends all groups, unless the source declares itself sharded."""
    admitted = admitted_port(graph)
    sources = dict.fromkeys(owner(p) for p in source_ports(graph) if p is admitted or issubclass(carried(p), Prompt))
    for name in sources:
        placed = graph.placed[name]
        if placed.replicas > 1 and not placed.node.facts().sharded:
            yield (
                f"{name} is a source and has {placed.replicas} replicas, which would all admit the same groups; give "
                f"it one replica, or let each send its own part and declare sharded=True in its facts()."
            )


def _arrival_problems(graph: Graph, branches: Branches, port: In[Any]) -> Iterator[str]:
    """A node that counts samples has to know how many copies of each sample arrive."""
    arrivals = branches.arrivals(port)
    if len(set(arrivals.values())) > 1:
        each = ", ".join(f"{number} from {source}" for source, number in arrivals.items())
        yield (
            f"{port_name(port)} receives different numbers of copies of a sample ({each}), so it cannot know when it "
            f"has all; give each branch its own In port."
        )


def _broadcast_problems(graph: Graph, branches: Branches) -> Iterator[str]:
    """Replicas that each process a broadcast copy deliver one sample several times."""
    for edge in graph.edges:
        into = graph.placed[owner(edge.into)]
        counted = [port for port in into.node.ports.values() if branches.is_counted(port)]
        if edge.rule.copies and into.replicas > 1 and counted:
            yield (
                f"{edge.name} sends every sample to each of the {into.replicas} replicas of {into.name} "
                f'(dispatch="broadcast"), so after {port_name(counted[0])} each is counted {into.replicas} times; use '
                f'dispatch="share", or let that branch end in a node that counts no samples.'
            )


def lineage_problems(graph: Graph) -> Iterator[str]:
    """Check 6: branches of one fan-out that merge again deliver each sample where it is expected."""
    branches = Branches(graph)
    for name, node in graph.nodes.items():
        joins = node.facts().joins
        for port in node.ports.values():
            if isinstance(port, In):
                yield from _repeats(graph, branches, port)
        if missing := [join for join in joins if not isinstance(node.ports.get(join), In)]:
            yield f"facts().joins of {name} names {', '.join(missing)}, which are not In ports of it; correct this."
        elif len(joins) > 1:
            yield from _join_problems(graph, [node.ports[join] for join in joins])


def _repeats(graph: Graph, branches: Branches, port: Port) -> Iterator[str]:
    """An In port must not get every message of one Out port more than once."""
    for out, lasts in branches.repeats(port).items():
        yield (
            f"{port_name(port)} receives every message of {out} {len(lasts)} times, by {' and '.join(lasts)}; "
            f"join the branches in a node with an In port for each."
        )


def _join_problems(graph: Graph, ports: list[Port]) -> Iterator[str]:
    """Joined ports need one common fan-out upstream, and branches that keep samples separate and complete."""
    into = {port: [edge for edge in graph.edges if edge.into is port and edge.kind == "queue"] for port in ports}
    if not all(into.values()):
        return
    common = [out for out in _fan_outs(graph) if all(any(_comes_by(graph, out, e) for e in into[p]) for p in ports)]
    names = ", ".join(port_name(port) for port in ports)
    if not common:
        yield f"{owner(ports[0])} matches {names} by sample, but no Out port feeds them all; fan out from one port."
        return
    for port in ports:
        between = _between(graph, common[-1], into[port])
        if mixing := [name for name in between if not graph.nodes[name].facts().keeps_lineage]:
            yield (
                f"{owner(ports[0])} matches {names} by sample, but {', '.join(mixing)} on the path to "
                f"{port_name(port)} merges or renames samples; join before it."
            )


def _fan_outs(graph: Graph) -> list[Port]:
    outs = [edge.out for edge in graph.edges if edge.kind == "queue" and isinstance(edge.out, Out)]
    return [out for out in dict.fromkeys(outs) if outs.count(out) > 1]


def _first_edges(graph: Graph, out: Port, last: Edge) -> list[Edge]:
    """The edges of `out` whose messages lead to `last`."""
    firsts = [edge for edge in graph.edges if edge.out is out and edge.kind == "queue"]
    return [edge for edge in firsts if edge is last or owner(last.out) in _queue_reach(graph, owner(edge.into))]


def _comes_by(graph: Graph, out: Port, last: Edge) -> bool:
    return bool(_first_edges(graph, out, last))


def _between(graph: Graph, out: Port, lasts: list[Edge]) -> list[str]:
    """Nodes between a fan-out and the edges of a joined port."""
    starts = {owner(first.into) for last in lasts for first in _first_edges(graph, out, last) if first is not last}
    reach = frozenset().union(*(_queue_reach(graph, start) for start in starts))
    return [
        name for name in graph.nodes if name in reach and any(owner(e.out) in _queue_reach(graph, name) for e in lasts)
    ]


def _queue_reach(graph: Graph, start: str) -> frozenset[str]:
    queue = Graph(graph.name)
    queue.edges = [edge for edge in graph.edges if edge.kind == "queue"]
    return reachable(queue, start)
