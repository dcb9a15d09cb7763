"""Pictures of a graph: Mermaid text, and SVG without dependencies.

Queue edges are solid, latest edges dashed, calls dotted. The columns of an SVG picture follow the longest path from a
source, its rows the mean row of the neighbours; both are pure functions, in columns and rows and not in pixels. Edges
between neighbouring columns are curves. An edge that goes back or skips a column runs in its own channel below the
boxes (latest edges) or above them, so that no line crosses a box.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

from flowrl.errors import ConfigError
from flowrl.graph.analysis.plan import EdgePlan, Plan
from flowrl.graph.analysis.report import number_lines
from flowrl.graph.dispatch_rules import SHARE
from flowrl.graph.graph import Edge, Graph, Placed, port_owner

BOX_W, BOX_H = 148, 58
GAP_X, GAP_Y = 108, 46
MARGIN, HEAD, FOOT = 36, 58, 44
CHANNEL = 30
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
COLOURS = {"gpu": ("#e5f5e9", "#2f8f4e"), "cpu": ("#e3ecff", "#3b6fd4"), "cheap": ("#f6f3ec", "#a79c85")}
STROKES = {"queue": ("#4a5568", ""), "latest": ("#c2571a", "7 5"), "call": ("#6b46a8", "2 4")}


@dataclass(frozen=True)
class Box:
    """A node's rectangle."""

    placed: Placed
    column: int
    x: float
    y: float

    @property
    def right(self) -> float:
        return self.x + BOX_W

    @property
    def bottom(self) -> float:
        return self.y + BOX_H


@dataclass(frozen=True)
class Sheet:
    """The boxes of the picture, and the height at which they begin and end."""

    boxes: dict[str, Box]
    top: float
    bottom: float


def draw_svg(graph: Graph, plan: Plan) -> str:
    """The picture as SVG text; opens in any browser, also on a dark page."""
    table = box_columns(graph)
    rows, tallest = row_of(table), max((len(column) for column in table), default=0)
    column_of = {name: index for index, column in enumerate(table) for name in column}
    steps = [(e.kind, column_of[port_owner(e.into)] - column_of[port_owner(e.out)]) for e in graph.edges]

    # The sizes follow from the columns and rows, and from the numbers of channels above and below the boxes.
    num_above = sum(kind != "latest" and step != 1 for kind, step in steps)
    num_below = sum(kind == "latest" for kind, _ in steps)
    top = HEAD + CHANNEL * num_above + 14
    body = max(tallest, 1) * (BOX_H + GAP_Y) - GAP_Y
    middle = top + (body - BOX_H) / 2
    boxes = {
        name: Box(graph.placed[name], column, MARGIN + column * (BOX_W + GAP_X), middle + rows[name] * (BOX_H + GAP_Y))
        for name, column in column_of.items()
    }
    sheet = Sheet(boxes, top, bottom=top + body)
    width = max(2 * MARGIN + len(table) * (BOX_W + GAP_X) - GAP_X, 640)
    height = sheet.bottom + CHANNEL * num_below + 22 + FOOT

    heads = "".join(
        f'<marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0.8 L10 5 L0 9.2 z" fill="{stroke}"/></marker>'
        for kind, (stroke, _) in STROKES.items()
    )
    numbers = "   ·   ".join(f"{name} {text}" for name, text in number_lines(plan))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="{FONT}">\n'
        f"<title>{escape(graph.name)}</title>\n<defs>{heads}</defs>\n"
        f'<rect width="100%" height="100%" rx="10" fill="#ffffff"/>\n'
        f"{_box_text(MARGIN, 36, graph.name, size=19, weight=650, fill='#1a202c', anchor='start')}"
        f"{_draw_edges(graph, plan, sheet)}{''.join(map(_draw_box, boxes.values()))}"
        f"{_box_text(MARGIN, height - 18, numbers, size=12, fill='#718096', anchor='start')}</svg>\n"
    )


def _draw_box(box: Box) -> str:
    placed = box.placed
    fill, stroke = COLOURS["gpu" if placed.gpus_each else "cpu" if placed.heavy else "cheap"]
    rect = f'width="{BOX_W}" height="{BOX_H}" rx="9" fill="{fill}" stroke="{stroke}" stroke-width="1.4"'
    behind = f'<rect x="{box.x + 5:g}" y="{box.y + 5:g}" {rect}/>' if placed.replicas > 1 else ""
    count = f" ×{placed.replicas}" if placed.replicas > 1 else ""
    middle = box.x + BOX_W / 2
    return (
        f'{behind}<rect x="{box.x:g}" y="{box.y:g}" {rect}/>\n'
        f"{_box_text(middle, box.y + 25, placed.name + count, size=14, weight=620, fill='#1a202c')}"
        f"{_box_text(middle, box.y + 43, type(placed.node).__name__, size=11.5, fill='#5a6577')}"
    )


def _draw_edges(graph: Graph, plan: Plan, sheet: Sheet) -> str:
    """Draw edges between neighbours as curves, and every other edge in its own channel."""
    derived = {edge.name: edge for edge in plan.edges}
    high, low, parts = 0, 0, []
    for edge in graph.edges:
        source, target = sheet.boxes[port_owner(edge.out)], sheet.boxes[port_owner(edge.into)]
        if edge.kind == "latest":
            low += 1
            parts.append(_draw_channel(sheet, edge, derived[edge.name], sheet.bottom + 8 + CHANNEL * low, low))
        elif target.column - source.column != 1:
            high += 1
            parts.append(_draw_channel(sheet, edge, derived[edge.name], sheet.top - 6 - CHANNEL * high, high))
        else:
            leaving = [e for e in graph.edges if e.out.node is edge.out.node and e.kind != "latest"]
            coming = [e for e in graph.edges if e.into.node is edge.into.node and e.kind != "latest"]
            leaving.sort(key=lambda e: sheet.boxes[port_owner(e.into)].y)
            coming.sort(key=lambda e: sheet.boxes[port_owner(e.out)].y)
            x0, y0 = source.right, _spread_ends(source, leaving, edge)
            x1, y1 = target.x, _spread_ends(target, coming, edge)
            bend = GAP_X / 2
            path = f"M{x0:g} {y0:g} C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1 - 2:g} {y1:g}"
            label = _edge_label(edge, derived[edge.name], (x0 + x1) / 2, (y0 + y1) / 2 - 7)
            parts.append(_draw_line(edge, path) + label)
    return "".join(parts)


def _spread_ends(box: Box, edges: list[Edge], edge: Edge) -> float:
    """The height at which `edge` meets the box; each edge on one side has a different height."""
    place = edges.index(edge) - (len(edges) - 1) / 2
    return box.y + BOX_H / 2 + place * min(16, (BOX_H - 14) / max(len(edges), 1))


def _draw_channel(sheet: Sheet, edge: Edge, derived: EdgePlan, level: float, nth: int) -> str:
    """Draw from the source, along the channel at height `level`, to the target.

    The line runs straight down or up if no box is in between, else through the gap next to the column.
    """
    source, target = sheet.boxes[port_owner(edge.out)], sheet.boxes[port_owner(edge.into)]
    if _is_blocked(sheet, source, level):
        x0, y0 = source.right + 8 + 7 * nth, source.y + BOX_H - 12
        start = f"M{source.right:g} {y0:g} H{x0:g}"
    else:
        x0 = source.x + BOX_W / 2 + 10 * nth - 4
        start = f"M{x0:g} {source.bottom if level > source.y else source.y:g}"
    if _is_blocked(sheet, target, level):
        x1, y1 = target.x - 14 - 7 * nth, target.y + BOX_H - 10
        end = f"V{y1:g} H{target.x - 2:g}"
    else:
        x1 = target.x + BOX_W / 2 - 10 * nth + 4
        end = f"V{target.bottom + 2 if level > target.y else target.y - 2:g}"
    side, corner = (1 if x1 > x0 else -1) * 10, 10 if level > source.y else -10
    path = (
        f"{start} V{level - corner:g} Q{x0:g} {level:g} {x0 + side:g} {level:g} "
        f"H{x1 - side:g} Q{x1:g} {level:g} {x1:g} {level - corner:g} {end}"
    )
    return _draw_line(edge, path) + _edge_label(edge, derived, (x0 + x1) / 2, level - 6)


def _is_blocked(sheet: Sheet, box: Box, level: float) -> bool:
    """Whether another box of the column lies between this one and `level`."""
    low, high = sorted((box.y, level))
    return any(other.column == box.column and low < other.y < high for other in sheet.boxes.values())


def _draw_line(edge: Edge, path: str) -> str:
    stroke, dashes = STROKES[edge.kind]
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    start = f' marker-start="url(#{edge.kind})"' if edge.kind == "call" else ""
    return (
        f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="1.6"{dash}{start} '
        f'marker-end="url(#{edge.kind})"><title>{escape(edge.name)}</title></path>\n'
    )


def _edge_label(edge: Edge, derived: EdgePlan, x: float, y: float) -> str:
    text = " / ".join(derived.types)
    if edge.kind == "queue":
        text += f" · {derived.capacity}"
    rule = "" if edge.kind != "queue" or edge.rule is SHARE else edge.dispatch
    second = _box_text(x, y + 20, rule, size=10, fill="#8a94a6", halo=True) if rule else ""
    return _box_text(x, y, text, size=11, fill=STROKES[edge.kind][0], halo=True) + second


def _box_text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    fill: str,
    weight: int = 400,
    anchor: str = "middle",
    halo: bool = False,
) -> str:
    """A text element. `halo` adds white around the letters, so that a line behind them does not cross them."""
    outline = ' stroke="#ffffff" stroke-width="3.5" stroke-linejoin="round" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}"{outline}>{escape(text)}</text>\n'
    )


ARROWS = {"queue": "-->", "latest": "-.->", "call": "<-.->"}
CLASSES = (
    "classDef heavy fill:#dbe7ff,stroke:#3b6fd4,color:#12233f",
    "classDef cheap fill:#f4f1ea,stroke:#a79c85,color:#3a3424",
)


def draw_graph(graph: Graph, plan: Plan, path: Path) -> None:
    """Write the picture in the format of the file name: .svg, or .mmd for Mermaid."""
    kinds: dict[str, Callable[[Graph, Plan], str]] = {".svg": draw_svg, ".mmd": draw_mermaid}
    if path.suffix not in kinds:
        raise ConfigError(f"--draw {path}: the name has to end in {' or '.join(kinds)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--draw {path}: there is no directory {path.parent}; create it first")
    path.write_text(kinds[path.suffix](graph, plan), encoding="utf-8")


def draw_mermaid(graph: Graph, plan: Plan) -> str:
    """A flowchart: a box for each node, a label with type and capacity on each edge."""
    lines = [f"---\ntitle: {graph.name}\n---", "flowchart LR", *(f"  {line}" for line in CLASSES)]
    for name, placed in graph.placed.items():
        count = f" ×{placed.replicas}" if placed.replicas > 1 else ""
        kind = "heavy" if placed.heavy else "cheap"
        lines.append(f'  {name}["<b>{name}</b>{count}<br/>{type(placed.node).__name__}"]:::{kind}')
    for edge, derived in zip(graph.edges, plan.edges, strict=True):
        label = " / ".join(derived.types)
        if edge.kind == "queue":
            label += f", {derived.capacity}" + ("" if edge.rule is SHARE else f", {edge.dispatch}")
        lines.append(f'  {port_owner(edge.out)} {ARROWS[edge.kind]}|"{label}"| {port_owner(edge.into)}')
    return "\n".join(lines) + "\n"


SWEEPS = 8


def box_columns(graph: Graph) -> list[list[str]]:
    """Node names by column, left to right, each column top to bottom."""
    links = _forward_links(graph)
    # The column is the longest path from a source; sources move right to just before their first target.
    depth = dict.fromkeys(graph.nodes, 0)
    for _ in graph.nodes:
        for source, target in links:
            depth[target] = max(depth[target], depth[source] + 1)
    for name in graph.nodes:
        targets = [depth[target] for source, target in links if source == name]
        if targets and not any(target == name for _, target in links):
            depth[name] = min(targets) - 1
    table: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in graph.nodes:
        table[depth[name]].append(name)

    # Sweep right and left, sorting each column by the mean row of its neighbours.
    for sweep in range(SWEEPS):
        for column in table if sweep % 2 == 0 else reversed(table):
            rows = row_of(table)
            means = {}
            for name in column:
                near = [rows[b if a == name else a] for a, b in links if name in (a, b)]
                means[name] = fmean(near) if near else rows[name]
            column.sort(key=means.__getitem__)
    return table


def _forward_links(graph: Graph) -> list[tuple[str, str]]:
    """Node pairs in the direction of the data; links that would close a cycle are left out.

    A call points from the caller to the server, unless other links already lead from the server to the caller.
    """
    queue = [(port_owner(edge.out), port_owner(edge.into)) for edge in graph.edges if edge.kind == "queue"]
    calls = [(port_owner(edge.out), port_owner(edge.into)) for edge in graph.edges if edge.kind == "call"]
    links: list[tuple[str, str]] = []
    for source, target in dict.fromkeys(queue + calls):
        seen, frontier = {target}, [target]
        while frontier:
            here = frontier.pop()
            new = {after for before, after in links if before == here} - seen
            seen |= new
            frontier += new
        if source not in seen:
            links.append((source, target))
    return links


def row_of(table: Sequence[Sequence[str]]) -> dict[str, float]:
    """Row of every node, columns centred on row 0."""
    return {name: row - (len(column) - 1) / 2 for column in table for row, name in enumerate(column)}
