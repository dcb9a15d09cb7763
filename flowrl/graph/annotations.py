"""The types that a user's classes and functions declare in their annotations."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from flowrl.errors import ConfigError

UNREADABLE = (NameError, AttributeError, TypeError, SyntaxError)
"""What an annotation raises that has no meaning when it is read."""


def declared_types(owner: Any) -> dict[str, Any]:
    """The types of a class's fields or of a function's parameters, by name.

    Raises ConfigError for an annotation that is misspelt, or whose name is imported for type checkers only.
    """
    try:
        return dict(_of_class(owner)) if isinstance(owner, type) else get_type_hints(owner)
    except UNREADABLE as error:
        raise ConfigError(_unreadable_annotation(owner, error)) from None


@functools.cache
def _of_class(owner: type) -> Mapping[str, Any]:
    """Cached: a check and a command line ask for the same classes many times, and each string has to be compiled."""
    return get_type_hints(owner)


def _unreadable_annotation(owner: Any, error: Exception) -> str:
    for part, name, written, names in _raw_annotations(owner):
        try:
            get_type_hints(types.SimpleNamespace(__annotations__={name: written}), names, names)
        except UNREADABLE as found:
            return (
                f"{_file_of(part)}: the annotation {written!r} of {_place_of(part, name)} cannot be read: {found}; "
                f"{_remedy_words(found, names)}"
            )
    return f"{_file_of(owner)}: an annotation of {owner.__qualname__} cannot be read: {error}; correct it"


def _file_of(part: Any) -> str:
    return getattr(sys.modules.get(part.__module__), "__file__", None) or str(part.__module__)


def _place_of(part: Any, name: str) -> str:
    if isinstance(part, type):
        return f"{part.__qualname__}.{name}"
    return f"what {part.__qualname__} returns" if name == "return" else f"{name} of {part.__qualname__}"


def _raw_annotations(owner: Any) -> Iterator[tuple[Any, str, Any, dict[str, Any]]]:
    """(the class or function that declares it, name, annotation, the names that it may use)"""
    for part in owner.__mro__ if isinstance(owner, type) else (owner,):
        module = sys.modules.get(part.__module__)
        known = (vars(module) if module else {}) | dict(vars(part) if isinstance(part, type) else {})
        for name, written in inspect.get_annotations(part).items():
            yield part, name, written, known


def _remedy_words(error: Exception, names: Mapping[str, Any]) -> str:
    if not isinstance(error, NameError) or error.name is None:
        return "write a type that exists when the file is run"
    kinds = [name for name, value in names.items() if isinstance(value, type)]
    near = difflib.get_close_matches(error.name, kinds, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"import {error.name} at the top of the file, outside of `if TYPE_CHECKING:`, or write another type"
