"""`Graph`: the user's declaration. Plain data; nothing here starts, loads or imports anything heavy.

Invariant: a declaration never raises for a mistake in the graph. Mistakes are collected, and `check`
reports them together with all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from flowrl.graph.dispatch_rules import LATEST, RULES, SHARE, Dispatch, DispatchRule
from flowrl.graph.node import Node
from flowrl.graph.ports import Call, In, Out, Port, Serve
from flowrl.messages import Message
from flowrl.messages.episode import Turn

N = TypeVar("N", bound=Node)
T = TypeVar("T", bound=Message)
Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)

OnLimit = Literal["wait", "mask"]
EdgeKind = Literal["queue", "latest", "call"]
RESERVED_NAMES = ("driver", "core")
AFFINITY_MARGIN = 2


@dataclass(frozen=True)
class Placed:
    """A node in the graph. `cpus` and `gpus` are per replica; None means the default of the node's class."""

    name: str
    node: Node
    replicas: int = 1
    cpus: float | None = None
    gpus: float | None = None

    @property
    def cpus_each(self) -> float:
        return self.node.cpus if self.cpus is None else self.cpus

    @property
    def gpus_each(self) -> float:
        return self.node.gpus if self.gpus is None else self.gpus

    @property
    def heavy(self) -> bool:
        """Whether every replica has its own process."""
        return self.cpus_each > 0 or self.gpus_each > 0


@dataclass(frozen=True)
class Edge:
    """One connection of two ports. `out` is the sending (or requesting) port, `into` the other."""

    kind: EdgeKind
    out: Port
    into: Port
    capacity: int | None = None
    """Messages that one lane holds; None: derived."""
    dispatch: str = SHARE.name
    """As declared. `rule` is its meaning."""
    affinity_margin: int | None = None
    """Only for call edges; see `Graph.call`."""

    @property
    def name(self) -> str:
        return f"{port_name(self.out)} -> {port_name(self.into)}"

    @property
    def rule(self) -> DispatchRule:
        """The rule named `dispatch`; SHARE for an unknown name, which `Graph.connect` has recorded as a mistake."""
        return RULES.get(self.dispatch, SHARE)


@dataclass(frozen=True)
class Admission:
    """Where groups enter, which weights end their tickets, and how old a trained token may be."""

    out: Port
    until: tuple[Port, ...]
    staleness: int
    on_limit: OnLimit = "wait"
    look_ahead: int = 1


class Graph:
    """Nodes, edges and admission under one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: dict[str, Node] = {}
        self.placed: dict[str, Placed] = {}
        self.edges: list[Edge] = []
        self.admission: Admission | None = None
        self.ignored: list[Port] = []
        self.sharing: list[tuple[str, ...]] = []
        """Node names that share a process, by `together`."""
        self.time_shared: list[tuple[str, ...]] = []
        """Node names that use the same devices alternately, by `time_share`."""
        self.sharing_known = True
        """False if `together` or `time_share` got anything but nodes of this graph: what it needs cannot be counted."""
        self.mistakes: list[str] = []
        """Mistakes found while the graph was declared, as complete sentences."""

    def add(self, name: str, node: N, *, replicas: int = 1, cpus: float | None = None, gpus: float | None = None) -> N:
        """Add `node` to the graph and return it. `cpus` and `gpus` are the needs of each replica.

        A node with 0 cpus and 0 gpus shares one process with all other such nodes.
        """
        self.mistakes += _node_mistakes(self, name, node, replicas, cpus, gpus)
        if isinstance(node, Node) and node.graph is None and name not in self.nodes:
            node.graph = self.name
            node.name, node.gpus = name, node.gpus if gpus is None else gpus
            self.nodes[name] = node
            self.placed[name] = Placed(name, node, replicas, cpus, gpus)
        return node

    def connect(self, out: Out[T], into: In[T], *, capacity: int | None = None, dispatch: Dispatch = "share") -> None:
        """Connect two ports by lanes that keep every message, in order, until it is finished.

        `capacity` is in messages and per lane (one producer replica to one consumer replica).
        `dispatch` selects the consumer's replica: "share" selects the one with the most free credits, "key" the same
        one for all messages of a group, "broadcast" every replica; "gang" sends a part of the message to each rank.
        An Out port with several edges sends every message along each of them.
        """
        if dispatch not in get_args(Dispatch):
            self.mistakes.append(
                f"the edge {port_name(out)} -> {port_name(into)} has dispatch={dispatch!r}; it needs one of "
                f"{', '.join(get_args(Dispatch))}."
            )
        self._add_edge(Edge("queue", out, into, capacity, dispatch), Out, In)

    def latest(self, out: Out[T], into: In[T]) -> None:
        """Connect two ports by a one-slot edge: a new message replaces the one that was not yet taken.

        The edge never blocks its sender and reaches every consumer replica. It is meant for weights.
        """
        self._add_edge(Edge("latest", out, into, 1, LATEST.name), Out, In)

    def call(
        self,
        call: Call[Req, Rep],
        serve: Serve[Req, Rep],
        *,
        capacity: int | None = None,
        affinity_margin: int | Literal["auto"] | None = "auto",
    ) -> None:
        """Connect a requesting port to a serving port. Replies return to the requesting replica.

        `capacity` bounds the open requests between two replicas. A request goes to the replica of the server with the
        fewest open requests. With `affinity_margin`, a caller's session stays on its replica as long as this replica
        has at most `affinity_margin` more open requests than the replica with the fewest. It is 0 or more; with a large
        number, sessions never move. Under the same condition, new sessions of one group go to the same replica. "auto"
        means AFFINITY_MARGIN for the turns of episodes, because each turn begins with a prefix that its replica has
        already computed, and None for other requests.
        """
        margin = affinity_margin
        if margin == "auto":
            margin = AFFINITY_MARGIN if isinstance(call, Call) and issubclass(carried_type(call), Turn) else None
        self._add_edge(Edge("call", call, serve, capacity, affinity_margin=margin), Call, Serve)
        if isinstance(call, Call):
            call.server = getattr(serve, "node", None)

    def admit(
        self,
        out: Out[T],
        *,
        until: In[Any] | tuple[In[Any], ...],
        staleness: int,
        on_limit: OnLimit = "wait",
        look_ahead: int = 1,
    ) -> None:
        """Give a ticket to each group that leaves `out`, which bounds how old a trained token can be.

        A ticket ends when every `until` port (the ends of latest edges) has received the weights that
        its group helped to train. `staleness` is the hard maximum, in versions; 0 is synchronous.
        `on_limit="wait"`: batches are formed by admission order; any finished group among the next
        `look_ahead` may go first. `on_limit="mask"`: the first complete groups form a batch, and tokens
        that are too old are masked out of the loss.
        """
        if self.admission is not None:
            self.mistakes.append(
                f"g.admit was called for {port_name(self.admission.out)} and again for {port_name(out)}, but a graph "
                f"has one admission; keep one call, and mix several sources inside one node."
            )
        ports = until if isinstance(until, tuple) else (until,)
        self.admission = Admission(out, ports, staleness, on_limit, look_ahead)
        self._check_ports("g.admit", (out, Out), *((port, In) for port in ports))

    def ignore(self, port: Port) -> None:
        """Leave `port` unconnected on purpose. Messages sent to an ignored Out port are discarded."""
        self.ignored.append(port)
        self._check_ports("g.ignore", (port, Port))

    def together(self, *nodes: Node) -> None:
        """Run these nodes in one process: replica i of each node shares it, and no message is copied."""
        self.sharing.append(self._group_names("g.together", nodes))

    def time_share(self, *nodes: Node) -> None:
        """Let these nodes' processes use the same GPUs and cores alternately."""
        self.time_shared.append(self._group_names("g.time_share", nodes))

    def _add_edge(self, edge: Edge, out_kind: type[Port], into_kind: type[Port]) -> None:
        verb = {"queue": "g.connect", "latest": "g.latest", "call": "g.call"}[edge.kind]
        if self._check_ports(verb, (edge.out, out_kind), (edge.into, into_kind)):
            self.edges.append(edge)

    def _check_ports(self, verb: str, *ports: tuple[Port, type[Port]]) -> bool:
        """Whether each port is of its kind and belongs to a node of this graph; if not, the mistakes are recorded."""
        found = []
        for port, kind in ports:
            if not isinstance(port, Port):
                found.append(
                    f"{verb} got {_kind_words(port)} where a port was needed; pass a port such as node.samples."
                )
            elif not isinstance(port, kind):
                assert isinstance(port.node, Node)
                names = [other.name for other in port.node.ports.values() if isinstance(other, kind)]
                found.append(
                    f"{verb} got {port_name(port)}, which is {a_kind(type(port))} port, where {a_kind(kind)} port was "
                    f"needed ({port_owner(port)} has {', '.join(names) or 'none'}); pass the ports in the order "
                    f"{_ORDER[verb]}."
                )
            elif self.nodes.get(port_owner(port)) is not port.node:
                found.append(
                    f"{verb} got {port_name(port)}, whose node is not in this graph; add the node with g.add first."
                )
        self.mistakes += found
        return not found

    def _group_names(self, verb: str, nodes: Iterable[Node]) -> tuple[str, ...]:
        nodes = tuple(nodes)
        strange = [node for node in nodes if not isinstance(node, Node) or node.name not in self.nodes]
        self.sharing_known &= not strange
        self.mistakes += [
            f"{verb} got {_kind_words(node)}, which is not in this graph; add it with g.add first." for node in strange
        ]
        if len(nodes) < 2:
            self.mistakes.append(f"{verb} got {len(nodes)} node(s) and needs at least two; name the others as well.")
        return tuple(node.name for node in nodes if node not in strange)


def port_owner(port: Port) -> str:
    """The name of the node that `port` belongs to; the node's class name before it is added."""
    return getattr(port.node, "name", "") or type(port.node).__name__


def carried_type(port: Port) -> type[Message]:
    """The message type of a port (for calls, of the request); `Message` if the declaration names none."""
    kind = port.types[0] if port.types else Message
    return kind if isinstance(kind, type) and issubclass(kind, Message) else Message


def port_name(port: Port) -> str:
    """ "node.port", as error messages write it."""
    return f"{port_owner(port)}.{port.name}" if isinstance(port, Port) else _kind_words(port)


def a_kind(kind: type[Port]) -> str:
    """ "an In", "a Call" """
    return f"{'an' if kind.__name__[0] in 'AIO' else 'a'} {kind.__name__}"


def _kind_words(thing: object) -> str:
    return f"a {type(thing).__name__}" if isinstance(thing, Node) else repr(thing)


_ORDER = {
    "g.connect": "(Out, In)",
    "g.latest": "(Out, In)",
    "g.call": "(Call, Serve)",
    "g.admit": "(Out, until=In)",
    "g.ignore": "(port)",
}


def _node_mistakes(
    graph: Graph, name: str, node: Node, replicas: int, cpus: float | None, gpus: float | None
) -> Iterable[str]:
    if not isinstance(node, Node):
        yield f"g.add({name!r}, ...) got {node!r}, which is not a Node; pass an instance of a Node subclass."
        return
    if name in graph.nodes:
        yield f"g.add was called twice with the name {name!r}; give every node a different name."
    elif node.graph is not None:
        yield f"g.add({name!r}, ...) got a node that is already in a graph as {node.name!r}; create a second one."
    elif node.name:
        yield (
            f"{type(node).__name__} sets self.name = {node.name!r}, but `name` is a node's name in its graph; give the "
            f"attribute another name."
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in RESERVED_NAMES:
        yield (
            f"the node name {name!r} is not allowed; use lower-case letters, digits and _, with a letter first, and "
            f"neither {' nor '.join(RESERVED_NAMES)}."
        )
    if isinstance(replicas, int) and replicas < 1:  # `analysis.check` tells of other kinds
        yield f"node {name!r} has replicas={replicas}; it needs at least 1; to have none, leave the node out."
    for key, value in (("cpus", cpus), ("gpus", gpus)):
        if isinstance(value, int | float) and value < 0:
            yield f"node {name!r} has {key}={value}; it needs 0 or more."
    if node.cpus and cpus == 0 and not (node.gpus if gpus is None else gpus):
        yield (
            f"node {name!r} has cpus=0 and no gpus, but a {type(node).__name__} needs a process of its own; give it "
            "cpus or gpus above 0."
        )
