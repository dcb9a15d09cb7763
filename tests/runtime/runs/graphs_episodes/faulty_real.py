"""The episodes of faulty.py with vLLM and ZeRO: the generator tells the others when to fail, or fails itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from flowrl import Graph
from flowrl.messages.episode import Reply, Turn
from flowrl.nodes import Environment, EnvironmentSource, Generator, GroupAdvantage, Limits, TaskSource
from flowrl.options import (
    EnvironmentOptions,
    EpisodeConfig,
    EpisodeData,
    EpisodeSteps,
    PolicyOptions,
    ReplySampling,
    TrainerOptions,
    make_batcher,
    make_trainer,
)
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
class Config(EpisodeConfig):
    policy: PolicyOptions = PolicyOptions("tiny_agent")
    data: EpisodeData = EpisodeData(Task("arithmetic:min_value=30"))
    sampling: ReplySampling = ReplySampling(max_tokens=8, group_size=3)
    steps: EpisodeSteps = EpisodeSteps(groups_per_step=2, look_ahead=1)
    episodes: EnvironmentOptions = EnvironmentOptions(Limits(tokens=400, retries=1, reset_s=60.0, episode_s=60.0))
    trainer: TrainerOptions = TrainerOptions(lr=1e-5)
    by_agents: bool = False
    """Agents play, in place of environments."""
    fault: str = ""
    """What the variable of the fault says; every process that builds the graph tells it its children."""


def graph(cfg: Config) -> Graph:
    g = Graph("faulty_real")
    if cfg.fault:
        os.environ[VARIABLE] = cfg.fault
    name = f"{FILE}:FaultyEnv"
    player: Any = Environment(name, cfg.model, limits=replace(cfg.episodes.limits, step_s=STEP_S))
    size, sampling = cfg.sampling.group_size, cfg.sampling.build(cfg.generator.stop_strings)
    source: Any = EnvironmentSource(name, repeat=size)
    if cfg.by_agents:
        player = cfg.episodes.build_agents(cfg, agent=f"{FILE}:agent", idle_s=60.0)
        source = TaskSource(cfg.data.task, repeat=size)
    prompts, episodes = g.add("prompts", source), g.add("player", player)
    meddling = MeddlingGenerator(cfg.model, sampling=sampling, engine=cfg.generator.engine)
    generator = g.add("generator", meddling, **cfg.place_generator())
    advantage = g.add("advantage", GroupAdvantage(cfg.estimate, size=size))
    batcher = g.add("batcher", make_batcher(cfg, estimate=cfg.estimate))
    objective = cfg.loss.build(cfg.episodes.limits.tokens)
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
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
