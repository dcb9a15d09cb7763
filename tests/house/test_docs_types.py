"""What docs/nodes.md says of type checkers, done by a reader: graphs of the docs, in a directory of their own."""

from __future__ import annotations

import ast
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import flowrl.nodes
from flowrl import Node
from flowrl.graph.annotations import declared_types
from flowrl.graph.ports import Call, In, Out, Serve
from tests.house.documents import FENCED, ROOT
from tests.house.test_docs_tutorial import files as files_of_tutorial
from tests.house.test_testing_docs import files as files_of_testing

WRONG = """
from flowrl import Graph
from flowrl.options import OnlineConfig, make_generator, make_prompts


def graph(cfg: OnlineConfig) -> Graph:
    g = Graph("wrong")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg))
    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, generator.weights)
    return g
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the configuration that the page shows."""
    path = tmp_path_factory.mktemp("types")
    page = (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
    (path / "mypy.ini").write_text(next(code for language, code in FENCED.findall(page) if language == "ini"))
    return path


def with_last_definitions(text: str) -> str:
    """A page's file without the functions that a later block of the page replaces."""
    lines = text.splitlines(keepends=True)
    functions = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    last = {function.name: function for function in functions}
    replaced = [one for one in functions if last[one.name] is not one]
    without = {n for one in replaced for n in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    return "".join(line for n, line in enumerate(lines, 1) if n not in without)


def mypy(here: Path, *names: str) -> str:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(here / "cache"), *names]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100).stdout


def test_graphs_of_the_docs_and_of_the_repository_pass(here: Path) -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "graphs").glob("*.py")}
    of_docs = files_of_tutorial() | files_of_testing()
    found |= {name: with_last_definitions(text) for name, text in of_docs.items() if not name.startswith("test_")}
    for name, text in found.items():
        (here / name).write_text(text)
    assert mypy(here, *found) == f"Success: no issues found in {len(found)} source files\n"


def test_a_wrong_edge_is_found(here: Path) -> None:
    (here / "wrong.py").write_text(WRONG)
    printed = mypy(here, "wrong.py")
    assert printed.startswith("wrong.py:11: error: ") and printed.endswith(
        "Found 1 error in 1 file (checked 1 source file)\n"
    )


@pytest.mark.parametrize("name", flowrl.nodes.__all__)
def test_no_port_of_a_shipped_node_has_an_open_type(name: str) -> None:
    kind = getattr(flowrl.nodes, name)
    if not (isinstance(kind, type) and issubclass(kind, Node)):
        return
    for port, hint in declared_types(kind).items():
        if typing.get_origin(hint) in (In, Out, Call, Serve):
            assert all(isinstance(carried, type) for carried in typing.get_args(hint)), port
