"""Environments by their names, and the rows of a task that is played rather than answered. What is wrong with a name
is said before anything starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.rows import digest, is_held_out
from flowrl.tasks.task_syntax import parse_options, split_name

DEFAULT_ROWS = 5120
"""Rows of an environment, held-out ones included."""


@dataclass(frozen=True)
class EnvironmentName:
    """`gymnasium/FrozenLake-v1:is_slippery=False`, `tools/arithmetic:tools=calculator`, `file.py:Class:size=4`.

    A class of a package is `package.module:Class:size=4`. Raises ConfigError if the text names nothing. Names of gem
    and addresses contain colons: in these, options begin at the first `:key=`.
    """

    text: str
    adapter: str = field(init=False, compare=False)
    """ "gymnasium" for `gymnasium/FrozenLake-v1`; "" for a class of the user's own, such as `tools/file.py:Class`."""
    place: str = field(init=False, compare=False)
    """The name without options: `FrozenLake-v1` for an adapter, else `file.py:Class`."""
    options: Mapping[str, Any] = field(init=False, compare=False)
    """The options of the name; values are Python literals where they parse as such, else text."""

    def __post_init__(self) -> None:
        package, slash, _ = self.text.partition("/")
        source, rest = split_name(self.text)
        of_user = source.endswith(".py") and (package not in PLAYS_FILES or split_name(rest)[0].isidentifier())
        adapter = package if slash and package in ADAPTERS and not of_user else ""
        if adapter:
            first = OPTIONS.search(self.text) if adapter in WITH_COLONS else None
            if first:
                source, rest = self.text[: first.start()], self.text[first.end() :]
            elif adapter in WITH_COLONS:
                source, rest = self.text, ""
            place = source.removeprefix(f"{adapter}/")
        else:
            wanted, rest = split_name(rest)
            place = f"{source}:{wanted}" if wanted else source
            if not source or not wanted.isidentifier():
                raise ConfigError(
                    f"environment {self.text!r} names no class; write gymnasium/NAME (or {', '.join(ADAPTERS)}), "
                    "file.py:Class or package.module:Class, then options as :key=value,key=value"
                )
        options = parse_options(f"environment {self.text!r}", rest)
        try:
            json.dumps(options)
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                f"environment {self.text!r}: {problem}; options are numbers, texts, and lists or mappings of such"
            ) from None
        vars(self).update(adapter=adapter, place=place, options=options)


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
`openrlhf/FILE.py` for a file, and `openenv/URL` for a server. The class has `load_maker(name)`, which returns a
function that makes an environment."""
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
