"""Environments by their names: what a name says, the class or adapter that it finds, and the rows of a task that is
played rather than answered. What is wrong with a name is said before anything starts.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flowrl.environments.protocol import Env
from flowrl.errors import ConfigError
from flowrl.tasks.rows import digest, is_held_out
from flowrl.tasks.task_syntax import parse_options, split_name
from flowrl.tasks.user_code import load_user_module, one_line, refuse_exit

DEFAULT_ROWS = 5120
"""Rows of an environment, held-out ones included."""


@dataclass(frozen=True)
class EnvironmentName:
    """`gymnasium/FrozenLake-v1:is_slippery=False`, `tools/arithmetic:tools=calculator`, `file.py:Class:size=4`.

    A class of a package is `package.module:Class:size=4`. Raises ConfigError if the text names nothing. Names of gem
    and addresses contain colons: in these, options begin at the first `:key=`.
    """

    text: str

    def __post_init__(self) -> None:
        if not self.adapter and not (self.place.partition(":")[0] and self.place.partition(":")[2].isidentifier()):
            raise ConfigError(
                f"environment {self.text!r} names no class; write gymnasium/NAME (or {', '.join(ADAPTERS)}), "
                "file.py:Class or package.module:Class, then options as :key=value,key=value"
            )
        try:
            json.dumps(self.options)
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                f"environment {self.text!r}: {problem}; options are numbers, texts, and lists or mappings of such"
            ) from None

    @property
    def adapter(self) -> str:
        """ "gymnasium" for `gymnasium/FrozenLake-v1`; "" for a class of the user's own, such as
        `tools/file.py:Class`."""
        package, slash, _ = self.text.partition("/")
        if not slash or package not in ADAPTERS:
            return ""
        source, rest = split_name(self.text)
        of_a_file = source.endswith(".py")
        own = of_a_file and (package not in PLAYS_FILES or split_name(rest)[0].isidentifier())
        return "" if own else package

    @property
    def place(self) -> str:
        """The name without options: `FrozenLake-v1` for an adapter, else `file.py:Class`."""
        if self.adapter:
            return self._split[0].removeprefix(f"{self.adapter}/")
        source, rest = split_name(self.text)
        return f"{source}:{split_name(rest)[0]}" if rest else source

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the name; values are Python literals where they parse as such, else text."""
        rest = self._split[1] if self.adapter else split_name(split_name(self.text)[1])[1]
        return parse_options(f"environment {self.text!r}", rest)

    @property
    def _split(self) -> tuple[str, str]:
        """An adapter's name, and the text of its options."""
        if self.adapter not in WITH_COLONS:
            return split_name(self.text)
        first = OPTIONS.search(self.text)
        return (self.text[: first.start()], self.text[first.end() :]) if first else (self.text, "")


ADAPTERS: Mapping[str, str] = {
    "gem": "adapters.gem_env:GemEnv",
    "gymnasium": "adapters.gymnasium_env:GymnasiumEnv",
    "openenv": "adapters.openenv_env:OpenenvEnv",
    "openrlhf": "adapters.openrlhf_env:OpenrlhfEnv",
    "reasoning_gym": "adapters.reasoning_env:ReasoningEnv",
    "skyrl_gym": "adapters.skyrl_env:SkyrlEnv",
    "textarena": "adapters.textarena_env:TextarenaEnv",
    "tools": "tool_env:ToolEnv",
    "verifiers": "adapters.verifiers_env:VerifiersEnv",
}
"""Adapter -> the class that plays its environments. Names are `PACKAGE/NAME`, `tools/TASK` for tasks with tools,
`openrlhf/FILE.py` for a file, and `openenv/URL` for a server. The class has `maker(name)`, which returns a function
that makes an environment."""
PLAYS_FILES = ("openrlhf", "verifiers")
"""Adapters whose name may be a file, `openrlhf/FILE.py`."""
COOPERATIVE = ("openenv",)
"""Adapters whose environments are cooperative: they wait for a server, and import no package."""
WITH_COLONS = ("gem", "openenv")
"""Adapters whose names may have colons: `gem/game:Wordle-v0`."""
OPTIONS = re.compile(r":(?=[A-Za-z_]\w*=)")


@dataclass(frozen=True)
class EnvironmentRow:
    """Where an episode starts. All members of a group get the same row."""

    name: str
    """The environment's name, without options."""
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def task(self) -> Mapping[str, Any]:
        """What `Env.reset` is given."""
        return {"name": self.name, "options": dict(self.options), "seed": self.seed}

    @cached_property
    def prompt_id(self) -> str:
        """A hash of name, options and seed, as 16 hex digits."""
        return digest(self.task)

    @property
    def held_out(self) -> bool:
        """Whether the row belongs to the held-out part: one row in eight, by its id."""
        return is_held_out(self.prompt_id)


@dataclass(frozen=True)
class EnvironmentRows:
    """The two disjoint parts of an environment's rows, in the order of their seeds."""

    train: tuple[EnvironmentRow, ...]
    held_out: tuple[EnvironmentRow, ...]

    @property
    def all(self) -> tuple[EnvironmentRow, ...]:
        """Both parts."""
        return (*self.train, *self.held_out)


def environment_rows(text: str, *, number: int = DEFAULT_ROWS) -> EnvironmentRows:
    """`number` rows of the environment of that name, with seeds that count from 0."""
    name = EnvironmentName(text)
    source = f"{name.adapter}/{name.place}" if name.adapter else name.place
    options = name.options
    rows = [EnvironmentRow(source, options, seed) for seed in range(number)]
    return EnvironmentRows(tuple(row for row in rows if not row.held_out), tuple(row for row in rows if row.held_out))


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
            if hides := _file_of(missing):
                raise ConfigError(
                    f"environment {name.text!r}: {hides} hides the package {missing}, which {distribution} imports; "
                    "rename it, or move it to another directory"
                ) from None
            needs = distribution if missing == module.partition(".")[0] else missing
            raise ConfigError(
                f"environment {name.text!r} needs the package {needs}; {install_remedy(needs, of=distribution)}"
            ) from None
        except Exception as problem:  # the boundary to the package's import
            raise ConfigError(f"{package} does not import: {one_line(problem)}") from None


def _file_of(module: str) -> str | None:
    """The file that an import of `module` takes for it and that is no package; None if there is none."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec
        return None
    return None if found is None or found.submodule_search_locations is not None else found.origin


def install_remedy(package: str, *, of: str) -> str:
    """How to install a package that the distribution `of` needs: plain pip might replace packages that flowrl needs."""
    pinned = {canonical_name(line.partition("==")[0]) for line in PINS.read_text(encoding="utf-8").splitlines()}
    known = {canonical_name(package), canonical_name(of)} & pinned
    return "flowrl setup environments" if known else f"pip install {package}"


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
    """Import what the name needs. Raises ConfigError. Only `made` checks an adapter's options."""
    name = EnvironmentName(text)
    if name.adapter:
        return find_adapter(name)
    kind = _own_class(name)
    _check_options(name, kind)
    return FoundEnvironment(
        text, kind, lambda: kind(**name.options), before_fork=lambda: kind.before_fork(**name.options)
    )


def find_adapter(name: EnvironmentName) -> FoundEnvironment:
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
