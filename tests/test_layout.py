"""Imports point one way, and declaring a graph loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("ray", "torch", "vllm", "transformers", "deepspeed", "zmq", "reasoning_gym", "datasets")

BASE = {"errors", "messages"}
LIBRARIES = {"training", "weights", "tasks", "models"}
ENGINE = BASE | {"graph", "channel", "runtime"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "messages": {"errors"},
    "graph": BASE,
    "channel": BASE | {"graph"},
    "runtime": BASE | {"graph", "channel"},
    "training": BASE,
    "weights": BASE | {"graph", "channel"},
    "tasks": BASE,
    "models": BASE | {"tasks", "training"},
    "nodes": ENGINE | LIBRARIES,
    "cli": ENGINE | LIBRARIES | {"nodes"},
    "__init__": BASE | {"graph"},
    "__main__": {"cli"},
}
EXCEPTIONS = {("flowrl/messages.py", "training")}
"""Batch.split is the batch type's own; the balancing itself is training's."""


def modules() -> list[Path]:
    return sorted((ROOT / "flowrl").rglob("*.py"))


def part(path: Path) -> str:
    """ "graph" for flowrl/graph/plan.py, "errors" for flowrl/errors.py"""
    return path.relative_to(ROOT / "flowrl").with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Parts of flowrl that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "flowrl":
            names += [f"flowrl.{alias.name}" for alias in node.names]
        for name in names:
            head, _, rest = name.partition(".")
            if head == "flowrl" and rest:
                yield rest.split(".")[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    mine, name = part(path), str(path.relative_to(ROOT))
    wrong = {other for other in imported(path) if other != mine and other not in MAY_IMPORT[mine]}
    assert {(name, other) for other in wrong} <= EXCEPTIONS


def test_every_exception_is_still_needed() -> None:
    for name, other in EXCEPTIONS:
        assert other in imported(ROOT / name)


def loaded_by(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after `code`."""
    probe = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_importing_flowrl_and_building_a_graph_loads_nothing_heavy() -> None:
    assert loaded_by("import flowrl, flowrl.cli\nfrom tests.graph_nodes import grpo\ngrpo().graph.check()") == set()


def test_the_probe_can_see_a_heavy_package() -> None:
    assert loaded_by("import zmq") == {"zmq"}


@pytest.mark.parametrize("path", sorted((ROOT / "graphs").glob("*.py")), ids=lambda path: path.name)
def test_checking_a_graph_file_loads_nothing_heavy(path: Path) -> None:
    assert loaded_by(f"from flowrl.cli import main\nassert main(['check', {str(path)!r}]) == 0") == set()
