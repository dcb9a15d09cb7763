"""Agents that are programs: how they are named, what they return, and why an attempt of one is void.

`agent_envs` runs them, in processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from flowrl.environments import EnvironmentFailed, EnvironmentName
from flowrl.errors import AttemptFailed, ConfigError
from flowrl.messages.base import number_in

AGENT_ENVS = "flowrl.agents.agent_envs"
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
        file, _, name = self.function.rpartition(":")
        if self.function and (not file or not name.isidentifier() or set(self.function) & set(",=\"'")):
            raise ConfigError(f"the agent {self.function!r} names no function; write FILE.py:FUNCTION")
        try:
            words = shlex.split(self.command)
        except ValueError as problem:
            raise ConfigError(f"the agent's command {self.command!r} cannot be split into words: {problem}") from None
        if self.command and not words:
            raise ConfigError(f"the agent's command {self.command!r} has no words; write a program and its arguments")

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
        return f"{AGENT_ENVS}:FunctionAgent:function={self.function}" if self.function else f"{AGENT_ENVS}:CommandAgent"


def is_of_verifiers(name: str) -> bool:
    """Whether `name` names an environment of verifiers, and not a function of a file in a folder of that name."""
    return name.startswith(VERIFIERS) and EnvironmentName(name).adapter + "/" == VERIFIERS


AgentCause = Literal["agent_raised", "agent_died", "session_idle", "no_reward", "no_calls"]
AGENT_CAUSES: tuple[AgentCause, ...] = get_args(AgentCause)
CAUSE_OF: Mapping[str, AgentCause] = {
    "env_raised": "agent_raised",
    "env_unreachable": "agent_raised",
    "env_timed_out": "agent_died",
    "env_died": "agent_died",
    "env_out_of_memory": "agent_died",
    "env_malformed": "agent_died",
}
"""Cause of a failed environment process -> its name for an agent. `env_timed_out` occurs only at a start."""


class AgentFailed(AttemptFailed):
    """An agent's program failed."""

    def __init__(self, cause: AgentCause, text: str, *, event: str = "") -> None:
        super().__init__(cause, text, event=event)


@contextlib.contextmanager
def as_agents_failure(program: ProgramName) -> Iterator[None]:
    """Raises AgentFailed for an EnvironmentFailed of the process that runs `program`, except for RESUME_CAUSES."""
    try:
        yield
    except EnvironmentFailed as failed:
        if failed.cause not in CAUSE_OF:
            raise
        text = str(failed).replace(f"{program.environment}: ", "")
        cause, told = CAUSE_OF[failed.cause], f"the agent {program.text!r} failed: {text}"
        raise AgentFailed(cause, told, event=failed.event) from None


NEEDED = "it needs a finite number, or a dict of such with the key 'reward'"


@dataclass(frozen=True)
class AgentResult:
    reward: float | None = None
    """None if the program returned none; it may have posted one to its session."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, returned: object) -> AgentResult:
        """The result for a number, a mapping or None. Raises TypeError for all else, and for what is not finite."""
        if not isinstance(returned, Mapping):
            return cls(None if returned is None else check_finite("", returned))
        numbers = {str(name): check_finite(f"{name}=", value) for name, value in returned.items() if value is not None}
        return cls(numbers.pop("reward", None), numbers)

    @classmethod
    def of_line(cls, line: str) -> AgentResult:
        """The result on the last line that a program printed; none if that is no JSON of a result. A bare `true` is
        none: programs print it for other reasons, too."""
        try:
            found = json.loads(line)
            return cls() if isinstance(found, bool) else cls.of(found)
        except (ValueError, TypeError, RecursionError):
            return cls()

    @classmethod
    def unpacked(cls, text: str) -> AgentResult:
        """The result from the text that `packed` returned."""
        return cls(**json.loads(text))

    def packed(self) -> str:
        """The result as text, for `unpacked`."""
        return json.dumps({"reward": self.reward, "metrics": dict(self.metrics)})


def check_finite(what: str, value: object) -> float:
    number = number_in(value)
    if number is None or not math.isfinite(number):
        raise TypeError(f"the agent returned {what}{str(value)[:80]!r}; {NEEDED}")
    return number
