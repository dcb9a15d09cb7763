"""Imports modules that hold a user's reward function, environment or tools, by path or by name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Raise ConfigError if the code that is imported within calls sys.exit. `what` names it, as in "the reward's file
    r.py"."""
    try:
        yield
    except SystemExit as end:
        raise ConfigError(
            f"{what} calls sys.exit({end.code!r}) while it is imported; put what it does as a script under "
            "if __name__ == '__main__':"
        ) from None


@contextlib.contextmanager
def _importing(what: str) -> Iterator[None]:
    """Turn any exception of the user's module into a ConfigError."""
    with no_exit(what):
        try:
            yield
        except Exception as problem:  # the boundary to the user's module
            raise ConfigError(f"{what} does not import: {one_line(problem)}") from None


def _package_module(name: str, owner: str) -> ModuleType:
    with _importing(f"the {owner}'s module {name!r}"):
        return importlib.import_module(name)


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
    with _importing(f"the {owner}'s file {name}"):
        spec.loader.exec_module(module)
    return module
