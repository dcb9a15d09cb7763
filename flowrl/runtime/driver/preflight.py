"""The checks of a graph's nodes before a run starts anything: models, tokenizer, task, reward, a trial episode."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.graph.graph import Graph
from flowrl.graph.load import user_code


def preflight(graph: Graph, graph_file: Path) -> dict[str, str]:
    """Run every node's preflight. Returns the findings by node.

    All problems become one ConfigError; a problem of several nodes appears once.
    """
    findings: dict[str, str] = {}
    problems: dict[str, None] = {}
    for name, node in graph.nodes.items():
        try:
            with user_code(graph_file):
                if (text := node.preflight()) is not None:
                    findings[name] = text
        except ConfigError as error:
            problems[str(error)] = None
    if len(problems) > 1:
        listed = "".join(f"\n- {text}" for text in problems)
        raise ConfigError(f"the run cannot start, {len(problems)} problems:{listed}")
    if problems:
        raise ConfigError(*problems)
    return findings
