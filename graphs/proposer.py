"""Proposer and solver (Absolute Zero, arXiv 2505.03335; R-Zero, arXiv 2508.05004): the policy asks itself sums, and is
trained on its questions and on its answers. A question waits for its answers, for which tickets are kept.

    reward      1 for a right answer; 1 − |2p − 1| for a question, p the share of right answers; 0 for no question
    advantage   A_i = (R_i − mean R) / std R, over the questions, or the answers, to one prompt
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ and w as in grpo

flowrl run proposer --steps 60
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl import Call, Facts, Graph, In, Node, Out, Prompt, Sample, Scored, Serve
from flowrl.models import Chat, Policy, tokenizer_of
from flowrl.nodes import GroupAdvantage
from flowrl.nodes.curriculum import GroupOutcome, Noted
from flowrl.nodes.sources.row_source import sampling_seed
from flowrl.options import (
    OnlineConfig,
    PolicyLoss,
    add_evaluation,
    add_reference,
    make_batcher,
    make_generator,
    make_trainer,
    train_on_groups,
)


class Questions(Node):
    """Admits groups that ask questions, and for every question a group that answers it."""

    prompts: Out[Prompt]
    asked: Serve[Sample, GroupOutcome]
    outcomes: Serve[GroupOutcome, Noted]

    def __init__(self, policy: Policy, size: int, num_prompts: int) -> None:
        self.policy, self.size, self.num_prompts, self.number = policy, size, num_prompts, 0
        self.rewards: dict[str, list[float]] = {}
        """Question -> the rewards of its answers; [] until they are known."""

    def facts(self) -> Facts:
        return Facts(group_size=self.size, longest_prompt=16, asks=1)

    async def setup(self) -> None:
        self.chat, self.news = Chat(await self.blocking(tokenizer_of, self.policy)), asyncio.Condition()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.asked.each(self.ask, concurrency=4096))
            tasks.create_task(self.outcomes.each(self.note, concurrency=4096))
            while await self.prompts.admit(self.group(f"{self.number}", f"{self.number % self.num_prompts}+="), asks=1):
                self.number += 1
            self.prompts.close()

    async def ask(self, question: Sample) -> GroupOutcome:
        name = question.sample_id
        if name not in self.rewards:
            self.rewards = {**dict([*self.rewards.items()][-10_000:]), name: []}
            first, second = question.columns["question"].rstrip("+="), question.response_text.strip()
            group = self.group(name, f"{first}+{second}=", answer=str(int(first) + int(second)))
            if not await self.prompts.admit(group, asked_by=name):
                return GroupOutcome(name, 0, ())
        async with self.news:
            with self.context.waiting("the answers"):
                await self.news.wait_for(lambda: self.rewards[name])
        return GroupOutcome(name, 0, tuple(self.rewards[name]))

    async def note(self, outcome: GroupOutcome) -> Noted:
        async with self.news:
            if is_new := self.rewards.get(outcome.prompt_id) == []:
                self.rewards[outcome.prompt_id] = [*outcome.raw_rewards]
                self.news.notify_all()
        return Noted(is_new)

    def group(self, name: str, question: str, **columns: str) -> list[Prompt]:
        text, ids = self.chat.encode_prompt([{"role": "user", "content": question}])
        seeds = [sampling_seed(self.context.seed, name, 0, member) for member in range(self.size)]
        place, given = (f"group {name}", name, 0), {"question": question, **columns}
        return [Prompt(f"{name}/{m}", *place, m, self.size, seeds[m], text, ids, given) for m in range(self.size)]

    def state(self) -> Mapping[str, Any]:
        return {"number": self.number, "rewards": self.rewards}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.number, self.rewards = state["number"], dict(state["rewards"])


class Arena(Node):
    """Scores answers at once, and questions when they are answered."""

    rollouts: In[Sample]
    scored: Out[Scored]
    ask: Call[Sample, GroupOutcome]

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        await self.rollouts.each(self.score, concurrency=4096)

    async def score(self, sample: Sample) -> None:
        if self.scored.was_sent():
            return
        reward, text = 0.0, sample.response_text.strip()
        if "answer" in sample.columns:
            reward = float(text == sample.columns["answer"])
        elif re.fullmatch("[0-9]{1,2}", text):
            if not (rewards := (await self.ask(sample)).raw_rewards):
                self.rollouts.drop(sample, "not_answered", state="filtered")
                return
            reward = 1 - abs(2 * sum(rewards) / len(rewards) - 1)
            self.context.gauge("answers_right", sum(rewards) / len(rewards))
        await self.scored.send(Scored.of(sample, reward))


@dataclass(frozen=True)
class Proposer(OnlineConfig):
    help_texts = {"num_prompts": "Number of first summands that questions are asked for; None: 100."}

    loss: PolicyLoss = PolicyLoss()


def graph(cfg: Proposer) -> Graph:
    g, size, loss = Graph("proposer"), cfg.sampling.group_size, cfg.loss.build(cfg.sampling.max_tokens)
    prompts = g.add("prompts", Questions(cfg.model, size, cfg.data.num_prompts or 100))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    arena, advantage = g.add("arena", Arena()), g.add("advantage", GroupAdvantage("group_norm", size=size))
    batcher = g.add("batcher", make_batcher(cfg))
    trainer = g.add("trainer", make_trainer(cfg, loss), **cfg.place(cfg.trainer.size))
    g.connect(prompts.prompts, generator.prompts)
    answers, followers = add_reference(g, cfg, cfg.loss.compared_with(cfg), generator.rollouts, trainer)
    g.connect(answers, arena.rollouts)
    g.call(arena.ask, prompts.asked, capacity=4096)
    g.connect(arena.scored, advantage.scored)
    g.call(advantage.outcomes, prompts.outcomes)
    groups = advantage.groups
    train_on_groups(g, cfg, prompts.prompts, groups, batcher, trainer, generator, followers=followers)
    add_evaluation(g, cfg, generator)
    cfg.share_devices(g, ("trainer", "reference"))
    return g
