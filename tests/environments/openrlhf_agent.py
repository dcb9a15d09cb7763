"""An agent's file as OpenRLHF has them: it imports that package, which is not installed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Sampling:
    max_tokens = 7
    stop = "\n"


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.left = random.randint(2, 4)

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": f"{states['observation']} ({self.left} tries)"}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if states["action_text"] == "nothing":
            return {"rewards": 1.0}
        self.left -= 1
        right = states["action_text"] == states["label"]
        done = right or self.left == 0
        return {
            "rewards": np.float32(0.5 * right),
            "scores": float(right),
            "environment_feedback": "" if done else f"No, and {len(states['observation_text'])} characters were said.",
            "done": done,
            "sampling_params": Sampling(),
            "extra_logs": {"left": self.left, "note": "kept out"},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(AgentInstance)
