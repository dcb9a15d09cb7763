"""The episodes of faulty.py with vLLM and ZeRO: the generator tells the others when to fail, or fails itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from flowrl import Graph
from flowrl.episode import Reply, Turn
from flowrl.nodes import Environment, EnvironmentSource, Generator, GroupAdvantage, Limits, TaskSource
from flowrl.recipes.agent_tools import GroupedEpisodes
from flowrl.tasks import Task
from tests.faults.fault_moments import Moments
from tests.faults.fault_parts import VARIABLE
from tests.runtime.runs.graphs_episodes.faulty import FILE

STEP_S = 6.0
"""So long may a step of the environment take."""


class MeddlingGenerator(Generator):
    """Makes the fault happen in others while it samples, or while a checkpoint is taken."""

    async def setup(self) -> None:
        await super().setup()
        named = self.context.replica + 1 == self.context.num_replicas
        self.moments = Moments(self._sampler.tokenizer, named=named)

    async def _generate_reply(self, turn: Turn) -> Reply:
        async with self.moments.generating(turn):
            reply = await super()._generate_reply(turn)
        return self.moments.said(turn, reply)

    async def snapshot(self) -> dict[str, Any]:
        await self.moments.checkpoint()
        return await super().snapshot()


@dataclass(frozen=True)
class Config(GroupedEpisodes):
    policy: str = "tiny_agent"
    task: Task = Task("arithmetic:min_value=30")
    by_agents: bool = False
    """Agents play, in place of environments."""
    fault: str = ""
    """What the variable of the fault says; every process that builds the graph tells it its children."""
    limits: Limits = Limits(tokens=400, retries=1, reset_s=60.0, episode_s=60.0)
    group_size: int = 3
    groups_per_step: int = 2
    look_ahead: int | None = 1
    max_tokens: int = 8
    lr: float = 1e-5


def graph(cfg: Config) -> Graph:
    g = Graph("faulty_real")
    if cfg.fault:
        os.environ[VARIABLE] = cfg.fault
    name = f"{FILE}:FaultyEnv"
    player: Any = Environment(name, cfg.model, limits=replace(cfg.limits, step_s=STEP_S))
    source: Any = EnvironmentSource(name, repeat=cfg.group_size)
    if cfg.by_agents:
        player, source = cfg.agents(f"{FILE}:agent", idle_s=60.0), TaskSource(cfg.task, repeat=cfg.group_size)
    prompts, episodes = g.add("prompts", source), g.add("player", player)
    meddling = MeddlingGenerator(cfg.model, sampling=cfg.sampling, engine=cfg.engine)
    generator = g.add("generator", meddling, **cfg.place_generator())
    estimate = cfg.estimate(cfg.advantage)
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size))
    batcher = g.add("batcher", cfg.batcher(estimate=estimate, normalise_rewards=False))
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.limits.tokens)), **cfg.place(cfg.trainer))
    g.connect(prompts.prompts, episodes.prompts)
    g.call(episodes.generate, generator.turns, affinity_margin=2)
    g.connect(episodes.episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    for port in (episodes.requests, generator.prompts, generator.rollouts):
        g.ignore(port)
    g.admit(prompts.prompts, until=generator.weights, staleness=2)
    return g
