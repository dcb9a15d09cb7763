"""Pictures of a graph: Mermaid text and SVG. Queue edges are solid, latest edges dashed, calls dotted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.dispatch_rules import SHARE
from flowrl.graph.drawing.svg import svg
from flowrl.graph.graph import Edge, Graph, owner

ARROWS = {"queue": "-->", "latest": "-.->", "call": "<-.->"}
CLASSES = (
    "classDef heavy fill:#dbe7ff,stroke:#3b6fd4,color:#12233f",
    "classDef cheap fill:#f4f1ea,stroke:#a79c85,color:#3a3424",
)


def draw(graph: Graph, plan: Plan, path: Path) -> None:
    """Write the picture in the format of the file name: .svg, or .mmd for Mermaid."""
    kinds: dict[str, Callable[[Graph, Plan], str]] = {".svg": svg, ".mmd": mermaid}
    if path.suffix not in kinds:
        raise ConfigError(f"--draw {path}: the name has to end in {' or '.join(kinds)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--draw {path}: there is no directory {path.parent}; create it first")
    path.write_text(kinds[path.suffix](graph, plan), encoding="utf-8")


def mermaid(graph: Graph, plan: Plan) -> str:
    """A flowchart: a box for each node, a label with type and capacity on each edge."""
    lines = [f"---\ntitle: {graph.name}\n---", "flowchart LR", *(f"  {line}" for line in CLASSES)]
    for name, placed in graph.placed.items():
        count = f" ×{placed.replicas}" if placed.replicas > 1 else ""
        kind = "heavy" if placed.heavy else "cheap"
        lines.append(f'  {name}["<b>{name}</b>{count}<br/>{type(placed.node).__name__}"]:::{kind}')
    lines += [_arrow(edge, plan) for edge in graph.edges]
    return "\n".join(lines) + "\n"


def _arrow(edge: Edge, plan: Plan) -> str:
    derived = next(one for one in plan.edges if one.name == edge.name)
    label = " / ".join(derived.types)
    if edge.kind == "queue":
        label += f", {derived.capacity}" + ("" if edge.rule is SHARE else f", {edge.dispatch}")
    return f'  {owner(edge.out)} {ARROWS[edge.kind]}|"{label}"| {owner(edge.into)}'
