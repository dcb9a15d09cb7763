"""Agents that are programs: how they are named, how they run in their own processes, and what they return."""

from flowrl.agents.programs.agent_failure import AGENT_CAUSES, AgentCause, AgentFailed, as_agents_failure
from flowrl.agents.programs.agent_result import AgentResult
from flowrl.agents.programs.program_name import ProgramName, is_of_verifiers

__all__ = [
    "AGENT_CAUSES",
    "AgentCause",
    "AgentFailed",
    "AgentResult",
    "ProgramName",
    "as_agents_failure",
    "is_of_verifiers",
]
