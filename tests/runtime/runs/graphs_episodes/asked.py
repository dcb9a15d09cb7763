"""A node that makes samples of what it asks, and a judge that is asked about them; nothing computes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import numpy as np

from flowrl import Ask, Facts, Graph, In, Node, Out, Prompt, Sample, SampleFailed, Scored
from flowrl.messages.episode import Reply, Turn
from flowrl.nodes import EnvironmentSource, GroupAdvantage, TokenBatch
from tests.runtime.runs.graphs_episodes.played import Speaker, Training


class Renderer(Speaker):
    """Also answers messages: their texts are the context."""

    async def answer(self, turn: Turn) -> Reply:
        if not turn.messages:
            return await super().answer(turn)
        told = turn.messages[1 if turn.reply_tokens else 0 :]
        new = self.tokenizer("".join(str(message["content"]) for message in told))["input_ids"]
        context = np.concatenate([turn.token_ids, new]).astype(np.int32)
        reply = await super().answer(replace(turn, token_ids=context, messages=()))
        return replace(reply, context_ids=context)


class Solver(Node):
    """Drafts twice, goes on after one of the drafts, and sends what it made of that; some prompts are given up."""

    prompts: In[Prompt]
    samples: Out[Sample]
    policy: Ask

    def __init__(self, slow_s: float, meddle: bool) -> None:
        self.slow_s, self.meddle = slow_s, meddle

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        await self.prompts.each(self.solve, concurrency=64)

    async def solve(self, one: Prompt) -> None:
        draws = random.Random(one.seed)
        drafts = await asyncio.gather(*(self.policy.ask("ab", trained=True) for _ in range(2)))
        chosen = draws.choice(drafts)
        with self.context.outside("thinking"):
            await asyncio.sleep(self.slow_s * draws.random())  # in virtual time
        if draws.random() < 0.1:
            raise SampleFailed("no_idea")
        more = await self.policy.ask([{"role": "user", "content": "c"}], after=chosen, trained=True)
        other = await self.policy.ask("ba", trained=True)
        made = self.policy.make_sample(one, [chosen, more, other])
        if self.meddle and draws.random() < 0.1:
            made = replace(made, branches=(replace(made.branches[0], token_ids=made.branches[0].token_ids + 1),))
        await self.samples.send(made)


class Critic(Node):
    """The reward is the length of what the judge says of a sample."""

    samples: In[Sample]
    scored: Out[Scored]
    judge: Ask

    async def run(self) -> None:
        await self.samples.each(self.score, concurrency=64)

    async def score(self, one: Sample) -> None:
        if self.scored.was_sent():
            return
        replies = await asyncio.gather(*(self.judge.ask(one.response_text or "b") for _ in range(2)))
        await self.scored.send(Scored.of(one, sum(len(reply.text) for reply in replies), judged=1.0))


@dataclass(frozen=True)
class Config:
    group_size: int = 4
    groups_per_step: int = 4
    staleness: int = 2
    slow_s: float = 0.3
    meddle: bool = False


def graph(cfg: Config) -> Graph:
    g = Graph("asked")
    name = "flowrl.environments.sticks_env:Sticks"
    source = g.add("prompts", EnvironmentSource(name, repeat=cfg.group_size))
    solver = g.add("solver", Solver(cfg.slow_s, cfg.meddle))
    generator = g.add("generator", Renderer())
    critic = g.add("critic", Critic())
    judge = g.add("judge", Renderer())
    advantage = g.add("advantage", GroupAdvantage("dr_grpo", size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(0.2))
    g.connect(source.prompts, solver.prompts)
    g.call(solver.policy, generator.turns)
    g.connect(solver.samples, critic.samples)
    g.call(critic.judge, judge.turns)
    g.connect(critic.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.latest(trainer.weights, judge.weights)
    g.admit(source.prompts, until=(generator.weights, judge.weights), staleness=cfg.staleness)
    return g
