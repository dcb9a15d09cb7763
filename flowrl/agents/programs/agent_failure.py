"""Why an attempt of an agent's program is void, in one word each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from flowrl.agents.programs.program_name import ProgramName
from flowrl.environments import EnvironmentFailed
from flowrl.errors import AttemptFailed

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
