"""Finds an environment by its name, and says what is wrong with a name before anything starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowrl.environments.environment_row import ADAPTERS, EnvironmentName
from flowrl.environments.protocol import Env
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import load_user_module, one_line


@dataclass(frozen=True)
class FoundEnvironment:
    """An environment's class, with the options of its name."""

    text: str
    """The name, as the user wrote it."""
    kind: type[Env]
    make: Callable[[], Env]
    """Makes the object for one episode. May raise anything: it runs code of the environment's package."""

    before_fork: Callable[[], None] = lambda: None
    """Loads what the processes of episodes share. May raise anything."""

    def made(self) -> Env:
        """The result of `make`. Raises ConfigError for whatever `make` raises, as a mistake of the user."""
        try:
            return self.make()
        except ConfigError:
            raise
        except Exception as problem:  # the boundary to the environment's code
            raise ConfigError(f"environment {self.text!r} cannot be made: {one_line(problem)}") from None


def find_environment(text: str) -> FoundEnvironment:
    """Import what the name needs. Raises ConfigError. Only `made` checks an adapter's options."""
    name = EnvironmentName(text)
    if name.adapter:
        return _adapted(name)
    kind = _own_class(name)
    _check_options(name, kind)
    return FoundEnvironment(
        text, kind, lambda: kind(**name.options), before_fork=lambda: kind.before_fork(**name.options)
    )


def _adapted(name: EnvironmentName) -> FoundEnvironment:
    """Imports only the adapter that is named: most adapters import a package."""
    module, _, wanted = ADAPTERS[name.adapter].partition(":")
    kind: Any = getattr(importlib.import_module(f"flowrl.environments.{module}"), wanted)
    return FoundEnvironment(name.text, kind, kind.maker(name))


def _own_class(name: EnvironmentName) -> type[Env]:
    where, _, wanted = name.place.rpartition(":")
    module = load_user_module(where, owner="environment")
    kind = getattr(module, wanted, None)
    if isinstance(kind, type) and issubclass(kind, Env) and kind is not Env:
        _check_methods(name, kind)
        return kind
    if kind is not None:
        raise ConfigError(f"{wanted} of {where} is no environment; derive the class from flowrl.environments.Env")
    known = sorted(n for n, one in vars(module).items() if _is_env(one) and one.__module__ == module.__name__)
    raise ConfigError(f"{where} has no class {wanted!r}; its environments are {', '.join(known) or 'none'}")


def _check_methods(name: EnvironmentName, kind: type[Env]) -> None:
    for method in ("reset", "step"):
        if getattr(kind, method) is getattr(Env, method):
            raise ConfigError(f"environment {name.text!r}: {kind.__name__} has no method {method}; define it")
    for method in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(kind, method)):
            raise ConfigError(f"environment {name.text!r}: {kind.__name__}.{method} is not async; write async def")


def _is_env(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Env)


def _check_options(name: EnvironmentName, kind: type[Env]) -> None:
    """Options are keyword arguments of the class."""
    parameters = inspect.signature(kind).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in name.options:
        if key not in parameters:
            close = difflib.get_close_matches(key, parameters, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(parameters) or 'none'}"
            raise ConfigError(f"environment {name.text!r}: {kind.__name__} has no option {key!r}{hint}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in name.options]
    if missing:
        raise ConfigError(f"environment {name.text!r}: {kind.__name__} needs the option {', '.join(missing)}")
