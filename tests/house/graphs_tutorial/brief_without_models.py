"""The tutorial's node and reward between stand-ins for generator and trainer, which take no time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from brief import BriefAdvantage, last_number  # type: ignore[import-not-found]  # the page's file, put there by the test

from benchmarks.runs.stages import PROMPT_TOKENS, Numbers, SleepingGenerator, SleepingTrainer, sampled
from flowrl import Graph, In, Node, Out, Prompt, Sample, SampleFailed, Scored
from flowrl.nodes import TokenBatch


@dataclass(frozen=True)
class Small:
    groups_per_step: int = 2
    group_size: int = 4
    failing: bool = False
    """The last member of every group fails before its reward."""


class Answering(SleepingGenerator):
    """Even members of a group answer rightly, with as many tokens as their number and one."""

    async def generate(self, prompt: Prompt) -> None:
        whole = sampled(prompt, self.version, f"{self.name}/{self.context.replica}")
        length = PROMPT_TOKENS + 1 + prompt.member
        names = ("token_ids", "policy_mask", "behavior_logprobs", "versions")
        short = replace(whole, **{name: np.copy(getattr(whole, name)[:length]) for name in names})
        text = "= 42" if prompt.member % 2 == 0 else "= 41"
        sample = replace(short, response_text=text)
        self.context.ledger.generated(sample)
        await self.samples.send(sample)


class Scoring(Node):
    """Scores with the page's function, and fails one member of each group, unless that is -1."""

    rollouts: In[Sample]
    scored: Out[Scored]

    def __init__(self, fails: int) -> None:
        self.fails = fails

    async def run(self) -> None:
        await self.rollouts.each(self.score)

    async def score(self, sample: Sample) -> None:
        if sample.member == self.fails:
            raise SampleFailed("on_purpose")
        reward = last_number(sample.prompt_text, sample.response_text, answer="42")
        same = {field.name: getattr(sample, field.name) for field in fields(Sample)}
        await self.scored.send(Scored(**same, reward=reward, raw_reward=reward))


def graph(cfg: Small) -> Graph:
    g = Graph("brief")
    prompts = g.add("prompts", Numbers(cfg.group_size))
    generator = g.add("generator", Answering(0.0, cfg.groups_per_step * cfg.group_size))
    reward = g.add("reward", Scoring(cfg.group_size - 1 if cfg.failing else -1))
    advantage = g.add("advantage", BriefAdvantage(0.2, size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", SleepingTrainer(0.0))

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.samples, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=1)
    return g
