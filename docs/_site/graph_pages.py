"""A page for every graph that comes with flowrl: what it does, its picture, its options, its file."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from docs._site.option_tables import option_tables
from flowrl.graph.analysis.check import check
from flowrl.graph.drawing import draw_svg
from flowrl.graph.load import graph_source, graph_summary, load_file, shipped_names
from flowrl.graph.machine import Cluster

MACHINE = "1x cpus=8 memory=64"
"""What the plans of the pictures are made for."""
GROUPS = {
    "Reinforcement learning": (
        "grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "ppo",
        "raft",
        "judge",
        "tree_rollouts",
        "replay",
        "proposer",
        "planner_executor",
        "custom_node",
    ),
    "Preferences and reward models": (
        "dpo",
        "kto",
        "iterative_dpo",
        "pairs",
        "reward_model",
        "process_reward_model",
    ),
    "Supervised and distillation": ("sft", "distill", "teachers"),
    "Agents": ("agent_tools", "agent_game", "step_groups", "agent_openai", "self_play"),
    "Around training": ("evaluate", "generate", "score"),
}
"""Heading -> graphs."""


def grouped() -> dict[str, tuple[str, ...]]:
    """`GROUPS`, and what is in none of them."""
    known = {name for names in GROUPS.values() for name in names}
    others = tuple(name for name in shipped_names() if name not in known)
    return {**GROUPS, "Others": others} if others else GROUPS


def overview() -> str:
    """The page that lists the graphs."""
    parts = [
        "# Graphs\n\nThe graphs that come with flowrl run by name: `flowrl run grpo`. "
        "`flowrl new my_graph.py --from grpo` copies one to edit. Each page has the graph's picture, every option with "
        "its default for `tiny` (for other models some "
        "[depend on the size](../models.md#defaults-that-fit-the-model)), and its file.\n"
    ]
    for heading, names in grouped().items():
        rows = "".join(f"| [{name}]({name}.md) | {graph_summary(name)} |\n" for name in names)
        parts.append(f"## {heading}\n\n| | |\n|---|---|\n{rows}")
    return "\n".join(parts)


def page(name: str) -> str:
    """The page of one graph."""
    return (
        f"# {name}\n\n{_described(name)}\n\n![The graph {name}](../pictures/graphs/{name}.svg)\n\n"
        f"## Options\n\n`flowrl run {name} --help` prints those that most runs set, `--help-all` all. A flag is "
        "switched off with `no-`: `--no-resume`. "
        "Options of every run are [those of flowrl run](../reference/commands.md#flowrl-run).\n\n"
        f"{option_tables(load_file(name).config_type)}"
        f"## The file\n\n`graphs/{name}.py`\n\n```python\n{graph_source(name).rstrip()}\n```\n"
    )


def picture(name: str) -> str:
    """The graph with its default options, as SVG."""
    file = load_file(name)
    graph = file.build(file.config_type())
    return draw_svg(graph, check(graph, Cluster.parse(MACHINE)).plan)


def _described(name: str) -> str:
    """The graph's docstring; formulas, which are indented, and lines that are commands become blocks."""
    text = ast.get_docstring(ast.parse(graph_source(name))) or ""
    return "\n\n".join(_paragraphs(text))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        lines = textwrap.dedent(paragraph)
        block = lines != paragraph or lines.startswith("flowrl ")
        yield f"```\n{lines}\n```" if block else lines
