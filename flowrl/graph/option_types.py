"""The options of a configuration dataclass and their types: checks values from a file, and fills an instance."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from flowrl.errors import ConfigError
from flowrl.graph.annotations import declared_types

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path", type(None): "null"}


def leaves_of(kind: type[Any], prefix: str = "") -> dict[str, Any]:
    """Option -> type, for every leaf: "lr", "task.name"."""
    hints = declared_types(kind)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        found |= leaves_of(hint, f"{name}.") if _is_block(hint) else {name: hint}
    return found


def blocks_of(kind: type[Any], prefix: str = "") -> dict[str, str]:
    """Block of options -> its first leaf: "task" -> "task.name"."""
    hints = declared_types(kind)
    found: dict[str, str] = {}
    for field in dataclasses.fields(kind):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if _is_block(hint):
            found |= {name: next(iter(leaves_of(hint, f"{name}.")), name), **blocks_of(hint, f"{name}.")}
    return found


def check_value(where: str, value: Any, hint: Any) -> Any:
    """`value`, plain data, as the option's type: lists become tuples, integers become floats, nothing else is changed.

    Raises ConfigError, whose text begins with `where`.
    """
    from pydantic import ValidationError

    try:
        return _adapter(hint).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError, ValueError):
        quotes = " in quotes" if isinstance(value, bool | int | float) and _takes_text(hint) else ""
        raise ConfigError(f"{where} is {_shown(value)}; it needs {_words(hint)}{quotes}") from None


def filled(kind: type[Any], given: Mapping[str, Any], *, prefix: str = "", base: Any = None) -> Any:
    """An instance of `kind` with the values of `given`; other fields have the values of `base`, or the defaults.

    `__post_init__` does not run, because options of the command line may still replace wrong values. A field without
    any value is `tyro.MISSING`.
    """
    import tyro

    hints, instance = declared_types(kind), object.__new__(kind)
    for field in dataclasses.fields(kind):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        value = _default(field) if base is None else getattr(base, field.name)
        value = tyro.MISSING if value is dataclasses.MISSING else value
        if _is_block(hint) and any(option.startswith(f"{name}.") for option in given):
            value = filled(hint, given, prefix=f"{name}.", base=None if value is tyro.MISSING else value)
        object.__setattr__(instance, field.name, given.get(name, value))
    return instance


@functools.cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_block(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _takes_text(hint: Any) -> bool:
    return hint in (str, Path) or any(_takes_text(part) for part in get_args(hint))


def _shown(value: Any) -> str:
    try:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}…"


def _words(hint: Any) -> str:
    """What a value of this type is called."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Union, types.UnionType):
        return ", or ".join(_words(part) for part in parts)
    if origin is tuple and Ellipsis not in parts:
        return f"a list of {len(parts)} values, each {_words(parts[0])}"
    if origin in (tuple, list):
        return f"a list, of which each is {_words(parts[0])}"
    return WORDS.get(hint, "a mapping of options to values")
