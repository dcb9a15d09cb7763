"""GRPO without a model: a prompt's samples pass with the probability that its row has as `skill`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.runs.stages import PROMPT_TOKENS, SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Out, Prompt, Sample, Scored
from flowrl.graph.node import Facts
from flowrl.nodes import Curriculum, DynamicSampling, GroupAdvantage, TokenBatch
from flowrl.nodes.sources.row_source import RowSource


@dataclass(frozen=True)
class Skill:
    prompt_id: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class Skills:
    curriculum: Curriculum = field(default_factory=Curriculum)
    skills: tuple[float, ...] = (0.0, 1.0, 0.5, 0.05) * 10
    dynamic: bool = True
    group_size: int = 8
    staleness: int = 1
    num_rows: int | None = None


class SkillSource(RowSource):
    def __init__(self, cfg: Skills) -> None:
        super().__init__(
            repeat=cfg.group_size, epochs=None, seed=None, part="all", num_prompts=None, curriculum=cfg.curriculum
        )
        self.skills = cfg.skills[: cfg.num_rows]

    def facts(self) -> Facts:
        return dataclasses.replace(super().facts(), longest_prompt=PROMPT_TOKENS)

    def rows(self) -> Sequence[Skill]:
        return [Skill(f"p{number}", {"skill": skill}) for number, skill in enumerate(self.skills)]

    def group(self, row: Skill, epoch: int) -> list[Prompt]:
        ids = np.zeros(PROMPT_TOKENS, np.int32)
        return self.make_members(row.prompt_id, epoch, text="", token_ids=ids, columns=row.columns)


class Coin(Node):
    rollouts: In[Sample]
    scored: Out[Scored]

    async def run(self) -> None:
        async for sample in self.rollouts:
            skill = self.skills[int(sample.prompt_id[1:])]
            reward = float(random.Random(sample.sample_id).random() < skill)
            values = {one.name: getattr(sample, one.name) for one in dataclasses.fields(Sample)}
            scored = Scored(**values, reward=reward, raw_reward=reward)
            self.context.ledger.scored(scored)
            await self.scored.send(scored)

    def __init__(self, skills: tuple[float, ...]) -> None:
        self.skills = skills


def graph(cfg: Skills) -> Graph:
    g = Graph("skills")
    source = g.add("prompts", SkillSource(cfg))
    generator = g.add("generator", SleepingGenerator(0.0, 64))
    coin = g.add("reward", Coin(cfg.skills))
    dynamic = DynamicSampling(4) if cfg.dynamic else None
    advantage = g.add("advantage", GroupAdvantage(size=cfg.group_size, dynamic=dynamic))
    batcher = g.add("batcher", TokenBatch(4, token_budget=4096))
    trainer = g.add("trainer", SleepingTrainer(0.0))
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, coin.rollouts)
    g.connect(coin.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.curriculum.used:
        g.call(advantage.outcomes, source.outcomes)
    g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness)
    return g
