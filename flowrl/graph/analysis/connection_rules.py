"""Checks 1 to 4, 6 and 8, those of edges: each finding names the change that mends it.

1 message types, 2 ports without an edge, 3 cycles, 4 feedback and admission, 6 fan-outs that merge again, 8 dispatch
rules and numbers of calls. Messages flow along queue edges, and both ways along call edges (request and reply).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from flowrl.errors import ConfigError
from flowrl.graph.analysis.branches import (
    Branches,
    admitted_port,
    find_cycles,
    nodes_past,
    reachable_nodes,
    source_ports,
)
from flowrl.graph.analysis.numbers import Numbers, versions_overtaken
from flowrl.graph.annotations import declared_types
from flowrl.graph.graph import Admission, Edge, Graph, OnLimit, a_kind, carried_type, port_name, port_owner
from flowrl.graph.node import PORT_KINDS
from flowrl.graph.ports import Call, In, Out, Port, Serve
from flowrl.messages import Message, Prompt, Tombstone, Weights

PARTNER: dict[type[Port], type[Port]] = {In: Out, Out: In, Call: Serve, Serve: Call}


def type_problems(graph: Graph) -> Iterator[str]:
    """Check 1: every edge carries the message type that both its ports declare."""
    for name, node in graph.nodes.items():
        for attribute, hint in declared_types(type(node)).items():
            if hint in PORT_KINDS:
                kind = hint.__name__
                yield f"{name}.{attribute} is declared as {kind} without a message type; write it as in {kind}[Sample]."
    for port in _all_ports(graph):
        for kind in port.types:
            if not _is_message(kind):
                yield (
                    f"{port_name(port)} is declared with {kind!r}, which is not a message class; use a subclass of "
                    f"Message."
                )
            elif problem := _unreadable_message(kind):  # type: ignore[arg-type]  # a class can be hashed
                yield problem
    for edge in graph.edges:
        if all(_is_message(kind) for port in (edge.out, edge.into) for kind in port.types) and not _edge_fits(edge):
            yield _misfit_sentence(graph, edge)


@functools.cache
def _unreadable_message(message: type[Message]) -> str:
    """Why the fields of a message class cannot be sent: an annotation without a meaning; "" if there is none."""
    try:
        declared_types(message)
    except ConfigError as error:
        return f"{error}."
    return ""


def _misfit_sentence(graph: Graph, edge: Edge) -> str:
    out, into = (", ".join(kind.__name__ for kind in port.types) for port in (edge.out, edge.into))
    if edge.kind == "call":
        return (
            f"{port_name(edge.out)} is a {type(edge.out).__name__}[{out}] but {port_name(edge.into)} is a "
            f"{type(edge.into).__name__}[{into}]; declare both with the same request and reply types."
        )
    others = [port_name(port) for port in _all_ports(graph) if isinstance(port, Out) and _ports_fit(port, edge.into)]
    hint = (
        f"connect {' or '.join(others)} instead" if others else "put a node between them that converts one to the other"
    )
    return f"{port_name(edge.out)} sends {out} but {port_name(edge.into)} takes {into}; {hint}."


def connection_problems(graph: Graph) -> Iterator[str]:
    """Check 2: every port is connected once and correctly, or optional, or ignored on purpose."""
    joined = Counter(id(port) for edge in graph.edges for port in (edge.out, edge.into))
    ignored = {id(port) for port in graph.ignored}
    for name, node in graph.nodes.items():
        optional, needed = node.facts().optional, node.facts().unconnected
        yield from (
            f"facts().optional of {name} names the port {port!r}, which it does not have; "
            f"it has {', '.join(node.ports) or 'none'}."
            for port in optional
            if port not in node.ports
        )
        for port in node.ports.values():
            if joined[id(port)] and id(port) in ignored:
                yield f"{port_name(port)} is both connected and ignored; remove the g.ignore or the edge."
            elif not joined[id(port)] and port.name in needed:
                yield f"node {name}: {needed[port.name]}"
            elif not joined[id(port)] and id(port) not in ignored and port.name not in optional:
                yield _unconnected_sentence(graph, port)
    yield from _doubled_edges(graph)


def _unconnected_sentence(graph: Graph, port: Port) -> str:
    verb = "g.call" if isinstance(port, Call | Serve) else "g.connect"
    partners = [other for other in _all_ports(graph) if isinstance(other, PARTNER[type(port)])]
    fitting = [other for other in partners if other.node is not port.node and _are_partners(port, other)]
    hint = f" ({' or '.join(port_name(other) for other in fitting)} would fit)" if fitting else ""
    kind = f"{a_kind(type(port))}[{', '.join(getattr(kind, '__name__', str(kind)) for kind in port.types)}]"
    return (
        f"{port_name(port)}, {kind} port, is not connected; connect it with {verb}{hint}, "
        f"or write g.ignore({port_name(port)}) if this is intended."
    )


def _are_partners(port: Port, other: Port) -> bool:
    out, into = (port, other) if isinstance(port, Out | Call) else (other, port)
    return _ports_fit(out, into)


def _doubled_edges(graph: Graph) -> Iterator[str]:
    pairs = Counter((edge.out, edge.into) for edge in graph.edges)
    for (out, into), count in pairs.items():
        if count > 1:
            yield f"{port_name(out)} -> {port_name(into)} is declared {count} times; keep one of these edges."
    for port in _all_ports(graph):
        edges = [edge for edge in dict.fromkeys(graph.edges) if edge.into is port]
        kinds = {edge.kind for edge in edges}
        if "latest" in kinds and len({edge.out for edge in edges}) > 1:
            others = ", ".join(port_name(edge.out) for edge in edges)
            yield f"{port_name(port)} keeps only the newest message, but {others} send to it; keep one latest edge."
        if isinstance(port, Call) and len({edge.into for edge in graph.edges if edge.out is port}) > 1:
            yield f"{port_name(port)} is connected to several servers, but a Call port has one; declare one for each."


def dispatch_problems(graph: Graph) -> Iterator[str]:
    """Check 8, and the requirements of gang and key dispatch on their messages."""
    for edge in graph.edges:
        if edge.kind != "queue" or not _is_message(edge.out.types[0]):
            continue
        into = graph.placed[port_owner(edge.into)]
        kind = edge.out.types[0]
        if into.node.keyed_state and into.replicas > 1 and not edge.rule.by_group:
            yield (
                f"{into.name} keeps items by group and has {into.replicas} replicas, but {edge.name} divides a "
                f'group among them (dispatch={edge.dispatch!r}); give that edge dispatch="key".'
            )
        if into.node.gang and into.replicas > 1 and not edge.rule.to_each:
            yield (
                f"the {into.replicas} ranks of {into.name} work in lockstep, but {edge.name} has "
                f'dispatch={edge.dispatch!r}; give that edge dispatch="gang".'
            )
        if edge.rule.splits and not into.node.gang:
            yield (
                f'{edge.name} has dispatch="gang" but {into.name} is not a gang; use "share", or set gang = True on '
                f"the node."
            )
        if edge.rule.splits and not callable(getattr(kind, "split", None)):
            yield f'{edge.name} has dispatch="gang" but {kind.__name__} has no split(n); give the message that method.'
        if edge.rule.by_group and "group_id" not in _field_names(kind):
            yield f'{edge.name} has dispatch="key" but {kind.__name__} has no field group_id; add it or use "share".'
        if edge.capacity is not None and edge.capacity < 1:
            yield f"{edge.name} has capacity={edge.capacity}; it needs at least 1; without capacity= it is derived."


def call_problems(graph: Graph) -> Iterator[str]:
    """The numbers of call edges are in their valid ranges."""
    for edge in graph.edges:
        if edge.kind != "call":
            continue
        if edge.capacity is not None and edge.capacity < 1:
            yield f"{edge.name} has capacity={edge.capacity}; it needs at least 1; without capacity= it is derived."
        margin = edge.affinity_margin
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int) or margin < 0):
            yield (
                f"{edge.name} has affinity_margin={margin!r}; it needs a whole number of at least 0 (the open requests "
                "that a session's replica may have more than another); without affinity_margin= sessions move freely."
            )


def adapter_problems(graph: Graph) -> Iterator[str]:
    """Both ends of a weights edge declare the same content: whole weights, or adapters of one rank."""
    for edge in graph.edges:
        sent, taken = (graph.placed[port_owner(port)].node.facts().adapter_rank for port in (edge.out, edge.into))
        if edge.kind == "latest" and None not in (sent, taken) and sent != taken:
            yield (
                f"{port_name(edge.out)} sends {_content_words(sent)} but {port_name(edge.into)} takes "
                f"{_content_words(taken)}; "
                'give both nodes the same lora (sync="merged" sends whole weights).'
            )


def fixed_weights_problems(graph: Graph) -> Iterator[str]:
    """Weights are sent to nodes that can take them, and every version that a node must not miss is sent."""
    for edge in graph.edges:
        facts, sent = (graph.placed[port_owner(port)].node.facts() for port in (edge.into, edge.out))
        why = facts.fixed_weights
        every = sent.publish_every
        if edge.kind == "latest" and every > 0 and facts.takes_every % every:  # `count_problems` reports others
            yield (
                f"{port_name(edge.into)} takes one version in {facts.takes_every}, but {port_name(edge.out)} sends "
                f"one in {every}; make the first number a multiple of the second."
            )
        if edge.kind == "latest" and why:
            yield f"{port_name(edge.out)} sends weights to {port_name(edge.into)}, which takes none: {why}."


def _content_words(rank: int | None) -> str:
    return f"adapters of rank {rank}" if rank else "whole weights"


def _field_names(kind: type[Message]) -> Iterable[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _all_ports(graph: Graph) -> list[Port]:
    return [port for node in graph.nodes.values() for port in node.ports.values()]


def _is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message) and kind is not Tombstone


def _edge_fits(edge: Edge) -> bool:
    return _ports_fit(edge.out, edge.into)


def _ports_fit(out: Port, into: Port) -> bool:
    """`Out` is covariant and `In` invariant: a sent message may be a subclass. Requests have to match exactly."""
    if not all(_is_message(kind) for kind in (*out.types, *into.types)):
        return False
    if isinstance(out, Call):
        return out.types == into.types
    return issubclass(out.types[0], into.types[0])


def cycle_problems(graph: Graph) -> Iterator[str]:
    """Check 3: samples never run in a cycle. Weights return over a latest edge, requests over a call edge."""
    for cycle in find_cycles([edge for edge in graph.edges if edge.kind == "queue"]):
        path = ", ".join(edge.name for edge in cycle)
        weights = [edge for edge in cycle if issubclass(carried_type(edge.out), Weights)]
        if weights:
            ports = f"{port_name(weights[0].out)}, {port_name(weights[0].into)}"
            yield f"the cycle {path} has no latest edge and will fill up and stop; connect it with g.latest({ports})."
        else:
            yield (
                f"the cycle {path} has no latest edge: its streams could not end, and samples in it could not be "
                f"counted; let {port_owner(cycle[0].out)} send a request with g.call and wait for the reply, or make "
                f"one edge a g.latest(...)."
            )
    for cycle in find_cycles([edge for edge in graph.edges if edge.kind == "call"]):
        path = ", ".join(edge.name for edge in cycle)
        yield f"the requests {path} wait for each other in a cycle; let one node answer without requests of its own."


def feedback_problems(graph: Graph) -> Iterator[str]:
    """Check 4: a trainer of samples made with its own weights needs an admission that counts these weights."""
    admission = graph.admission
    for edge in feedback_edges(graph):
        port = port_name(edge.into)
        if admission is None:
            yield (
                f"{edge.name} makes a feedback loop, but nothing bounds staleness; write "
                f"g.admit({_source_words(graph, edge)}, until={port}, staleness=1)."
            )
        elif not any(edge.into is until for until in admission.until):
            names = ", ".join(port_name(until) for until in (*admission.until, edge.into))
            yield f"{edge.name} makes a feedback loop, but g.admit does not wait for it; write until=({names})."
    if admission is not None:
        yield from _until_problems(graph, admission)
        yield from _unadmitted_sources(graph, admission)


def feedback_edges(graph: Graph) -> list[Edge]:
    """Latest edges whose consumer sends messages that reach their producer again."""
    latest = [edge for edge in graph.edges if edge.kind == "latest"]
    return [edge for edge in latest if port_owner(edge.out) in reachable_nodes(graph, port_owner(edge.into))]


def _source_words(graph: Graph, edge: Edge) -> str:
    """The Out port that g.admit most likely has to name."""
    sources = [port for port in source_ports(graph) if port_owner(edge.into) in nodes_past(graph, port)]
    prompts = [port for port in sources if issubclass(carried_type(port), Prompt)]
    return next((port_name(port) for port in (*prompts, *sources)), "SOURCE.PORT")


def _until_problems(graph: Graph, admission: Admission) -> Iterator[str]:
    reached = nodes_past(graph, admission.out)
    for port in admission.until:
        edges = [edge for edge in graph.edges if edge.kind == "latest" and edge.into is port]
        if not edges:
            fits = [port_name(edge.into) for edge in graph.edges if edge.kind == "latest"]
            hint = f"name {' or '.join(fits)}" if fits else f"connect weights by g.latest(..., {port_name(port)})"
            yield f"g.admit waits until {port_name(port)}, which is not the end of a latest edge; {hint}."
        for edge in edges:
            if port_owner(edge.out) not in reached:
                yield (
                    f"g.admit gives tickets to {port_name(admission.out)}, but nothing that it sends reaches "
                    f"{port_owner(edge.out)}, whose weights end the tickets; connect the two, or admit the source "
                    f"of its samples."
                )


def _unadmitted_sources(graph: Graph, admission: Admission) -> Iterator[str]:
    trainers = {port_owner(edge.out) for edge in graph.edges if any(edge.into is port for port in admission.until)}
    for port in source_ports(graph):
        if port_owner(port) != port_owner(admission.out) and nodes_past(graph, port) & trainers:
            yield (
                f"{port_name(port)} also feeds {', '.join(sorted(nodes_past(graph, port) & trainers))}, but only "
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
        for port in node.ports.values() if branches.counts_beyond(name) else ():
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
    sources = dict.fromkeys(
        port_owner(p) for p in source_ports(graph) if p is admitted or issubclass(carried_type(p), Prompt)
    )
    for name in sources:
        placed = graph.placed[name]
        if placed.replicas > 1 and not placed.node.facts().sharded:
            yield (
                f"{name} is a source and has {placed.replicas} replicas, which would all admit the same groups; give "
                f"it one replica, or let each send its own part and declare sharded=True in its facts()."
            )


def _arrival_problems(graph: Graph, branches: Branches, port: In[Any]) -> Iterator[str]:
    """A node that counts samples has to know how many copies of each sample arrive."""
    arrivals = branches.num_arrivals(port)
    if len(set(arrivals.values())) > 1:
        each = ", ".join(f"{number} from {source}" for source, number in arrivals.items())
        yield (
            f"{port_name(port)} receives different numbers of copies of a sample ({each}), so it cannot know when it "
            f"has all; give each branch its own In port."
        )


def _broadcast_problems(graph: Graph, branches: Branches) -> Iterator[str]:
    """Replicas that each process a broadcast copy deliver one sample several times."""
    for edge in graph.edges:
        into = graph.placed[port_owner(edge.into)]
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
                yield from _repeat_problems(graph, branches, port)
        if missing := [join for join in joins if not isinstance(node.ports.get(join), In)]:
            yield f"facts().joins of {name} names {', '.join(missing)}, which are not In ports of it; correct this."
        elif len(joins) > 1:
            yield from _join_problems(graph, [node.ports[join] for join in joins])


def _repeat_problems(graph: Graph, branches: Branches, port: Port) -> Iterator[str]:
    """An In port must not get every message of one Out port more than once."""
    for out, lasts in branches.repeated_samples(port).items():
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
        node = port_owner(ports[0])
        yield f"{node} matches {names} by sample, but no Out port feeds them all; fan out from one port."
        return
    for port in ports:
        between = _nodes_between(graph, common[-1], into[port])
        if mixing := [name for name in between if not graph.nodes[name].facts().keeps_lineage]:
            yield (
                f"{port_owner(ports[0])} matches {names} by sample, but {', '.join(mixing)} on the path to "
                f"{port_name(port)} merges or renames samples; join before it."
            )


def _fan_outs(graph: Graph) -> list[Port]:
    outs = [edge.out for edge in graph.edges if edge.kind == "queue" and isinstance(edge.out, Out)]
    return [out for out in dict.fromkeys(outs) if outs.count(out) > 1]


def _first_edges(graph: Graph, out: Port, last: Edge) -> list[Edge]:
    """The edges of `out` whose messages lead to `last`."""
    firsts = [edge for edge in graph.edges if edge.out is out and edge.kind == "queue"]
    return [
        edge for edge in firsts if edge is last or port_owner(last.out) in _queue_reach(graph, port_owner(edge.into))
    ]


def _comes_by(graph: Graph, out: Port, last: Edge) -> bool:
    return bool(_first_edges(graph, out, last))


def _nodes_between(graph: Graph, out: Port, lasts: list[Edge]) -> list[str]:
    """Nodes between a fan-out and the edges of a joined port."""
    starts = {port_owner(first.into) for last in lasts for first in _first_edges(graph, out, last) if first is not last}
    reach = frozenset().union(*(_queue_reach(graph, start) for start in starts))
    return [
        name
        for name in graph.nodes
        if name in reach and any(port_owner(e.out) in _queue_reach(graph, name) for e in lasts)
    ]


def _queue_reach(graph: Graph, start: str) -> frozenset[str]:
    queue = Graph(graph.name)
    queue.edges = [edge for edge in graph.edges if edge.kind == "queue"]
    return reachable_nodes(queue, start)
