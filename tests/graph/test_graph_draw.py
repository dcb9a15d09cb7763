"""Pictures: Mermaid line by line, SVG by its geometry."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flowrl import ConfigError, Graph
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.drawing import box_columns, draw_graph, draw_mermaid, draw_svg
from flowrl.graph.graph import Edge
from tests.graph.graph_nodes import MACHINE, Evaluation, Grpo, Teacher, Trainer, grpo

SVG = "{http://www.w3.org/2000/svg}"


def whole() -> Grpo:
    """A graph with a fan-out, a call, a second trainer and replicas."""
    parts = grpo(num_generators=2)
    teacher = parts.graph.add("teacher", Teacher())
    parts.graph.connect(parts.generator.rollouts, teacher.rollouts)
    parts.graph.ignore(teacher.rated)
    critic = parts.graph.add("critic", Trainer())
    parts.graph.connect(parts.batcher.batches, critic.batches, dispatch="gang")
    parts.graph.ignore(critic.weights)
    parts.graph.call(parts.graph.add("evaluation", Evaluation()).generate, parts.generator.requests)
    return parts


def test_mermaid_line_by_line() -> None:
    graph = grpo(num_generators=2).graph
    lines = draw_mermaid(graph, make_plan(graph, MACHINE)).splitlines()
    assert lines[:4] == ["---", "title: grpo", "---", "flowchart LR"]
    assert lines[6:] == [
        '  prompts["<b>prompts</b><br/>Prompts"]:::cheap',
        '  generator["<b>generator</b> ×2<br/>Generator"]:::heavy',
        '  reward["<b>reward</b> ×2<br/>Reward"]:::cheap',
        '  advantage["<b>advantage</b><br/>Advantage"]:::cheap',
        '  batcher["<b>batcher</b><br/>Batcher"]:::cheap',
        '  trainer["<b>trainer</b><br/>Trainer"]:::heavy',
        '  prompts -->|"Prompt, 32"| generator',
        '  generator -->|"Sample, 32"| reward',
        '  reward -->|"Scored, 32"| advantage',
        '  advantage -->|"Group, 4"| batcher',
        '  batcher -->|"Batch, 2, gang"| trainer',
        '  trainer -.->|"Weights"| generator',
    ]


def test_columns_follow_the_data() -> None:
    assert box_columns(grpo().graph) == [
        ["prompts"],
        ["generator"],
        ["reward"],
        ["advantage"],
        ["batcher"],
        ["trainer"],
    ]
    table = box_columns(whole().graph)
    assert set(table[0]) == {"prompts", "evaluation"}
    assert set(table[2]) == {"reward", "teacher"}
    assert set(table[5]) == {"trainer", "critic"}


def rectangles(picture: str) -> list[tuple[float, float, float, float]]:
    root = ElementTree.fromstring(picture)
    rects = [element for element in root.iter(f"{SVG}rect") if "x" in element.attrib]
    return [tuple(float(rect.attrib[key]) for key in ("x", "y", "width", "height")) for rect in rects]  # type: ignore[misc]


def test_svg_has_every_node_and_edge() -> None:
    graph = whole().graph
    root = ElementTree.fromstring(draw_svg(graph, make_plan(graph, MACHINE)))
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"prompts", "generator ×2", "reward ×2", "teacher", "critic", "evaluation", "Batch · 2", "gang"} <= texts
    titles = [title.text for path in root.iter(f"{SVG}path") for title in path.iter(f"{SVG}title")]
    assert sorted(filter(None, titles)) == sorted(edge.name for edge in graph.edges)


def test_svg_boxes_do_not_overlap_and_lie_on_the_sheet() -> None:
    graph = whole().graph
    picture = draw_svg(graph, make_plan(graph, MACHINE))
    _, _, width, height = map(float, ElementTree.fromstring(picture).attrib["viewBox"].split())
    boxes = rectangles(picture)
    distinct = [box for box in boxes if (box[0] - 5, box[1] - 5, *box[2:]) not in boxes]  # less the stacked cards
    assert len(distinct) == len(graph.nodes)
    for index, (x, y, w, h) in enumerate(distinct):
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
        for other in distinct[index + 1 :]:
            assert abs(other[0] - x) >= w or abs(other[1] - y) >= h


def test_lines_pass_beside_boxes() -> None:
    graph = whole().graph
    graph.ignored.clear()
    graph.latest(graph.nodes["critic"].weights, graph.nodes["generator"].weights)  # type: ignore[attr-defined]
    picture = draw_svg(graph, make_plan(graph, MACHINE))
    ways = re.findall(r'd="M([\d.]+) ([\d.]+)(?: H([\d.]+))? V([\d.]+)', picture)
    assert len(ways) == 2
    for start, top, beside, level in ways:
        x, low, high = float(beside or start), *sorted((float(top), float(level)))
        inside = [box for box in rectangles(picture) if box[0] < x < box[0] + box[2]]
        assert not [box for box in inside if low < box[1] < high], "the line runs over a box"


def test_a_cycle_is_cut_where_it_closes() -> None:
    parts = grpo()
    loop = parts.graph.add("loop", Teacher())
    parts.graph.connect(parts.generator.rollouts, loop.rollouts)
    parts.graph.edges.append(Edge("queue", loop.rated, parts.generator.prompts))
    assert box_columns(parts.graph)[1] == ["generator"]
    assert set(box_columns(parts.graph)[2]) == {"reward", "loop"}


def test_the_file_name_chooses_the_kind(tmp_path: Path) -> None:
    graph = grpo().graph
    plan = make_plan(graph, MACHINE)
    draw_graph(graph, plan, tmp_path / "g.svg")
    draw_graph(graph, plan, tmp_path / "g.mmd")
    assert (tmp_path / "g.svg").read_text() == draw_svg(graph, plan)
    assert (tmp_path / "g.mmd").read_text() == draw_mermaid(graph, plan)
    with pytest.raises(ConfigError, match=r"has to end in .svg or .mmd"):
        draw_graph(graph, plan, tmp_path / "g.png")
    with pytest.raises(ConfigError, match="there is no directory"):
        draw_graph(graph, plan, tmp_path / "nowhere" / "g.svg")


def test_names_are_escaped() -> None:
    graph = Graph("a < b & c")
    graph.add("one", Trainer())
    assert ElementTree.fromstring(draw_svg(graph, make_plan(graph, MACHINE))).findtext(f"{SVG}title") == "a < b & c"
