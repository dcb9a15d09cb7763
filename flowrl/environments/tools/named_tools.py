"""Finds tools by name: built-in ones, and a user's as `FILE.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.environments.tools.calculator import calculator
from flowrl.environments.tools.collection import Tools
from flowrl.errors import ConfigError
from flowrl.tasks.user_module import user_module

BUILT_IN: Mapping[str, Callable[..., Any]] = {"calculator": calculator}


def named_tools(text: str) -> Tools:
    """The tools of names joined by `+`, as `calculator+tools.py:search`. A user's name is of a function, of a list of
    functions, or of `Tools`. Raises ConfigError."""
    return Tools([tool for name in text.split("+") for tool in _named(name.strip())])


def _named(name: str) -> Tools:
    if name in BUILT_IN:
        return Tools([BUILT_IN[name]])
    where, colon, wanted = name.rpartition(":")
    if not colon or not where or not wanted:
        close = difflib.get_close_matches(name, BUILT_IN, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(BUILT_IN)}, and your own: FILE.py:NAME"
        raise ConfigError(f"there is no tool {name!r}; {hint}")
    found = getattr(user_module(where, owner="tool"), wanted, None)
    if isinstance(found, Tools):
        return found
    if isinstance(found, list | tuple):
        return Tools(found)
    if callable(found):
        return Tools([found])
    raise ConfigError(f"{where} has no tools {wanted!r}; define a function, a list of functions, or Tools of that name")
