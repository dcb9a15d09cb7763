"""Run files: the options of a run as YAML, `flowrl run --config run.yaml`.

    graph: grpo
    policy: smollm2
    task: {name: questions.jsonl, system_prompt: Calculate.}
    lr: 1e-5
    steps: 200

Keys are the names of options. Options of a block are nested or written with dots, `task.name`; a block may be given
by the value of its first option, as on the command line. Only plain data are read: a tag that makes an object is an
error.

Scalars are those of YAML 1.2: `1e-5` is a number, `off`, `010` and dates are text.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.option_types import blocks_of, check_value, leaves_of

SCALARS = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
)
"""(tag, its texts as a regular expression, the characters that they begin with)"""
MOST_BYTES = 1 << 20
"""The largest file that is read: PyYAML takes some 10 s for 1 MiB, and people write a few KiB."""
MOST_VALUES = 100_000
"""The most values that a node may stand for. Aliases of aliases make 10^10 values of a line."""
TOO_DEEP = "its lists or mappings are nested too deeply"


def parse_yaml(path: Path) -> Any:
    """The `yaml.MappingNode` of a file, whose nodes know their lines. Raises ConfigError."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8") if (size := path.stat().st_size) <= MOST_BYTES else None
        if text is None:
            raise ConfigError(
                f"{path} has {size} bytes, and a file of options has at most {MOST_BYTES}; is it another?"
            )
        root = yaml.compose(text, _yaml_loader())
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is not text in UTF-8 (byte {problem.start}); save it as UTF-8") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {problem.problem}; write one `option: value` a line") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: {TOO_DEEP}; write one `option: value` a line") from None
    except yaml.YAMLError as problem:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} has no options; write one `option: value` a line")
    return root


def plain_data(node: Any) -> Any:
    """The data of a node. Raises ConfigError, without file and line, if they are not plain or have a key twice."""
    import yaml

    try:
        _count_values(node, {})
        return _yaml_loader()("").construct_document(node)
    except RecursionError:
        raise ConfigError(f"is not plain data ({TOO_DEEP})") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as problem:  # AttributeError: PyYAML on a wrong tag
        text = problem.problem if isinstance(problem, yaml.MarkedYAMLError) else str(problem).partition(";")[0]
        raise ConfigError(f"is not plain data ({text})") from None


def _count_values(node: Any, known: dict[int, int]) -> int:
    """How many values the node stands for, where each alias counts as what it stands for.

    `known` has the counts of the nodes visited before, so that a node with many aliases is visited once. Raises
    ValueError for more than MOST_VALUES, for a mapping that has a key twice, and for a node that contains itself.
    """
    if isinstance(node.value, str):
        return 1
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("it contains itself")
        return known[id(node)]
    known[id(node)] = 0  # until it is counted
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)] if node.id == "mapping" else []
    if twice := [key for key, times in Counter(keys).items() if times > 1]:
        raise ValueError(f"it has {twice[0]} twice")
    count = 1
    for inner in (part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))):
        count += _count_values(inner, known)
        if count > MOST_VALUES:
            raise ValueError(f"its lists and aliases stand for more than {MOST_VALUES} values")
    known[id(node)] = count
    return count


@functools.cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader with the scalars of YAML 1.2."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, texts, first in SCALARS:
        loader.add_implicit_resolver(tag, re.compile(texts), first)
    return loader


@functools.cache
def _yaml_dumper() -> Any:
    """PyYAML's safe dumper. It quotes text that this loader, or a YAML 1.1 loader, would read as something else."""
    import yaml

    def write_text(dumper: Any, data: str) -> Any:
        # PyYAML writes some line breaks unescaped, and reads them as spaces.
        style = None if data.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(str, write_text)
    for tag, texts, first in SCALARS:
        dumper.add_implicit_resolver(tag, re.compile(texts), first)
    return dumper


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
        for name, line, node in self._find_entries(self.root, "", leaves, blocks):
            if name in given:
                raise ConfigError(f"{self.path}:{line}: {name} is given twice, first in line {lines[name]}; keep one")
            lines[name] = line
            where = f"{self.path}:{line}: {name}"
            try:
                value = plain_data(node)
            except ConfigError as problem:
                raise ConfigError(f"{where} {problem}; write text, a number, true, false, null or a list") from None
            given[name] = check_value(where, value, leaves[name])
        return given

    def _find_entries(
        self, mapping: Any, prefix: str, leaves: Mapping[str, Any], blocks: Mapping[str, str]
    ) -> Iterator[tuple[str, int, Any]]:
        """(option, its line, the node of its value) of a mapping and of the blocks within it."""
        for key, value in mapping.value:
            word = key.value.replace("-", "_") if isinstance(key.value, str) else "a key that is no text"
            name, line = f"{prefix}{word}", key.start_mark.line + 1
            if name == GRAPH:
                continue
            if name in blocks and value.id == "mapping":
                yield from self._find_entries(value, f"{name}.", leaves, blocks)
            elif (leaf := blocks.get(name, name)) in leaves:
                yield leaf, line, value
            else:
                known = [*leaves, *blocks, GRAPH]
                near = [one for one in known if one.endswith(f".{name}")] or difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else "--help-all lists the options"
                raise ConfigError(f"{self.path}:{line}: there is no option {name}; {hint}")


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
    """The text of a run file with these options, as nested plain data in their order."""
    import yaml

    merged = {name: value for some in options for name, value in some.items()}
    if GRAPH in merged:
        raise ConfigError("a run file names the graph with the key graph, but the graph has an option of that name")
    data = {GRAPH: graph, **merged}
    text = yaml.dump(data, Dumper=_yaml_dumper(), sort_keys=False, allow_unicode=True, width=10**6)
    assert isinstance(text, str)
    return text
