"""Finds tools by name: built-in ones, and a user's as `FILE.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from flowrl.environments.tools.calculator import calculator
from flowrl.environments.tools.collection import Tools
from flowrl.environments.tools.mcp_tools import McpServer
from flowrl.environments.tools.sandbox import PythonTool
from flowrl.environments.tools.tool_source import ToolSource
from flowrl.errors import ConfigError
from flowrl.tasks.task_syntax import parse_options
from flowrl.tasks.user_code import load_user_module

PLUS_OUTSIDE_QUOTES = re.compile(r"""\+(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")


def named_tools(text: str) -> Tools:
    """The tools of names that are joined by `+` outside quotes, as in `calculator+tools.py:search`. A user's name
    refers to a function, a `ToolSource`, a list of these, or `Tools`. Raises ConfigError."""
    return Tools([tool for name in PLUS_OUTSIDE_QUOTES.split(text) for tool in _named(name.strip())])


def _named(name: str) -> Tools:
    built_in, _, rest = name.partition(":")
    if built_in in BUILT_IN:
        return Tools([BUILT_IN[built_in](rest)])
    where, colon, wanted = name.rpartition(":")
    if not colon or not where or not wanted:
        close = difflib.get_close_matches(built_in, BUILT_IN, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(BUILT_IN)}, and your own: FILE.py:NAME"
        raise ConfigError(f"there is no tool {name!r}; {hint}")
    found = getattr(load_user_module(where, owner="tool"), wanted, None)
    if isinstance(found, Tools):
        return found
    if isinstance(found, list | tuple):
        return Tools(found)
    if callable(found) or isinstance(found, ToolSource):
        return Tools([found])
    raise ConfigError(f"{where} has no tools {wanted!r}; define a function, a list of functions, or Tools of that name")


def _calculator(rest: str) -> Callable[..., Any]:
    if rest:
        raise ConfigError(f"the tool calculator has no options, and {rest!r} follows its name; remove it")
    return calculator


def _python(rest: str) -> PythonTool:
    options, known = parse_options(f"tool 'python:{rest}'", rest), [field.name for field in fields(PythonTool)]
    for key in options:
        if key not in known:
            raise ConfigError(f"the tool python has no option {key!r}; it has {', '.join(known)}")
    return PythonTool(**options)


BUILT_IN: Mapping[str, Callable[[str], ToolSource | Callable[..., Any]]] = {
    "calculator": _calculator,
    "mcp": McpServer,
    "python": _python,
}
"""Name -> function that makes the tool from the text after the colon."""
