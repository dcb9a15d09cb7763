"""The options of a configuration dataclass: their names, types, defaults and values.

A configuration may be composed of parts (`flowrl.options.ConfigPart`). An option is named as if there were none: the
field `lr` of the part `trainer` is the option `lr`, on the command line, in run files and in the records of a run. A
dataclass that is no part is a block, whose options have its name before theirs: "task.name".
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import sys
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

from flowrl.errors import ConfigError
from flowrl.graph.annotations import declared_types

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path", type(None): "null"}


@dataclass(frozen=True)
class ConfigOption:
    """An option of a configuration, or a block of options."""

    name: str
    """As in a run file."""
    path: tuple[str, ...]
    """Its attribute in the configuration: the names of parts, then the field's."""
    hint: Any
    default: Any
    """`dataclasses.MISSING` if it has to be given."""
    home: type[Any]
    """The class that has it: the configuration, or the type of a part."""
    help: str = ""
    """What it means in this configuration; empty: what its own class says."""

    def value_in(self, cfg: Any) -> Any:
        """The option's value in a configuration."""
        return functools.reduce(getattr, self.path, cfg)

    @property
    def meaning(self) -> str:
        """What the configuration says of it, else the docstring under the field."""
        return self.help or field_text(self.home, self.path[-1])


def named(option: str, default: Any) -> Any:
    """The default of a part's field that is the option `option`, under another name than its own."""
    return dataclasses.field(default=default, metadata={"option": option})


def options_of(kind: type[Any]) -> Mapping[str, ConfigOption]:
    """Name -> option or block, for the fields of a configuration and of its parts.

    Raises ConfigError if two parts have an option of the same name, or if there is a help text of no option.
    """
    return _options_of(cast(Hashable, kind))


@functools.cache
def _options_of(kind: Any) -> Mapping[str, ConfigOption]:
    """Cached: commands ask for the options of the same class many times."""
    found: dict[str, ConfigOption] = {}
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        texts |= vars(base).get("help_texts", {})
    for one in _declared_options(kind, (), dataclasses.MISSING):
        if one.name in found:
            first = found[one.name]
            part, home = first.path[0], first.home.__name__
            places = " and ".join(".".join(place.path) for place in (first, one))
            raise ConfigError(
                f"{kind.__name__} has the option {one.name} twice, as {places}; for "
                f"another default, write {part}: {home} = {home}({first.path[-1]}=...), else rename one of them"
            )
        found[one.name] = dataclasses.replace(one, help=texts.pop(one.name, ""))
    if texts:
        raise ConfigError(f"{kind.__name__}.help_texts has {', '.join(texts)}, and there is no such option; correct it")
    return found


def _declared_options(kind: type[Any], path: tuple[str, ...], values: Any) -> Iterator[ConfigOption]:
    hints = declared_types(kind)
    for field in dataclasses.fields(kind):
        hint, place = hints[field.name], (*path, field.name)
        value = _default_value(field) if values is dataclasses.MISSING else getattr(values, field.name)
        if _is_part(hint):
            yield from _declared_options(hint, place, value)
        else:
            yield ConfigOption(field.metadata.get("option", field.name), place, hint, value, kind)


def field_text(kind: type[Any], name: str) -> str:
    """The docstring under a field, of the nearest class that has one."""
    for owner in kind.__mro__:
        path = getattr(sys.modules.get(owner.__module__), "__file__", None)
        if path and (text := _texts_of_file(path).get(owner.__qualname__, {}).get(name)):
            return text
    return ""


@functools.cache
def _texts_of_file(path: str) -> Mapping[str, Mapping[str, str]]:
    """Qualified name of each class in a file -> field -> the docstring under it."""
    found: dict[str, dict[str, str]] = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                texts = found[f"{prefix}{node.name}"] = {}
                for field, after in itertools.pairwise(node.body):
                    match field, after:
                        case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                            texts[name] = " ".join(text.split())
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(node.body, f"{prefix}{node.name}.<locals>.")

    visit(ast.parse(Path(path).read_bytes()).body, "")
    return found


def compose_config(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """The configuration with these values of its options and blocks, by name; the others have their defaults.

    Every part is made, and checks itself, before the whole does. Raises ConfigError for a value that is refused.
    """
    options = options_of(kind)

    def composed(one: type[Any], path: tuple[str, ...]) -> Any:
        hints, made = declared_types(one), {}
        for field in dataclasses.fields(one):
            name, place = field.metadata.get("option", field.name), (*path, field.name)
            if _is_part(hints[field.name]):
                made[field.name] = composed(hints[field.name], place)
            elif name in values:
                made[field.name] = values[name]
            elif options[name].default is not dataclasses.MISSING:
                made[field.name] = options[name].default
        return one(**made)

    return composed(kind, ())


def value_of(cfg: Any, name: str) -> Any:
    """The value of an option: "lr", "trainer.cpus", or a block. Raises AttributeError if `cfg` does not have it."""
    first, *rest = name.split(".")
    option = options_of(type(cfg)).get(first)
    if option is None:
        raise AttributeError(f"{type(cfg).__name__} has no option {first}", name=first, obj=cfg)
    return functools.reduce(getattr, rest, option.value_in(cfg))


def has_option(cfg: Any, name: str) -> bool:
    """Whether `cfg` has the option, such as "trainer.cpus"."""
    try:
        value_of(cfg, name)
    except AttributeError:
        return False
    return True


def changed_config(cfg: Any, overrides: Mapping[str, Any]) -> Any:
    """`cfg` with these values of its options. Raises ConfigError if one of the values is refused."""
    values = {name: option.value_in(cfg) for name, option in options_of(type(cfg)).items()}
    for name, value in overrides.items():
        first, _, rest = name.partition(".")
        values[first] = _changed_block(values[first], rest, value)
    return compose_config(type(cfg), values)


def _changed_block(block: Any, name: str, value: Any) -> Any:
    if not name:
        return value
    first, _, rest = name.partition(".")
    return dataclasses.replace(block, **{first: _changed_block(getattr(block, first), rest, value)})


def leaves_of(kind: type[Any], prefix: str = "") -> dict[str, Any]:
    """Option -> type, for every leaf: "lr", "task.name"."""
    found: dict[str, Any] = {}
    for one in options_of(kind).values():
        name = f"{prefix}{one.name}"
        found |= leaves_of(one.hint, f"{name}.") if _is_block(one.hint) else {name: one.hint}
    return found


def blocks_of(kind: type[Any], prefix: str = "") -> dict[str, str]:
    """Block of options -> its first leaf: "task" -> "task.name"."""
    found: dict[str, str] = {}
    for one in options_of(kind).values():
        name, hint = f"{prefix}{one.name}", one.hint
        if _is_block(hint):
            found |= {name: next(iter(leaves_of(hint, f"{name}.")), name), **blocks_of(hint, f"{name}.")}
    return found


def check_value(where: str, value: Any, hint: Any) -> Any:
    """`value`, plain data, as the option's type: lists become tuples, integers become floats, nothing else is changed.

    Raises ConfigError, whose text begins with `where`.
    """
    from pydantic import ValidationError

    try:
        return adapter_of(hint).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError, ValueError):
        quotes = " in quotes" if isinstance(value, bool | int | float) and _takes_text(hint) else ""
        try:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
        except ValueError:  # of more digits than Python writes
            shown = "a number of thousands of digits"
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        raise ConfigError(f"{where} is {shown}; it needs {_value_words(hint)}{quotes}") from None


def fill_config(kind: type[Any], given: Mapping[str, Any], *, prefix: str = "", base: Any = None) -> Any:
    """An instance of `kind` with the values of `given`; other fields have the values of `base`, or the defaults.

    `__post_init__` does not run, because options of the command line may still replace wrong values. A field without
    any value is `tyro.MISSING`.
    """
    import tyro

    hints, instance = declared_types(kind), object.__new__(kind)
    for field in dataclasses.fields(kind):
        name, hint = f"{prefix}{field.metadata.get('option', field.name)}", hints[field.name]
        value = _default_value(field) if base is None else getattr(base, field.name)
        value = tyro.MISSING if value is dataclasses.MISSING else value
        within = None if value is tyro.MISSING else value
        if _is_part(hint):
            value = fill_config(hint, given, prefix=prefix, base=within)
        elif _is_block(hint) and any(option.startswith(f"{name}.") for option in given):
            value = fill_config(hint, given, prefix=f"{name}.", base=within)
        object.__setattr__(instance, field.name, value if _is_part(hint) else given.get(name, value))
    return instance


@functools.cache
def adapter_of(hint: Any) -> Any:
    """pydantic's adapter of an option's type."""
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _default_value(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_block(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_part(hint: Any) -> bool:
    return _is_block(hint) and getattr(hint, "is_part", False)


def is_composed(kind: Any) -> bool:
    """Whether a configuration has parts, or an option whose name is not its field's."""
    if not _is_block(kind):
        return False
    renamed = any("option" in field.metadata for field in dataclasses.fields(kind))
    return renamed or any(map(_is_part, declared_types(kind).values()))


def _takes_text(hint: Any) -> bool:
    return hint in (str, Path) or any(_takes_text(part) for part in get_args(hint))


def _value_words(hint: Any) -> str:
    """What a value of this type is called."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Union, types.UnionType):
        return ", or ".join(_value_words(part) for part in parts)
    if origin is tuple and Ellipsis not in parts:
        return f"a list of {len(parts)} values, each {_value_words(parts[0])}"
    if origin in (tuple, list):
        return f"a list, of which each is {_value_words(parts[0])}"
    return WORDS.get(hint, "a mapping of options to values")
