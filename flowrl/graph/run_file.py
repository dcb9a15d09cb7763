"""Run files: the options of a run as YAML, `flowrl run --config run.yaml`.

    graph: grpo
    policy: smollm2
    task: {name: questions.jsonl, system_prompt: Calculate.}
    lr: 1e-5
    steps: 200

Keys are the names of options. Options of a block are nested or written with dots, `task.name`; a block may be given by
the value of its first option, as on the command line. Only plain data are read: a tag that makes an object is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.option_types import blocks_of, check_value, leaves_of
from flowrl.graph.yaml_text import is_mapping, parse_yaml, plain, to_yaml

GRAPH = "graph"


@dataclass(frozen=True)
class RunFile:
    """A run file that has been parsed. What its keys mean depends on the options of its graph."""

    path: Path
    root: Any = field(repr=False)
    """A `yaml.MappingNode`."""

    @classmethod
    def read(cls, path: Path) -> RunFile:
        """Raises ConfigError if the file is missing or not YAML."""
        if not path.is_file():
            near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], 1)
            hint = f"did you mean {path.parent / near[0]}?" if near else "--save-config FILE writes one"
            raise ConfigError(f"there is no run file {path}; {hint}")
        return cls(path, parse_yaml(path))

    @cached_property
    def graph(self) -> str:
        """The graph that the file names, "" if it names none."""
        found = [(key.start_mark.line + 1, value.value) for key, value in self.root.value if key.value == GRAPH]
        if len(found) > 1:
            raise ConfigError(f"{self.path}:{found[1][0]}: graph is given twice, first in line {found[0][0]}; keep one")
        if found and (not isinstance(found[0][1], str) or not found[0][1]):
            raise ConfigError(f"{self.path}:{found[0][0]}: graph needs the name or the file of a graph, such as grpo")
        return str(found[0][1]) if found else ""

    def values(self, *kinds: type[Any]) -> dict[str, Any]:
        """Option -> value for the options of the dataclasses `kinds`, "task.name" for one in a block.

        Raises ConfigError for a key that none of them has, a key given twice and a value of the wrong type.
        """
        leaves = {name: hint for kind in kinds for name, hint in leaves_of(kind).items()}
        blocks = {name: first for kind in kinds for name, first in blocks_of(kind).items()}
        given: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for name, line, node in self._entries(self.root, "", leaves, blocks):
            if name in given:
                raise ConfigError(f"{self.path}:{line}: {name} is given twice, first in line {lines[name]}; keep one")
            lines[name] = line
            given[name] = self._value(f"{self.path}:{line}: {name}", node, leaves[name])
        return given

    @staticmethod
    def _value(where: str, node: Any, hint: Any) -> Any:
        try:
            value = plain(node)
        except ConfigError as problem:
            raise ConfigError(f"{where} {problem}; write text, a number, true, false, null or a list") from None
        return check_value(where, value, hint)

    def _entries(
        self, mapping: Any, prefix: str, leaves: Mapping[str, Any], blocks: Mapping[str, str]
    ) -> Iterator[tuple[str, int, Any]]:
        """(option, its line, the node of its value) of a mapping and of the blocks within it."""
        for key, value in mapping.value:
            name, line = _name(prefix, key), key.start_mark.line + 1
            if name == GRAPH:
                continue
            if name in blocks and is_mapping(value):
                yield from self._entries(value, f"{name}.", leaves, blocks)
            elif (leaf := blocks.get(name, name)) in leaves:
                yield leaf, line, value
            else:
                raise ConfigError(f"{self.path}:{line}: {_unknown(name, [*leaves, *blocks, GRAPH])}")


def write_run_file(path: Path, graph: str, *options: Mapping[str, Any]) -> str:
    """Write a run file; returns its text. Raises ConfigError, and replaces nothing, if `path` has different content."""
    text = run_file_text(graph, *options)
    try:
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"--save-config {path}: the file is there already and is not replaced; name another one")
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeError) as problem:
        raise ConfigError(f"--save-config {path}: it cannot be written: {problem}") from None
    return text


def run_file_text(graph: str, *options: Mapping[str, Any]) -> str:
    """The text of a run file with these options, as nested plain data."""
    merged = {name: value for some in options for name, value in some.items()}
    if GRAPH in merged:
        raise ConfigError("a run file names the graph with the key graph, but the graph has an option of that name")
    return to_yaml({GRAPH: graph, **merged})


def _name(prefix: str, key: Any) -> str:
    return prefix + (key.value.replace("-", "_") if isinstance(key.value, str) else "a key that is no text")


def _unknown(name: str, known: list[str]) -> str:
    near = [one for one in known if one.endswith(f".{name}")] or difflib.get_close_matches(name, known, 1)
    return f"there is no option {name}; " + (f"did you mean {near[0]}?" if near else "--help-all lists the options")
