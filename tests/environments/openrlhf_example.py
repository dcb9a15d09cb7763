"""An agent's file as the package's own examples are: tensors, markup in the feedback, states by their older names."""

from __future__ import annotations

import random
from typing import Any

import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turn, self.most = 0, random.randint(1, 3)

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        assert states["prompt"] == states["observation"] and isinstance(states["label"], str)
        self.prompt = states["prompt"]
        return {"observation": states["prompt"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        assert states["prompt"] == self.prompt and states["observation"] == states["observation_text"]
        assert states["action"] == states["action_text"]
        assert kwargs["sampling_params"] is None is states["sampling_params"]
        print("turn", self.turn, "of", self.most)
        done = self.turn >= self.most
        score = torch.randint(0, 2, (1,)).float() if done else torch.tensor(0)
        self.turn += 1
        images = {"environment_images": [object()]} if states["action"] == "a screenshot" else {}
        return images | {
            "rewards": score,
            "scores": score,
            "environment_feedback": "[END]</s>" if done else f"[ON] after {states['observation_text']}</s>",
            "done": torch.tensor(done),
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"dummy_scores": score, "turns": torch.tensor([1.0, 2.0])},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps: int, max_length: int, llm_engine: Any, result_queue: Any) -> None:
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, result_queue)
