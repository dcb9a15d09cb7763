"""Environments: what a policy plays in turns. `Env` is the protocol; `Episodes` plays an environment by its name."""

from flowrl.environments.environment_row import EnvironmentName, EnvironmentRow, EnvironmentRows, environment_rows
from flowrl.environments.episodes import Episodes
from flowrl.environments.open_episode import CAUSES, RESUME_CAUSES, Cause, EnvironmentFailed, OpenEpisode, ZygoteFailed
from flowrl.environments.protocol import Action, Env, MalformedValue, Observation, Step, ToolCall

__all__ = [
    "CAUSES",
    "RESUME_CAUSES",
    "Action",
    "Cause",
    "Env",
    "EnvironmentFailed",
    "EnvironmentName",
    "EnvironmentRow",
    "EnvironmentRows",
    "Episodes",
    "MalformedValue",
    "Observation",
    "OpenEpisode",
    "Step",
    "ToolCall",
    "ZygoteFailed",
    "environment_rows",
]
