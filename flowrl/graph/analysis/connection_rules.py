"""Checks 1 to 4, 6 and 8, those of edges: each finding names the change that mends it.

1 message types, 2 ports without an edge, 3 cycles, 4 feedback and admission, 6 fan-outs that merge again, 8 dispatch
rules and numbers of edges, 9 what weights edges carry, and how. Messages flow along queue edges, and both ways along
call edges (request and reply).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from flowrl.errors import ConfigError
from flowrl.graph.analysis.branches import (
    Branches,
    counts_samples,
    find_cycles,
    merges_copies,
    nodes_past,
    reachable_nodes,
    source_ports,
)
from flowrl.graph.analysis.numbers import Numbers, versions_overtaken
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.annotations import declared_types
from flowrl.graph.graph import Edge, Graph, OnLimit, a_kind, carried_type, port_name, port_owner
from flowrl.graph.node import PORT_KINDS, Node
from flowrl.graph.ports import Ask, Call, In, Out, Port, Serve
from flowrl.messages import Message, Prompt, Sample, Tombstone, Weights

PARTNER: dict[type[Port], type[Port]] = {In: Out, Out: In, Call: Serve, Serve: Call}


def type_problems(graph: Graph) -> Iterator[str]:
    """Check 1: every edge carries the message type that both its ports declare."""
    for name, node in graph.nodes.items():
        for attribute, hint in declared_types(type(node)).items():
            if hint in PORT_KINDS:
                kind = hint.__name__
                yield f"{name}.{attribute} is declared as {kind} without a message type; write it as in {kind}[Sample]."
    for port in _all_ports(graph):
        for message in port.types:
            if not _is_message(message):
                yield (
                    f"{port_name(port)} is declared with {message!r}, which is not a message class; use a subclass of "
                    f"Message."
                )
                continue
            try:
                declared_types(message)
            except ConfigError as error:
                yield f"{error}."
    for edge in graph.edges:
        if not all(_is_message(kind) for kind in (*edge.out.types, *edge.into.types)) or _ports_fit(
            edge.out, edge.into
        ):
            continue
        out, into = (", ".join(kind.__name__ for kind in port.types) for port in (edge.out, edge.into))
        if edge.kind == "call":
            yield (
                f"{port_name(edge.out)} is a {type(edge.out).__name__}[{out}] but {port_name(edge.into)} is a "
                f"{type(edge.into).__name__}[{into}]; declare both with the same request and reply types."
            )
            continue
        fitting = [port_name(one) for one in _all_ports(graph) if isinstance(one, Out) and _ports_fit(one, edge.into)]
        hint = f"connect {' or '.join(fitting)} instead"
        if not fitting:
            hint = "put a node between them that converts one to the other"
        yield f"{port_name(edge.out)} sends {out} but {port_name(edge.into)} takes {into}; {hint}."


def connection_problems(graph: Graph) -> Iterator[str]:
    """Check 2: every port is connected once and correctly, or optional, or ignored on purpose."""
    joined = Counter(id(port) for edge in graph.edges for port in (edge.out, edge.into))
    ignored = {id(port) for port in graph.ignored}
    for name, node in graph.nodes.items():
        optional, needed = node.facts().optional, node.facts().unconnected
        for optional_name in optional:
            if optional_name not in node.ports:
                yield (
                    f"facts().optional of {name} names the port {optional_name!r}, which it does not have; "
                    f"it has {', '.join(node.ports) or 'none'}."
                )
        for port in node.ports.values():
            if joined[id(port)] and id(port) in ignored:
                yield f"{port_name(port)} is both connected and ignored; remove the g.ignore or the edge."
            elif not joined[id(port)] and port.name in needed:
                yield f"node {name}: {needed[port.name]}"
            elif not joined[id(port)] and id(port) not in ignored and port.name not in optional:
                yield _unconnected_sentence(graph, port)

    for (out, into), count in Counter((edge.out, edge.into) for edge in graph.edges).items():
        if count > 1:
            yield f"{port_name(out)} -> {port_name(into)} is declared {count} times; keep one of these edges."
    for port in _all_ports(graph):
        edges = [edge for edge in dict.fromkeys(graph.edges) if edge.into is port]
        if any(edge.kind == "latest" for edge in edges) and len({edge.out for edge in edges}) > 1:
            others = ", ".join(port_name(edge.out) for edge in edges)
            yield f"{port_name(port)} keeps only the newest message, but {others} send to it; keep one latest edge."
        if isinstance(port, Call) and len({edge.into for edge in graph.edges if edge.out is port}) > 1:
            yield f"{port_name(port)} is connected to several servers, but a Call port has one; declare one for each."


def _unconnected_sentence(graph: Graph, port: Port) -> str:
    verb = "g.call" if isinstance(port, Call | Serve) else "g.connect"
    sends = isinstance(port, Out | Call)
    partner = next(other for kind, other in PARTNER.items() if isinstance(port, kind))
    fitting = [
        port_name(other)
        for other in _all_ports(graph)
        if isinstance(other, partner) and other.node is not port.node
        if (_ports_fit(port, other) if sends else _ports_fit(other, port))
    ]
    hint = f" ({' or '.join(fitting)} would fit)" if fitting else ""
    kind = f"{a_kind(type(port))}[{', '.join(getattr(kind, '__name__', str(kind)) for kind in port.types)}]"
    return (
        f"{port_name(port)}, {kind} port, is not connected; connect it with {verb}{hint}, "
        f"or write g.ignore({port_name(port)}) if this is intended."
    )


def dispatch_problems(graph: Graph) -> Iterator[str]:
    """Check 8: the requirements of gang and key dispatch on their messages, and the numbers of edges."""
    for edge in graph.edges:
        kind, into = carried_type(edge.out), graph.placed[port_owner(edge.into)]
        if edge.kind == "latest" or (edge.kind == "queue" and not _is_message(edge.out.types[0])):
            continue
        if edge.capacity is not None and edge.capacity < 1:
            yield f"{edge.name} has capacity={edge.capacity}; it needs at least 1; without capacity= it is derived."
        if edge.kind == "call":
            asker, server = (graph.nodes[port_owner(port)].facts() for port in (edge.out, edge.into))
            if isinstance(edge.out, Ask) and asker.asks_schema and not server.takes_schema:
                yield (
                    f"{port_name(edge.out)} asks with a schema, but {port_owner(edge.into)} cannot force a reply into "
                    "one; connect a Generator, or ask without a schema and read what the reply says."
                )
            margin = edge.affinity_margin
            if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int) or margin < 0):
                yield (
                    f"{edge.name} has affinity_margin={margin!r}; it needs a whole number of at least 0 (the open "
                    "requests that a session's replica may have more than another); without affinity_margin= sessions "
                    "move freely."
                )
            continue
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
        has_group = dataclasses.is_dataclass(kind) and any(one.name == "group_id" for one in dataclasses.fields(kind))
        if edge.rule.by_group and not has_group:
            yield f'{edge.name} has dispatch="key" but {kind.__name__} has no field group_id; add it or use "share".'


def weights_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """Both ends of a weights edge agree on what is sent and when, and a transport connects them (check 9)."""
    for edge in graph.edges:
        if edge.kind != "latest":
            continue
        sent, taken = (graph.placed[port_owner(port)].node.facts() for port in (edge.out, edge.into))
        out, into = port_name(edge.out), port_name(edge.into)
        if None not in (sent.adapter_rank, taken.adapter_rank) and sent.adapter_rank != taken.adapter_rank:
            sends, takes = (
                f"adapters of rank {facts.adapter_rank}" if facts.adapter_rank else "whole weights"
                for facts in (sent, taken)
            )
            yield (
                f"{out} sends {sends} but {into} takes {takes}; "
                'give both nodes the same lora (sync="merged" sends whole weights).'
            )
        every = sent.publish_every
        if every > 0 and taken.takes_every % every:  # `count_problems` reports others
            yield (
                f"{into} takes one version in {taken.takes_every}, but {out} sends one in {every}; make the first "
                f"number a multiple of the second."
            )
        if taken.fixed_weights:
            yield f"{out} sends weights to {into}, which takes none: {taken.fixed_weights}."
    for weights in plan.weights:
        if not weights.transport:
            yield (
                f"{weights.edge}: {weights.producer} trains on CPU and {weights.consumer} runs on a GPU, and no weight "
                f"transport connects the two; give gpus= to both or to neither."
            )


def _all_ports(graph: Graph) -> list[Port]:
    return [port for node in graph.nodes.values() for port in node.ports.values()]


def _is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message) and kind is not Tombstone


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
    for edge in graph.edges:
        reader, port = port_owner(edge.into), port_name(edge.into)
        if edge.kind != "latest" or port_owner(edge.out) not in reachable_nodes(graph, reader):
            continue
        if admission is None:
            sources = [source for source in source_ports(graph) if reader in nodes_past(graph, source)]
            prompts = [source for source in sources if issubclass(carried_type(source), Prompt)]
            likely = next((port_name(source) for source in (*prompts, *sources)), "SOURCE.PORT")
            yield (
                f"{edge.name} makes a feedback loop, but nothing bounds staleness; write "
                f"g.admit({likely}, until={port}, staleness=1)."
            )
        elif not any(edge.into is until for until in admission.until):
            names = ", ".join(port_name(until) for until in (*admission.until, edge.into))
            yield f"{edge.name} makes a feedback loop, but g.admit does not wait for it; write until=({names})."


def admitted_path_problems(graph: Graph) -> Iterator[str]:
    """Check 4: the weights that end tickets come from the nodes that train the admitted source's samples, and only
    these samples."""
    admission = graph.admission
    if admission is None:
        return
    latest = [edge for edge in graph.edges if edge.kind == "latest"]
    for port in admission.until:
        edges = [edge for edge in latest if edge.into is port]
        if not edges:
            fits = [port_name(edge.into) for edge in latest]
            hint = f"name {' or '.join(fits)}" if fits else f"connect weights by g.latest(..., {port_name(port)})"
            yield f"g.admit waits until {port_name(port)}, which is not the end of a latest edge; {hint}."
        for edge in edges:
            if port_owner(edge.out) not in nodes_past(graph, admission.out):
                yield (
                    f"g.admit gives tickets to {port_name(admission.out)}, but nothing that it sends reaches "
                    f"{port_owner(edge.out)}, whose weights end the tickets; connect the two, or admit the source "
                    f"of its samples."
                )
    trainers = {port_owner(edge.out) for edge in graph.edges if any(edge.into is port for port in admission.until)}
    for port in source_ports(graph):
        fed = sorted(nodes_past(graph, port) & trainers)
        if fed and port_owner(port) != port_owner(admission.out):
            yield (
                f"{port_name(port)} also feeds {', '.join(fed)}, but only {port_name(admission.out)} is admitted, so "
                f"nothing bounds the staleness of its groups; mix both sources in one node."
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


def derived_problems(graph: Graph) -> Iterator[str]:
    """Check 12: derived samples can be numbered, counted and recorded."""
    branches, owners = Branches(graph), dict[str, str]()
    for name, node in graph.nodes.items():
        for label, most in node.facts().derives.items():
            if (other := owners.setdefault(label, name)) != name:
                yield (
                    f"{other} and {name} both derive samples under {label!r}, so their ids could be the same; give one "
                    f"of them another label."
                )
            if not label.isidentifier():
                yield f"{name} derives samples under {label!r}; a label is an identifier, such as branch."
            if not isinstance(most, int) or isinstance(most, bool) or most < 1:
                yield f"{name} derives {most!r} samples under {label!r}; it needs a whole number of at least 1."
        if node.facts().derives:
            yield from _deriver_problems(graph, branches, name)
    for name, node in graph.nodes.items() if owners else ():
        yield from _uneven_problems(branches, name, node)


def _deriver_problems(graph: Graph, branches: Branches, name: str) -> Iterator[str]:
    """A node that derives samples takes each sample once, by one port, and it leads to a trainer."""
    node = graph.nodes[name]
    fed = {id(edge.into) for edge in graph.edges if edge.kind == "queue"}
    ports = [port for port in node.ports.values() if isinstance(port, In) and id(port) in fed]
    if len(ports) != 1 or not issubclass(ports[0].types[0], Prompt | Sample):
        names = ", ".join(port_name(port) for port in ports) or "none"
        yield (
            f"{name} derives samples, so it needs one In port of samples to derive them from; it has {names}; derive "
            f"in a node that takes each sample from one port."
        )
        return
    if not node.facts().keeps_lineage or node.facts().joins:
        yield (
            f"{name} derives samples and merges or joins what it takes, so the samples that it sends could not be "
            f"counted; derive in a node before or after it, which sends samples one by one."
        )
    several = graph.placed[name].replicas > 1 and max(branches.num_arrivals(ports[0]).values(), default=1) > 1
    for edge in [edge for edge in graph.edges if edge.into is ports[0] and several and not edge.rule.by_group]:
        yield (
            f"{name} derives samples and has several replicas, but of the several copies of a sample each could come "
            f'to another replica by {edge.name} (dispatch={edge.dispatch!r}); give that edge dispatch="key".'
        )
    if branches.trainers and not branches.reached_trainers(ports[0]):
        yield (
            f"{name} derives samples, but no branch leads from it to a trainer, so nothing would end them; derive in a "
            f"node before {' or '.join(branches.trainers)}."
        )
    if graph.admission is None:
        yield (
            f"{name} derives samples, but no source is admitted, so there is no ticket for them; write g.admit(...)."
        )
    if not any(one.facts().group_size for one in graph.nodes.values()):
        yield f"{name} derives samples, but no node declares a group size, which their numbers in a group begin after."


def _uneven_problems(branches: Branches, name: str, node: Node) -> Iterator[str]:
    """All paths that meet where samples are counted pass the same deriving nodes, so that each sample comes by all."""
    if not counts_samples(node):
        return
    ports = [port for port in node.ports.values() if isinstance(port, In)]
    joined = [port for port in ports if port.name in node.facts().joins]
    for together in ([joined] if joined else []) + [[port] for port in ports if port not in joined]:
        paths = sorted({path for port in together for path in branches.derivers(port)}, key=len)
        if len(paths) > 1:
            names = ", ".join(port_name(port) for port in together)
            yield (
                f"some samples come to {names} past {', '.join(paths[-1])}, which derives further samples, and others "
                f"do not, so a group there would have no known size; lead all of them past the same nodes: a node that "
                f"derives samples can also pass on those that it takes."
            )


def branch_problems(graph: Graph) -> Iterator[str]:
    """Check 6: at the end of each branch, every sample can be counted and recorded."""
    branches, admission = Branches(graph), graph.admission

    # Every replica of a source sends all groups, unless the source declares itself sharded.
    admitted = None if admission is None else admission.out
    sources = [port for port in source_ports(graph) if port is admitted or issubclass(carried_type(port), Prompt)]
    for name in dict.fromkeys(port_owner(port) for port in sources):
        placed = graph.placed[name]
        if placed.replicas > 1 and not placed.node.facts().sharded:
            yield (
                f"{name} is a source and has {placed.replicas} replicas, which would all admit the same groups; give "
                f"it one replica, or let each send its own part and declare sharded=True in its facts()."
            )

    # Replicas that each process a broadcast copy deliver one sample several times.
    for edge in graph.edges:
        into = graph.placed[port_owner(edge.into)]
        counted = [port for port in into.node.ports.values() if branches.is_counted(port)]
        if edge.rule.copies and into.replicas > 1 and counted:
            yield (
                f"{edge.name} sends every sample to each of the {into.replicas} replicas of {into.name} "
                f'(dispatch="broadcast"), so after {port_name(counted[0])} each is counted {into.replicas} times; use '
                f'dispatch="share", or let that branch end in a node that counts no samples.'
            )

    # A node that counts samples has to know how many copies of each sample arrive.
    for node in graph.nodes.values():
        for port in node.ports.values() if merges_copies(node) else ():
            arrivals = branches.num_arrivals(port) if isinstance(port, In) else {}
            if len(set(arrivals.values())) > 1:
                each = ", ".join(f"{number} from {source}" for source, number in arrivals.items())
                yield (
                    f"{port_name(port)} receives different numbers of copies of a sample ({each}), so it cannot know "
                    f"when it has all; give each branch its own In port."
                )

    if admission is not None and admission.on_limit == "mask":
        reached = branches.reached_trainers(admission.out)
        for name in (name for name in branches.own_clock if name in reached):
            yield (
                f"{name} trains on other batches than {branches.trainers[0]}, so its versions do not give the age of "
                f'tokens and on_limit="mask" cannot mask them; feed both from one port, or use on_limit="wait".'
            )


def lineage_problems(graph: Graph) -> Iterator[str]:
    """Check 6: branches of one fan-out that merge again deliver each sample where it is expected."""
    branches = Branches(graph)
    for name, node in graph.nodes.items():
        joins = node.facts().joins
        for port in node.ports.values():
            for out, lasts in branches.repeated_samples(port).items() if isinstance(port, In) else ():
                yield (
                    f"{port_name(port)} receives every message of {out} {len(lasts)} times, by {' and '.join(lasts)}; "
                    f"join the branches in a node with an In port for each."
                )
        if missing := [join for join in joins if not isinstance(node.ports.get(join), In)]:
            yield f"facts().joins of {name} names {', '.join(missing)}, which are not In ports of it; correct this."
        elif len(joins) > 1:
            yield from _join_problems(graph, [node.ports[join] for join in joins])


def _join_problems(graph: Graph, ports: list[Port]) -> Iterator[str]:
    """Joined ports need one common fan-out upstream, and branches that keep samples separate and complete."""
    queues = [edge for edge in graph.edges if edge.kind == "queue"]
    lasts = {port: [edge for edge in queues if edge.into is port] for port in ports}
    if not all(lasts.values()):
        return
    reach = {name: reachable_nodes(graph, name, by_calls=False) for name in graph.nodes}

    def leads_to(first: Edge, last: Edge) -> bool:
        return first is last or port_owner(last.out) in reach[port_owner(first.into)]

    def starts(out: Port, port: Port) -> list[tuple[Edge, Edge]]:
        """(edge of the Out port `out`, edge into `port`) where messages of the first lead to the second."""
        firsts = [edge for edge in queues if edge.out is out]
        return [(first, last) for first in firsts for last in lasts[port] if leads_to(first, last)]

    outs = [edge.out for edge in queues]
    fan_outs = [out for out in dict.fromkeys(outs) if outs.count(out) > 1]
    common = [out for out in fan_outs if all(starts(out, port) for port in ports)]
    names = ", ".join(port_name(port) for port in ports)
    if not common:
        node = port_owner(ports[0])
        yield f"{node} matches {names} by sample, but no Out port feeds them all; fan out from one port."
        return
    for port in ports:
        begins = [port_owner(first.into) for first, last in starts(common[-1], port) if first is not last]
        behind = reachable_nodes(graph, *begins, by_calls=False)
        between = [name for name in graph.nodes if name in behind]
        between = [name for name in between if any(port_owner(last.out) in reach[name] for last in lasts[port])]
        if mixing := [name for name in between if not graph.nodes[name].facts().keeps_lineage]:
            yield (
                f"{port_owner(ports[0])} matches {names} by sample, but {', '.join(mixing)} on the path to "
                f"{port_name(port)} merges or renames samples; join before it."
            )
