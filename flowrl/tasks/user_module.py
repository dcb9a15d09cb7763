"""Imports modules that hold a user's reward function, environment or tools, by path or by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

from flowrl.errors import ConfigError
from flowrl.user_path import user_path


def user_module(where: str, *, owner: str) -> ModuleType:
    """The module at `file.py` or `package.module`. Raises ConfigError.

    `owner` is "reward", "environment", "tool" or "agent".
    """
    return _file_module(where, owner) if where.endswith(".py") else _package_module(where, owner)


def one_line(problem: BaseException) -> str:
    """Type and first line of an exception."""
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0]}" if text else type(problem).__name__


def _package_module(name: str, owner: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as problem:  # the boundary to the user's module
        raise ConfigError(f"the {owner}'s module {name!r} does not import: {one_line(problem)}") from None


@functools.lru_cache(maxsize=16)
def _file_module(name: str, owner: str) -> ModuleType:
    path = user_path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"the {owner}'s file {name} does not exist (looked for {path})")
    module_name = f"flowrl_{owner}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as problem:  # the boundary to the user's module
        raise ConfigError(f"the {owner}'s file {name} does not import: {one_line(problem)}") from None
    return module
