"""Distillation on samples and on the data's answers, without a student's or a teacher's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.runs.stages import SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Out, Sample, Scored
from flowrl.models import Policy
from flowrl.nodes import GivenAnswers, PromptSource, TeacherAdvantage, TokenBatch
from flowrl.nodes.scoring.teacher import scored_by_teacher
from flowrl.tasks import Task


@dataclass(frozen=True)
class Given:
    policy: str = ""
    share: float = 0.5
    on_limit: Literal["wait", "mask"] = "wait"


class Rater(Node):
    rollouts: In[Sample]
    scored: Out[Scored]

    async def run(self) -> None:
        async for sample in self.rollouts:
            scored = scored_by_teacher(sample, np.zeros(sample.token_ids.size, np.float32))
            self.context.ledger.scored(scored)
            await self.scored.send(scored)


def graph(cfg: Given) -> Graph:
    task, policy = Task("arithmetic:max_value=5"), Policy(cfg.policy)
    g = Graph("given")
    prompts = g.add("prompts", PromptSource(task, policy, repeat=2))
    answers = g.add("answers", GivenAnswers(task, policy, share=cfg.share))
    generator = g.add("generator", SleepingGenerator(0.0, 16))
    rater = g.add("rater", Rater())
    advantage = g.add("advantage", TeacherAdvantage(size=2))
    batcher = g.add("batcher", TokenBatch(4, token_budget=4096))
    trainer = g.add("trainer", SleepingTrainer(0.0))
    g.connect(prompts.prompts, answers.prompts)
    g.connect(answers.others, generator.prompts)
    g.connect(answers.rollouts, rater.rollouts)
    g.connect(generator.samples, rater.rollouts)
    g.connect(rater.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=1, on_limit=cfg.on_limit)
    return g
