"""An HTTP endpoint for agent code, in front of a backend that samples. `nodes.agent_program` uses it in graphs."""

from flowrl.agents.endpoint.agent_endpoint import AgentEndpoint
from flowrl.agents.endpoint.backend import (
    Backend,
    Busy,
    FinishedSession,
    LimitReached,
    RunEnded,
    SampledAnswer,
    Sessions,
    SessionTask,
    Unavailable,
)
from flowrl.agents.endpoint.endpoint_settings import EndpointSettings
from flowrl.agents.endpoint.sessions_over_http import SessionAccess

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
