"""The graph file of the random graphs: `flowrl check tests/random_graphs/graph.py --seed 7`."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl import Graph, Node
from flowrl.graph.ports import Port
from tests.random_graphs.drawing import draw
from tests.random_graphs.kinds import KINDS
from tests.random_graphs.shape import Shape

OWN_CPUS = 0.1


@dataclass(frozen=True)
class Config:
    seed: int = 0
    """The graph is drawn from it."""
    without: str = ""
    """Features to leave out, as in "taps,crash"; see `shape.FEATURES`."""

    @property
    def shape(self) -> Shape:
        return draw(self.seed, tuple(name for name in self.without.split(",") if name))


def graph(cfg: Config) -> Graph:
    shape = cfg.shape
    g = Graph("random")
    nodes: dict[str, Node] = {}
    for part in shape.parts.values():
        node = KINDS[part.kind](part, shape)
        nodes[part.name] = g.add(part.name, node, replicas=part.replicas, cpus=OWN_CPUS if part.own else 0)

    def port(name: str) -> Port:
        node, _, attribute = name.partition(".")
        return nodes[node].ports[attribute]

    for link in shape.links:
        if link.kind == "latest":
            g.latest(port(link.out), port(link.into))  # type: ignore[arg-type]
        elif link.kind == "call":
            g.call(port(link.out), port(link.into), capacity=link.capacity)  # type: ignore[arg-type]
        else:
            g.connect(port(link.out), port(link.into), capacity=link.capacity, dispatch=link.dispatch)  # type: ignore[arg-type]
    for name in shape.ignored:
        g.ignore(port(name))
    if shape.sharing:
        g.time_share(*(nodes[name] for name in shape.sharing))
    until = tuple(port(name) for name in shape.until)
    g.admit(  # type: ignore[misc]
        port("prompts.prompts"),  # type: ignore[arg-type]
        until=until,  # type: ignore[arg-type]
        staleness=shape.staleness,
        on_limit=shape.on_limit,  # type: ignore[arg-type]
        look_ahead=shape.look_ahead,
    )
    return g
