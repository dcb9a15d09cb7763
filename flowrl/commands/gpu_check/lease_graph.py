"""A real trainer, and in place of vLLM a node that takes 90% of the GPU while it has the lease; its samples are random.

For `flowrl gpu-check`; run by its path.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from flowrl.graph.graph import Graph
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Prompt, Sample, Weights
from flowrl.models import Policy
from flowrl.nodes import GroupAdvantage, PromptSource, Reward, TokenBatch, Trainer
from flowrl.tasks import Task
from flowrl.training.settings import Dtype, ZeroSettings

SHARE = 0.9
RESPONSE_TOKENS = 24
GROUPS, MEMBERS = 4, 4
BEHAVIOR_LOGPROB = -np.log(250.0)


@dataclass(frozen=True)
class Leased:
    policy: str = "tiny"
    gpus: int = 1
    """0: without a GPU; the nodes then time-share cores."""
    dtype: Dtype = "bfloat16"


class GreedyGenerator(Node):
    """Takes device memory in place of vLLM: from each acquisition of the lease until its release."""

    prompts: In[Prompt]
    rollouts: Out[Sample]
    weights: In[Weights]

    def __init__(self) -> None:
        self.version = -1
        self.ready = asyncio.Event()
        self.taken: Any = None

    def facts(self) -> Facts:
        return Facts(longest_response=RESPONSE_TOKENS, concurrency=GROUPS * MEMBERS)

    async def setup(self) -> None:
        await self.on_acquire()

    async def on_acquire(self) -> None:
        if self.context.gpus:
            await self.blocking(self.take)

    async def on_release(self) -> None:
        if self.context.gpus:
            await self.blocking(self.give_back)

    def take(self) -> None:
        """Fails if another process has more than a tenth of the device."""
        import torch

        whole = torch.cuda.mem_get_info()[1]
        self.taken = torch.ones(int(SHARE * whole), dtype=torch.uint8, device="cuda")

    def give_back(self) -> None:
        """Give back all device memory but that of the CUDA context."""
        import torch

        self.taken = None
        torch.cuda.empty_cache()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.follow())
            await self.ready.wait()
            await self.prompts.each(self.answer, concurrency=GROUPS * MEMBERS)
            self.rollouts.close()

    async def follow(self) -> None:
        async for manifest in self.weights:
            self.version = manifest.version
            self.ready.set()
            self.context.ledger.holds(f"{self.name}/{self.context.replica}", manifest.policy, manifest.version)

    async def answer(self, prompt: Prompt) -> None:
        sample = answered(prompt, self.version, f"{self.name}/{self.context.replica}")
        self.context.metric("tokens_generated", RESPONSE_TOKENS)
        self.context.ledger.generated(sample)
        await self.rollouts.send(sample)


def answered(prompt: Prompt, version: int, generator: str) -> Sample:
    """A response of random letters."""
    response = np.random.default_rng(prompt.seed).integers(70, 96, RESPONSE_TOKENS)
    num_prompt = len(prompt.token_ids)
    mask = np.arange(num_prompt + RESPONSE_TOKENS) >= num_prompt
    same = {one.name: getattr(prompt, one.name) for one in fields(Sample) if hasattr(prompt, one.name)}
    return Sample(
        **same
        | {
            "prompt_text": prompt.text,
            "response_text": "",
            "token_ids": np.concatenate([prompt.token_ids, response]).astype(np.int32),
            "policy_mask": mask,
            "behavior_logprobs": np.where(mask, BEHAVIOR_LOGPROB, 0.0).astype(np.float32),
            "versions": np.where(mask, version, -1).astype(np.int32),
            "prompt_tokens": num_prompt,
            "truncated": True,
            "generator": generator,
        }
    )


def noise(prompt: str, response: str, **columns: object) -> float:
    """A reward that differs within a group; there is nothing to learn."""
    noise.calls += 1  # type: ignore[attr-defined]
    return float(noise.calls % 3)  # type: ignore[attr-defined]


noise.calls = 0  # type: ignore[attr-defined]


def graph(cfg: Leased) -> Graph:
    g = Graph("leased")
    task, policy = Task("arithmetic"), Policy(cfg.policy)
    prompts = g.add("prompts", PromptSource(task, policy, repeat=MEMBERS))
    generator = g.add("generator", GreedyGenerator(), cpus=0.5, gpus=cfg.gpus)
    reward = g.add("reward", Reward(task, function=noise))
    advantage = g.add("advantage", GroupAdvantage("group_norm", size=MEMBERS))
    batcher = g.add("batcher", TokenBatch(GROUPS, token_budget=4096))
    zero = ZeroSettings(stage=2, dtype=cfg.dtype)
    trainer = g.add("trainer", Trainer(policy, zero=zero), cpus=0.5, gpus=cfg.gpus)
    g.time_share(generator, trainer)
    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=1)
    return g
