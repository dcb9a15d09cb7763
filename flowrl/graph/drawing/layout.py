"""Positions of the boxes in a picture: columns by longest path from a source, rows by the mean row of the neighbours.

Pure functions; positions are in columns and rows, not in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from flowrl.graph.graph import Graph, owner

SWEEPS = 8


def columns(graph: Graph) -> list[list[str]]:
    """Node names by column, left to right, each column top to bottom."""
    links = forward_links(graph)
    depth = _depths(list(graph.nodes), links)
    table: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in graph.nodes:
        table[depth[name]].append(name)
    return _ordered(table, links)


def forward_links(graph: Graph) -> list[tuple[str, str]]:
    """Node pairs in the direction of the data; links that would close a cycle are left out.

    A call points from the caller to the server, unless other links already lead from the server to the caller.
    """
    queue = [(owner(edge.out), owner(edge.into)) for edge in graph.edges if edge.kind == "queue"]
    calls = [(owner(edge.out), owner(edge.into)) for edge in graph.edges if edge.kind == "call"]
    links: list[tuple[str, str]] = []
    for source, target in dict.fromkeys(queue + calls):
        if source != target and not _leads(links, target, source):
            links.append((source, target))
    return links


def _leads(links: Sequence[tuple[str, str]], start: str, end: str) -> bool:
    seen, frontier = {start}, [start]
    while frontier:
        here = frontier.pop()
        if here == end:
            return True
        new = {target for source, target in links if source == here} - seen
        seen |= new
        frontier += new
    return False


def _depths(names: Sequence[str], links: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Longest path from a source; sources move right to just before their first target."""
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for source, target in links:
            depth[target] = max(depth[target], depth[source] + 1)
    for name in names:
        targets = [depth[target] for source, target in links if source == name]
        if targets and not any(target == name for _, target in links):
            depth[name] = min(targets) - 1
    return depth


def _ordered(table: list[list[str]], links: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Sweep right and left, sorting each column by the mean row of its neighbours."""
    for sweep in range(SWEEPS):
        order = range(len(table)) if sweep % 2 == 0 else range(len(table) - 1, -1, -1)
        for column in order:
            rows = row_of(table)
            means = {name: _mean_row(name, links, rows) for name in table[column]}
            table[column].sort(key=lambda name: means[name])
    return table


def row_of(table: Sequence[Sequence[str]]) -> dict[str, float]:
    """Row of every node, columns centred on row 0."""
    return {name: row - (len(column) - 1) / 2 for column in table for row, name in enumerate(column)}


def _mean_row(name: str, links: Sequence[tuple[str, str]], rows: Mapping[str, float]) -> float:
    near = [rows[b if a == name else a] for a, b in links if name in (a, b)]
    return fmean(near) if near else rows[name]
