"""A fault that can be put into flowrl: where it stands is found by the name of a function, whatever module has that."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class NoPlaceError(Exception):
    """The fault cannot be put in: its text is nowhere, or in several places."""


@dataclass(frozen=True)
class Mutant:
    """One fault: `after` in the place of `before`, which is once in the one such function of flowrl and the graphs."""

    name: str
    fault: str
    """What is wrong then."""
    function: str
    """As in `Class.method`; a class, or a constant of a module, where the text is in no function."""
    before: str
    after: str
    test: str
    """The test that has to fail."""

    def put_into(self, tree: Path) -> tuple[Path, str]:
        """The module of `tree` that has the place, and its text with the fault. Raises NoPlaceError."""
        found = [
            (path, start) for path in modules(tree) if self.before in text_of(path) for start in self._starts(path)
        ]
        if len(found) != 1:
            places = ", ".join(str(path.relative_to(tree)) for path, _ in found) or "no place"
            raise NoPlaceError(f"needs its text once in one {self.function}, found {places}: {self.before}")
        ((path, start),) = found
        text = text_of(path)
        return path, text[:start] + self.after + text[start + len(self.before) :]

    def _starts(self, path: Path) -> Iterator[int]:
        """Where the text stands in the functions of that name."""
        text = text_of(path)
        for name, begin, end in definitions(path):
            start = text.find(self.before, begin, end) if name == self.function else -1
            while start >= 0:
                yield start
                start = text.find(self.before, start + 1, end)


@functools.cache
def modules(tree: Path) -> tuple[Path, ...]:
    """Those of flowrl and the graphs; flowrl/recipes is a link to these, which `rglob` does not follow."""
    return tuple(path for folder in ("flowrl", "graphs") for path in sorted((tree / folder).rglob("*.py")))


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def definitions(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, begin and end of each function, class and constant of a module, its decorators included."""
    text = text_of(path)
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def visit(node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            inside = within
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*within, child.name)
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                yield ".".join(inside), lines[first - 1], lines[child.end_lineno or child.lineno]
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not within:
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                if isinstance(target, ast.Name):
                    yield target.id, lines[child.lineno - 1], lines[child.end_lineno or child.lineno]
            yield from visit(child, inside)

    return tuple(visit(ast.parse(text), ()))
