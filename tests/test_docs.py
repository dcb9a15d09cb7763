"""What the documents name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import flowrl
import flowrl.nodes
from flowrl.graph.analysis.check import check
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB, Cluster, Machine
from flowrl.models import Policy

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`([\w/]+\.py): ([\w.]+)`")


def definitions(path: Path) -> set[str]:
    """ "split", "Batch", "Batch.split" """
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


WALK = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(WALK))))
def test_the_walk_leads_past_functions_that_exist(file: str, name: str) -> None:
    assert name in definitions(ROOT / "flowrl" / file)


def test_the_walk_names_its_stations() -> None:
    assert len(set(NAMED.findall(WALK))) >= 30


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(((?!http)[^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_code_of_conversations_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "conversations.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})


TWO_CORES = Cluster((Machine(cores=(0, 1), memory_bytes=8 * GB),))
README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")


def test_the_graph_of_the_readme_can_run_on_two_cores() -> None:
    (code,) = re.findall(r"## A graph in 25 lines\n+```python\n(.*?)```", README, re.S)
    names: dict[str, Any] = {**vars(flowrl), **vars(flowrl.nodes), "Policy": Policy}
    exec("from __future__ import annotations\n" + code, names)
    report = check(names["graph"](load_file(ROOT / "graphs" / "grpo.py").parse([])), TWO_CORES)
    assert not report.problems


SHOWN = re.findall(r"^flowrl run +(graphs/\w+\.py)([^#\n]*)", README, re.M)


@pytest.mark.parametrize(("file", "options"), [one for one in SHOWN if "gpus" not in one[1]])
def test_the_runs_of_the_readme_fit_on_two_cores(file: str, options: str) -> None:
    chosen = re.sub(r"--(steps|run-dir) \S+|--resume", "", options).split()
    graph_file = load_file(ROOT / file)
    assert not check(graph_file.build(graph_file.parse(chosen)), TWO_CORES).problems


def test_the_readme_shows_runs() -> None:
    assert len(SHOWN) >= 4
