"""The terms of a run: the numbers of its graph that the ledger stores for the audit, once per incarnation.

A resume may change some of them, so the bound for a step is that of the incarnation that trained it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LISTS = ("trainers", "own_clock", "holders")
NUMBERS = ("max_staleness", "tickets", "window", "groups_per_batch", "group_size")
COLUMNS = (*LISTS, *NUMBERS)


@dataclass(frozen=True)
class Terms:
    """The terms of one incarnation. None means that the graph does not declare the number: nothing is required."""

    trainers: tuple[str, ...] | None = None
    """Names of the trainer nodes, the main one first."""
    own_clock: tuple[str, ...] | None = None
    """Trainers for which the age of tokens is counted in their own versions."""
    holders: tuple[str, ...] | None = None
    """Nodes that hold weights. Tokens of other nodes are data and have no version."""
    max_staleness: int | None = None
    tickets: int | None = None
    window: int | None = None
    """0: tokens beyond the bound are masked out of the loss."""
    groups_per_batch: int | None = None
    group_size: int | None = None

    @classmethod
    def of(cls, graph: Mapping[str, Any]) -> Terms:
        """The terms from the content of graph.json."""
        latest = [edge for edge in graph.get("edges", ()) if edge["kind"] == "latest"]
        holders = sorted({edge["into"].partition(".")[0] for edge in latest}) if "edges" in graph else None
        lists = {"trainers": graph.get("trainers"), "own_clock": graph.get("own_clock"), "holders": holders}
        nodes: dict[str, Any] = {name: None if found is None else tuple(found) for name, found in lists.items()}
        return cls(**nodes, **{name: graph.get(name) for name in NUMBERS})

    @classmethod
    def read(cls, run_dir: Path) -> Terms:
        """The terms of the run in `run_dir`; all None if it has no graph.json."""
        path = run_dir / "graph.json"
        return cls.of(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else cls()

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> Terms:
        """The terms from the columns COLUMNS of the table `incarnations`. Raises ValueError for a malformed list."""
        columns: list[Any] = [*map(_nodes, row[: len(LISTS)]), *row[len(LISTS) :]]
        return cls(*columns)

    def row(self) -> tuple[Any, ...]:
        """The values of the columns COLUMNS of the table `incarnations`."""
        lists = (getattr(self, name) for name in LISTS)
        numbers = (getattr(self, name) for name in NUMBERS)
        return (*(None if nodes is None else json.dumps(nodes) for nodes in lists), *numbers)


def _nodes(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{text} is no list of names")
    return tuple(names)
