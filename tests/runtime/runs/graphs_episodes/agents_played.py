"""Agents' programs in a run of one process: the real node with its endpoint, and a generator that computes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl import Graph
from flowrl.messages import Prompt
from flowrl.models import Policy
from flowrl.nodes import AgentProgram, Evaluation, GroupAdvantage, Limits, TaskSource, TokenBatch
from flowrl.tasks import Row, Task
from flowrl.training.advantages import Estimate
from tests.agents import agent_programs
from tests.runtime.runs.graphs_episodes.played import Meddler, Speaker, Training

FILE = str(Path(agent_programs.__file__))
HELD = 6
"""Programs that are held: those of two groups."""


class HeldSource(TaskSource):
    """Has the programs held that follow those of the first step: of two groups."""

    begun = 0

    def group(self, row: Row, epoch: int) -> list[Prompt]:
        self.begun += 1
        held = {"held": self.begun in (3, 4)}
        return [replace(prompt, columns={**prompt.columns, **held}) for prompt in super().group(row, epoch)]


class TrainsInTheMiddle(Training):
    """Ends its first step, which a checkpoint follows, when HELD programs wait in their middle."""

    async def publish(self, version: int) -> None:
        if version == 1:
            await agent_programs.seen(Path(os.environ[agent_programs.MARKS]), "held-*", HELD)
        await super().publish(version)


@dataclass(frozen=True)
class Config:
    agent: str = "answers"
    """A function of tests/agents/agent_programs.py, or "outside"."""
    port: int = 0
    idle_s: float = 600.0
    retries: int = 2
    group_size: int = 3
    groups_per_step: int = 2
    staleness: int = 2
    most_turns: int = 32
    meddle: bool = False
    evaluate: int = 0
    credit: str = "episode"
    in_the_middle: bool = False
    """Programs call `until_a_checkpoint`."""


def graph(cfg: Config) -> Graph:
    g = Graph("agents_played")
    task = Task("arithmetic")
    limits = Limits(tokens=400, retries=cfg.retries, turns=cfg.most_turns)
    source = g.add("prompts", (HeldSource if cfg.in_the_middle else TaskSource)(task, repeat=cfg.group_size))
    agent = cfg.agent if cfg.agent == "outside" else f"{FILE}:{cfg.agent}"
    player = AgentProgram(Policy("tiny"), agent=agent, limits=limits, processes=8, port=cfg.port, idle_s=cfg.idle_s)
    agents = g.add("agents", player)
    speaker = g.add("generator", Speaker())
    estimate = Estimate(credit=cfg.credit)  # type: ignore[arg-type]
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", TrainsInTheMiddle(0.05) if cfg.in_the_middle else Training(0.05))
    g.connect(source.prompts, agents.prompts)
    g.call(agents.generate, speaker.turns, affinity_margin=2)
    if cfg.meddle:
        meddler = g.add("meddler", Meddler())
        g.connect(agents.episodes, meddler.episodes)
        g.connect(meddler.out, advantage.scored)
    else:
        g.connect(agents.episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, speaker.weights)
    g.admit(source.prompts, until=speaker.weights, staleness=cfg.staleness)
    if cfg.evaluate:
        held_out = Evaluation((), Policy("tiny"), num_prompts=cfg.evaluate, agent_tasks=(task,))
        g.call(g.add("evaluation", held_out).play, agents.requests)
    return g
