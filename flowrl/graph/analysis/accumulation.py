"""Which batchers send their batches in pieces, because every trainer that they feed begins before a batch is whole.

Pieces change only rounding. If they would change anything else, or if nothing would be gained, the batch is sent whole,
and `flowrl check` prints the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph.graph import Edge, Graph, carried, owner
from flowrl.messages import Batch


def in_pieces(graph: Graph) -> tuple[str, ...]:
    """The names of the batchers that send batches in pieces."""
    senders = dict.fromkeys(owner(edge.out) for edge in _batch_edges(graph))
    return tuple(name for name in senders if not _why_not(graph, name))


def piece_problems(graph: Graph) -> Iterator[str]:
    """Trainers that are set to accumulate but cannot."""
    for trainer, why in _whole(graph, "on"):
        yield f"node {trainer}: accumulate is 'on', but batches come whole, because {why}; set it to 'auto' or 'off'"


def piece_notes(graph: Graph) -> Iterator[str]:
    """For each trainer that may choose, whether it accumulates, as "trainer: note"."""
    whole = dict(_whole(graph, "auto"))
    for name, node in graph.nodes.items():
        if name in whole:
            yield f"{name}: it begins when a batch is whole: {whole[name]}"
        elif node.facts().accumulate in ("auto", "on"):
            yield f"{name}: it accumulates gradients of a batch's groups before the others have arrived"


def _whole(graph: Graph, choice: str) -> Iterator[tuple[str, str]]:
    """(trainer, why its batches come whole) for trainers whose `accumulate` is `choice`."""
    for edge in _batch_edges(graph):
        trainer = owner(edge.into)
        if graph.nodes[trainer].facts().accumulate == choice and (why := _why_not(graph, owner(edge.out))):
            yield trainer, why


def _why_not(graph: Graph, batcher: str) -> str:
    """Why this batcher sends batches whole, "" if it does not."""
    reason = graph.nodes[batcher].facts().whole_batches
    if reason is None:
        return f"{batcher} makes whole batches"
    edges = [edge for edge in _batch_edges(graph) if owner(edge.out) == batcher]
    return next((why for why in (reason, *(_taken_whole(graph, edge) for edge in edges)) if why), "")


def _taken_whole(graph: Graph, edge: Edge) -> str:
    """Why the node at the end of this edge needs whole batches, "" if it does not."""
    name = owner(edge.into)
    facts = graph.nodes[name].facts()
    if facts.accumulate not in ("auto", "on"):
        return f"{name} has accumulate='off'" if facts.accumulate else f"{name} takes whole batches"
    if facts.whole_batches:
        return facts.whole_batches
    others = [other for names in graph.time_shared if name in names for other in names if other != name]
    return f"it shares its devices in time with {others[0]}" if others else ""


def _batch_edges(graph: Graph) -> list[Edge]:
    queues = (edge for edge in graph.edges if edge.kind == "queue" and edge.into.name != "held_out")
    return [edge for edge in queues if issubclass(carried(edge.out), Batch)]
