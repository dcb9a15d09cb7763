"""The class that an environment's name finds: one of the user's own, or that of the adapter that plays a package's
environments; and the import of such packages. Every mistake is a ConfigError.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.environments.environment_row import ADAPTERS, EnvironmentName
from flowrl.environments.protocol import Env
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import load_user_module, one_line, refuse_exit

PINS = Path(__file__).parents[2] / "requirements" / "environments.txt"
"""What `flowrl setup environments` installs."""


def import_package(name: EnvironmentName, module: str, *, distribution: str) -> Any:
    """The module, untyped; `distribution` is what pip calls its package. Raises ConfigError if it does not import."""
    package = f"environment {name.text!r}: the package {distribution}"
    with refuse_exit(package):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as problem:
            missing = (problem.name or module).partition(".")[0]
            if hides := find_hiding_file(missing):
                raise ConfigError(
                    f"environment {name.text!r}: {hides} hides the package {missing}, which {distribution} imports; "
                    "rename it, or move it to another directory"
                ) from None
            needs = distribution if missing == module.partition(".")[0] else missing
            # Plain pip might replace packages that flowrl needs, so what is pinned comes by flowrl's own command.
            pins = PINS.read_text(encoding="utf-8").splitlines()
            pinned = {canonical_name(line.partition("==")[0]) for line in pins}
            known = {canonical_name(needs), canonical_name(distribution)} & pinned
            remedy = "flowrl setup environments" if known else f"pip install {needs}"
            raise ConfigError(f"environment {name.text!r} needs the package {needs}; {remedy}") from None
        except Exception as problem:  # the boundary to the package's import
            raise ConfigError(f"{package} does not import: {one_line(problem)}") from None


def find_hiding_file(module: str) -> str | None:
    """The file that an import of `module` takes for it and that is no package; None if there is none."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec
        return None
    return None if found is None or found.submodule_search_locations is not None else found.origin


def canonical_name(distribution: str) -> str:
    """The canonical spelling of a distribution's name, for which pip accepts several."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def close_names(wanted: str, known: list[str]) -> str:
    """The end of a sentence which says that `wanted` is not among the package's names."""
    close = difflib.get_close_matches(wanted, known, 3)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known[:8])}, and others"


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

    def make_environment(self) -> Env:
        """The result of `make`. Raises ConfigError for whatever `make` raises, as a mistake of the user."""
        try:
            return self.make()
        except ConfigError:
            raise
        except Exception as problem:  # the boundary to the environment's code
            raise ConfigError(f"environment {self.text!r} cannot be made: {one_line(problem)}") from None


def find_environment(text: str) -> FoundEnvironment:
    """Import what the name needs. Raises ConfigError. Only `make_environment` checks an adapter's options."""
    name = EnvironmentName(text)
    if name.adapter:  # only the one that is named is imported: most import a package
        module, _, wanted = ADAPTERS[name.adapter].partition(":")
        adapter: Any = getattr(importlib.import_module(f"flowrl.environments.{module}"), wanted)
        return FoundEnvironment(text, adapter, adapter.load_maker(name))
    kind = load_own_class(name)
    check_options(name, kind)
    return FoundEnvironment(
        text, kind, lambda: kind(**name.options), before_fork=lambda: kind.before_fork(**name.options)
    )


def load_own_class(name: EnvironmentName) -> type[Env]:
    """The user's class, which has what an environment needs."""
    where, _, wanted = name.place.rpartition(":")
    module = load_user_module(where, owner="environment")
    kind = getattr(module, wanted, None)
    if kind is None:
        classes = {key: one for key, one in vars(module).items() if isinstance(one, type) and issubclass(one, Env)}
        known = ", ".join(sorted(key for key, one in classes.items() if one.__module__ == module.__name__))
        raise ConfigError(f"{where} has no class {wanted!r}; its environments are {known or 'none'}")
    if not isinstance(kind, type) or not issubclass(kind, Env) or kind is Env:
        raise ConfigError(f"{wanted} of {where} is no environment; derive the class from flowrl.environments.Env")
    for method in ("reset", "step"):
        if getattr(kind, method) is getattr(Env, method):
            raise ConfigError(f"environment {name.text!r}: {kind.__name__} has no method {method}; define it")
    for method in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(kind, method)):
            raise ConfigError(f"environment {name.text!r}: {kind.__name__}.{method} is not async; write async def")
    return kind


def check_options(name: EnvironmentName, kind: type[Env]) -> None:
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
