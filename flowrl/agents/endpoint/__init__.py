"""An HTTP endpoint for agent code, in front of a backend that samples. `nodes.agent_program` uses it in graphs."""

from flowrl.agents.endpoint.agent_endpoint import AgentEndpoint, SessionAccess
from flowrl.agents.endpoint.backend import (
    Backend,
    Busy,
    EndpointSettings,
    FinishedSession,
    LimitReached,
    RunEnded,
    SampledAnswer,
    Sessions,
    SessionTask,
    Unavailable,
)

__all__ = [
    "AgentEndpoint",
    "Backend",
    "Busy",
    "EndpointSettings",
    "FinishedSession",
    "LimitReached",
    "RunEnded",
    "SampledAnswer",
    "SessionAccess",
    "SessionTask",
    "Sessions",
    "Unavailable",
]
