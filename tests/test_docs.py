"""What the documents name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

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
