"""YAML of plain data, with the scalars of YAML 1.2: `1e-5` is a number, `off`, `010` and dates are text."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

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


def parse_yaml(path: Path) -> Any:
    """The `yaml.MappingNode` of a file, whose nodes know their lines. Raises ConfigError."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, _loader())
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is not text in UTF-8 (byte {problem.start}); save it as UTF-8") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {problem.problem}; write one `option: value` a line") from None
    except (yaml.YAMLError, RecursionError) as problem:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} has no options; write one `option: value` a line")
    return root


def plain(node: Any) -> Any:
    """The data of a node. Raises ConfigError, without file and line, if they are not plain or have a key twice."""
    import yaml

    try:
        _once(node, set())
        return _loader()("").construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError) as problem:
        text = problem.problem if isinstance(problem, yaml.MarkedYAMLError) else str(problem)
        raise ConfigError(f"is not plain data ({text})") from None


def is_mapping(node: Any) -> bool:
    """Whether the node is a mapping, not a scalar or a list."""
    return str(node.id) == "mapping"


def to_yaml(data: Mapping[str, Any]) -> str:
    """The YAML text of `data`, plain data, in their order. `parse_yaml` and `plain` restore equal data from it."""
    import yaml

    text = yaml.dump(dict(data), Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=10**6)
    assert isinstance(text, str)
    return text


def _once(node: Any, above: set[int]) -> None:
    """Raise ValueError for a mapping that has a key twice, or a node that contains itself."""
    if isinstance(node.value, str):
        return
    if id(node) in above:
        raise ValueError("it contains itself")
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)] if is_mapping(node) else []
    if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
        raise ValueError(f"it has {twice[0]} twice")
    for inner in (part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))):
        _once(inner, above | {id(node)})


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader with the scalars of YAML 1.2."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, texts, first in SCALARS:
        loader.add_implicit_resolver(tag, re.compile(texts), first)
    return loader


@functools.cache
def _dumper() -> Any:
    """PyYAML's safe dumper. It quotes text that this loader, or a YAML 1.1 loader, would read as something else."""
    import yaml

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(str, _text)
    for tag, texts, first in SCALARS:
        dumper.add_implicit_resolver(tag, re.compile(texts), first)
    return dumper


def _text(dumper: Any, data: str) -> Any:
    style = None if data.isprintable() else '"'  # PyYAML writes some line breaks unescaped, and reads them as spaces
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)
