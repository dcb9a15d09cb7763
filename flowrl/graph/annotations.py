"""The types that a user's classes and functions declare in their annotations."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any, get_type_hints

from flowrl.errors import ConfigError

UNREADABLE = (NameError, AttributeError, TypeError, SyntaxError)
"""What an annotation raises that has no meaning when it is read."""


def declared_types(owner: Any) -> dict[str, Any]:
    """The types of a class's fields or of a function's parameters, by name.

    Raises ConfigError for an annotation that is misspelt, or whose name is imported for type checkers only.
    """
    try:
        return dict(_hints_of_class(owner)) if isinstance(owner, type) else get_type_hints(owner)
    except UNREADABLE as error:
        raise ConfigError(_unreadable_annotation(owner, error)) from None


@functools.cache
def _hints_of_class(owner: type) -> Mapping[str, Any]:
    """Cached: a check and a command line ask for the same classes many times, and each string has to be compiled."""
    return get_type_hints(owner)


def _unreadable_annotation(owner: Any, error: Exception) -> str:
    """What is wrong with the annotation of a class or function that raised `error`, and what would mend it."""
    for part in owner.__mro__ if isinstance(owner, type) else (owner,):
        module = sys.modules.get(part.__module__)
        file = getattr(module, "__file__", None) or str(part.__module__)
        names = (vars(module) if module else {}) | dict(vars(part) if isinstance(part, type) else {})
        for name, written in inspect.get_annotations(part).items():
            try:
                get_type_hints(types.SimpleNamespace(__annotations__={name: written}), names, names)
                continue
            except UNREADABLE as found:
                problem = found
            place = f"what {part.__qualname__} returns" if name == "return" else f"{name} of {part.__qualname__}"
            if isinstance(part, type):
                place = f"{part.__qualname__}.{name}"
            remedy = "write a type that exists when the file is run"
            if isinstance(problem, NameError) and problem.name is not None:
                kinds = [known for known, value in names.items() if isinstance(value, type)]
                near = difflib.get_close_matches(problem.name, kinds, 1)
                remedy = (
                    f"did you mean {near[0]}?"
                    if near
                    else f"import {problem.name} at the top of the file, outside of `if TYPE_CHECKING:`, or write "
                    "another type"
                )
            return f"{file}: the annotation {written!r} of {place} cannot be read: {problem}; {remedy}"
    file = getattr(sys.modules.get(owner.__module__), "__file__", None) or str(owner.__module__)
    return f"{file}: an annotation of {owner.__qualname__} cannot be read: {error}; correct it"
