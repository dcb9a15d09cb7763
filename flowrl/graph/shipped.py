"""The graphs that come with flowrl, by name: `grpo` is the file `flowrl/recipes/grpo.py`."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from flowrl.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent / "recipes"


def shipped_names() -> list[str]:
    """The names of the graphs that come with flowrl."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def find_graph(graph: str | Path) -> Path:
    """The file of a graph that is named by path or by name. Raises ConfigError if it is neither.

    Text that ends in .py or contains a folder is a path, and the file need not exist.
    """
    text = str(graph)
    if text in shipped_names():
        return FOLDER / f"{text}.py"
    if text.endswith(".py") or os.sep in text or Path(text).exists():
        return Path(text)
    here = [path.name for path in Path.cwd().glob("*.py")]
    near = difflib.get_close_matches(text.lower().replace("-", "_"), [*shipped_names(), *here], 1)
    hint = f"did you mean {near[0]}?" if near else "flowrl graphs lists those of flowrl; a file of your own ends in .py"
    raise ConfigError(f"there is no graph {text!r}; {hint}")


def is_shipped(path: Path) -> bool:
    """Whether this is the file of a graph that comes with flowrl."""
    return path.resolve().parent == FOLDER.resolve()


def summary(name: str) -> str:
    """The first line of the graph's docstring. The file is not run."""
    text = ast.get_docstring(ast.parse(source(name))) or ""
    return text.partition("\n")[0]


def source(name: str) -> str:
    """The text of the graph's file."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def companions(name: str) -> Iterator[Path]:
    """Files in folders next to the graphs that this graph names in its text, relative to the graphs' folder."""
    texts = {node.value for node in ast.walk(ast.parse(source(name))) if isinstance(node, ast.Constant)}
    for path in sorted(FOLDER.glob("*/**/*.py")):
        if path.name in texts:
            yield path.relative_to(FOLDER)
