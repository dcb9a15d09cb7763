"""How an agent's program is named: a function of a file, an environment of verifiers, or a command line."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from flowrl.environments import EnvironmentName
from flowrl.errors import ConfigError

HOST = "flowrl.agents.programs.agent_envs"
"""Module of the environments that run programs."""
VERIFIERS = "verifiers/"


@dataclass(frozen=True)
class ProgramName:
    """`agents/FILE.py:function` or `verifiers/PACKAGE`, or a command line.

    Raises ConfigError unless it is exactly one of them.
    """

    function: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        if bool(self.function) == bool(self.command):
            raise ConfigError("an agent is a function of a file or a command; give one of them")
        if self.is_environment:
            return
        if self.function:
            self._check_function()
        else:
            _check_command(self.command)

    def _check_function(self) -> None:
        file, _, name = self.function.rpartition(":")
        if not file or not name.isidentifier() or set(self.function) & set(",=\"'"):
            raise ConfigError(f"the agent {self.function!r} names no function; write FILE.py:FUNCTION")

    @property
    def is_environment(self) -> bool:
        """Whether the program is an environment of verifiers, which asks the policy itself."""
        return is_of_verifiers(self.function)

    @property
    def text(self) -> str:
        """As the user wrote it."""
        return self.function or self.command

    @property
    def environment(self) -> str:
        """The name of the environment that runs the program."""
        if self.is_environment:
            return self.function
        return f"{HOST}:FunctionAgent:function={self.function}" if self.function else f"{HOST}:CommandAgent"


def is_of_verifiers(name: str) -> bool:
    """Whether `name` names an environment of verifiers, and not a function of a file in a folder of that name."""
    return name.startswith(VERIFIERS) and EnvironmentName(name).adapter + "/" == VERIFIERS


def _check_command(command: str) -> None:
    try:
        found = shlex.split(command)
    except ValueError as problem:
        raise ConfigError(f"the agent's command {command!r} cannot be split into words: {problem}") from None
    if not found:
        raise ConfigError(f"the agent's command {command!r} has no words; write a program and its arguments")
