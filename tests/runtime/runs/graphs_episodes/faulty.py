"""Episodes whose environments, tools or agents fail at a moment, which the generator, a stand-in, tells them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl import Graph
from flowrl.graph.node import Facts
from flowrl.messages.episode import Reply, Turn
from flowrl.models import Policy
from flowrl.models.tokens.characters import tool_tokenizer
from flowrl.nodes import AgentProgram, Environment, EnvironmentSource, GroupAdvantage, Limits, TaskSource, TokenBatch
from flowrl.tasks import Task
from tests.faults import fault_parts
from tests.faults.fault_moments import Moments
from tests.faults.fault_parts import VARIABLE
from tests.runtime.runs.graphs_episodes.played import Speaker, Training

FILE = str(Path(fault_parts.__file__))


class Meddling(Speaker):
    """Makes the fault happen in others while it samples, or while a checkpoint is taken."""

    cpus = 1

    def facts(self) -> Facts:
        return Facts(stands_in=True)

    async def setup(self) -> None:
        self.tokenizer = tool_tokenizer()
        self.moments = Moments(self.tokenizer, named=self.context.replica + 1 == self.context.num_replicas)

    async def answer(self, turn: Turn) -> Reply:
        async with self.moments.generating(turn):
            reply = await super().answer(turn)
        return self.moments.said(turn, reply)

    async def snapshot(self) -> dict[str, Any]:
        """A checkpoint is being taken."""
        await self.moments.checkpoint()
        return {}

    async def resume(self) -> None:
        """The checkpoint is taken."""


@dataclass(frozen=True)
class Config:
    agents: bool = False
    generators: int = 1
    generator_cpus: float = 0.0
    """Cores of each; 0: all together have one."""
    group_size: int = 3
    groups_per_step: int = 2
    retries: int = 1
    reset_s: float = 8.0
    step_s: float = 2.0
    fault: str = ""
    """What the variable of the fault says; every process that builds the graph tells it its children."""


def graph(cfg: Config) -> Graph:
    g = Graph("faulty")
    if cfg.fault:
        os.environ[VARIABLE] = cfg.fault
    limits = Limits(tokens=400, retries=cfg.retries, reset_s=cfg.reset_s)
    task, name = Task("arithmetic:min_value=30"), f"{FILE}:FaultyEnv"
    policy = Policy("tiny_agent", task=task)
    player: Environment | AgentProgram
    if cfg.agents:
        source: Any = TaskSource(task, repeat=cfg.group_size)
        limits = replace(limits, episode_s=cfg.step_s + 3)
        player = AgentProgram(policy, agent=f"{FILE}:agent", limits=limits, processes=8, idle_s=60.0)
    else:
        source = EnvironmentSource(name, repeat=cfg.group_size)
        player = Environment(name, policy, limits=replace(limits, step_s=cfg.step_s))
    prompts = g.add("prompts", source)
    episodes = g.add("player", player)
    speaker = g.add("generator", Meddling(), replicas=cfg.generators, cpus=cfg.generator_cpus or 1 / cfg.generators)
    advantage = g.add("advantage", GroupAdvantage(size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(0.05))
    g.connect(prompts.prompts, episodes.prompts)
    g.call(episodes.generate, speaker.turns, affinity_margin=2)
    g.connect(episodes.episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, speaker.weights)
    g.admit(prompts.prompts, until=speaker.weights, staleness=2)
    return g
