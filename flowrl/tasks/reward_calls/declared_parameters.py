"""Finds the parameters of a function by reading the files that declare it, without importing any of them.

It follows the statements at the top level of a file, including those within `if` and `try`: `def`, `from module import
name as other`, and `other = name`. A function that is made in another way (by `functools.partial`, in a loop) is known
only after it is loaded.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.user_path import user_path

Parameters = tuple[str, ...]
MOST_STEPS = 16
"""The most imports and assignments that are followed from one name."""


@dataclass(frozen=True)
class Declarations:
    """What a file declares at its top level."""

    functions: Mapping[str, Parameters] = field(default_factory=dict)
    imported: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> (module, with a leading dot for each level if it is relative; name in that module)."""
    assigned: Mapping[str, str] = field(default_factory=dict)
    """Name -> another name in the same file."""


def parameters(place: str) -> Parameters | None:
    """The parameters of the function at `file.py:function` or `package.module:function`; None if no file declares
    them."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        return _followed(user_path(where), "", name, MOST_STEPS)
    file = _file_of(where)
    return None if file is None else _followed(file, _package(where, file), name, MOST_STEPS)


def declared_in(file: Path) -> Declarations:
    """What `file` declares; nothing if it cannot be read or parsed."""
    try:
        return _parsed(file.resolve(), file.stat().st_mtime_ns)
    except OSError:
        return Declarations()


def _followed(file: Path, package: str, name: str, steps: int) -> Parameters | None:
    """The parameters of `name` in `file`, a module of `package`."""
    found = declared_in(file)
    if name in found.functions or not steps:
        return found.functions.get(name)
    if name in found.assigned:
        return _followed(file, package, found.assigned[name], steps - 1)
    if name not in found.imported:
        return None
    module, original = found.imported[name]
    absolute = _absolute(module, package)
    source = None if absolute is None else _file_of(absolute)
    return None if source is None else _followed(source, _package(str(absolute), source), original, steps - 1)


def _absolute(module: str, package: str) -> str | None:
    """The full name of a module that is imported in `package`."""
    try:
        return importlib.util.resolve_name(module, package or None)
    except ImportError:  # a relative import in a file that belongs to no package
        return None


def _package(module: str, file: Path) -> str:
    return module if file.name == "__init__.py" else module.rpartition(".")[0]


def _file_of(module: str) -> Path | None:
    """The source file of a module; None if there is none."""
    path: list[str] | None = None
    origin: str | None = None
    parts = module.split(".")
    for number in range(len(parts)):
        name = ".".join(parts[: number + 1])
        found = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return None
        origin, path = spec.origin, [*(spec.submodule_search_locations or ())]
    return Path(origin) if origin is not None and origin.endswith(".py") else None


@functools.lru_cache(maxsize=64)
def _parsed(file: Path, changed_ns: int) -> Declarations:
    try:
        statements = [*_top(ast.parse(file.read_bytes()).body)]
    except (OSError, SyntaxError, ValueError):  # importing the file reports what is wrong
        return Declarations()
    functions = {
        one.name: _names(one.args) for one in statements if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return Declarations(functions, dict(_imports(statements)), dict(_assignments(statements)))


def _top(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.Try):
            yield from _top(one.body)
            yield from _top(one.orelse)
        if isinstance(one, ast.Try):
            for handler in one.handlers:
                yield from _top(handler.body)


def _imports(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    for one in statements:
        if isinstance(one, ast.ImportFrom):
            module = "." * one.level + (one.module or "")
            yield from ((name.asname or name.name, (module, name.name)) for name in one.names)


def _assignments(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    for one in statements:
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name):
            yield from ((target.id, one.value.id) for target in one.targets if isinstance(target, ast.Name))


def _names(arguments: ast.arguments) -> Parameters:
    return tuple(one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
