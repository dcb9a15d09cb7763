"""The options of a configuration as Markdown: names as on the command line, values, defaults, and their docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

HEAD = "| option | default | |\n|---|---|---|\n"


@dataclass(frozen=True)
class Option:
    """One leaf of a configuration."""

    name: str
    """As on the command line, without the two hyphens: zero.stage"""
    values: str
    """What it takes: a number, one of some words."""
    default: str
    meaning: str
    """Its docstring, in one line."""

    @property
    def row(self) -> str:
        takes = f" *{self.values}*" if self.values else ""
        return f"| `--{self.name}`{takes} | {self.default} | {_cell(self.meaning)} |\n"


@dataclass(frozen=True)
class Section:
    """Options that were declared together."""

    title: str
    text: str
    options: tuple[Option, ...]

    @property
    def markdown(self) -> str:
        rows = "".join(option.row for option in self.options)
        return f"### {self.title}\n\n{self.text}\n\n{HEAD}{rows}\n"


def sections(config_type: type[Any]) -> list[Section]:
    """The options of a configuration: its own, those of the classes it inherits, then fields that have several."""
    hints = get_type_hints(config_type)
    declared: dict[type[Any], list[Option]] = {config_type: []}
    nested: list[Section] = []
    for field in fields(config_type):
        value, kind = _default(field), hints[field.name]
        if is_dataclass(value):
            meaning = _doc(config_type, field.name) or summary(type(value))
            nested.append(Section(f"--{_spelled(field.name)}", meaning, tuple(_leaves(value, _spelled(field.name)))))
        else:
            option = Option(_spelled(field.name), _values(kind), _shown(value), _doc(config_type, field.name))
            declared.setdefault(_home(config_type, field.name), []).append(option)
    order = [config_type, *(kind for kind in config_type.__mro__ if kind is not config_type)]
    own = [kind for kind in order if declared.get(kind)]
    return [*(Section(_title(kind, config_type), summary(kind), tuple(declared[kind])) for kind in own), *nested]


def options(config_type: type[Any]) -> list[Option]:
    """All options of a configuration."""
    return [option for section in sections(config_type) for option in section.options]


def field_table(kind: type[Any]) -> str:
    """The fields of a dataclass, as they are named in Python."""
    hints = get_type_hints(kind)
    rows = ""
    for field in fields(kind):
        meaning = _cell(_doc(kind, field.name))
        rows += f"| `{field.name}` *{_values(hints[field.name])}* | {_shown(_default(field))} | {meaning} |\n"
    return f"| field | default | |\n|---|---|---|\n{rows}\n"


def summary(kind: type[Any]) -> str:
    """The docstring of a class, without one that a dataclass makes up."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.split())


def _leaves(value: Any, prefix: str) -> Iterator[Option]:
    hints = get_type_hints(type(value))
    for field in fields(value):
        name, inner = f"{prefix}.{_spelled(field.name)}", getattr(value, field.name)
        if is_dataclass(inner):
            yield from _leaves(inner, name)
        else:
            yield Option(name, _values(hints[field.name]), _shown(inner), _doc(type(value), field.name))


def _default(field: Field[Any]) -> Any:
    """Taken from the field: options that have to be given are not there in any instance."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _title(kind: type[Any], config_type: type[Any]) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__.removesuffix("Options")).capitalize()
    return "Of this graph" if kind is config_type else f"{words} options"


def _home(config_type: type[Any], name: str) -> type[Any]:
    """The class that declares the option: the first one that has it, so that a new default does not move it."""
    return [kind for kind in config_type.__mro__ if name in inspect.get_annotations(kind)][-1]


def _doc(config_type: type[Any], name: str) -> str:
    """The docstring under a field, of the nearest class that has one."""
    found = (_docs(kind).get(name) for kind in config_type.__mro__ if is_dataclass(kind))
    return next((doc for doc in found if doc), "")


@functools.cache
def _docs(kind: type[Any]) -> Mapping[str, str]:
    """Field -> the docstring under it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(after):
            found[field.target.id] = " ".join(ast.literal_eval(after.value).split())  # type: ignore[attr-defined]
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def _values(kind: Any) -> str:
    """What an option takes, in words."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [one for one in get_args(kind) if one is not type(None)]
        return " or ".join(filter(None, dict.fromkeys(map(_values, kinds))))
    if get_origin(kind) is tuple:
        inner = [one for one in get_args(kind) if one is not Ellipsis]
        several = len(inner) == 1
        return f"several: {_values(inner[0])}".removesuffix(": text") if several else " ".join(map(_values, inner))
    words = {int: "integer", float: "number", str: "text", Path: "path", bool: "flag"}
    return words.get(kind, "NAME VALUE" if get_origin(kind) is not None else getattr(kind, "__name__", ""))


def _shown(value: Any) -> str:
    if value is None or value == "" or value == () or value == {}:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
