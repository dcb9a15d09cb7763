"""GRPO on trees (as TreePO, arXiv 2508.17445, and VinePPO, 2410.01679): each rollout is a trunk, cut before its least
certain token, from where further continuations are sampled; a segment is compared with the value of where it begins.

    V(root)     mean reward of the trunks of a prompt
    V(cut)      mean reward of a trunk and its branches: a Monte Carlo estimate of the value of their common prefix
    advantage   V(cut) − V(root) for the trunk's tokens before the cut; reward − V(cut) for each continuation's tokens
    loss        as in grpo; each sampled token is trained once, a common prefix with the trunk

flowrl run tree_rollouts --steps 60
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowrl import Ask, Facts, Graph, In, Node, Out, Prompt, Sample, Scored, Trainable
from flowrl.models import Policy, tokenizer_of
from flowrl.nodes import GroupAdvantage, Sampling
from flowrl.options import (
    GroupOptions,
    OnlineConfig,
    PolicyLoss,
    ResponseShaping,
    RewardOptions,
    make_batcher,
    make_generator,
    make_prompts,
    make_reward,
    make_trainer,
    train_on_answers,
)
from flowrl.training.advantages import Estimate


class Branching(Node):
    """Continues each rollout `branches` times from before its least certain token, the first excepted."""

    rollouts: In[Sample]
    grown: Out[Sample]
    policy: Ask

    def __init__(self, model: Policy, *, sampling: Sampling, branches: int, longest: int) -> None:
        self.model, self.sampling, self.branches, self.longest = model, sampling, branches, longest

    def facts(self) -> Facts:
        return Facts(derives={"branch": self.branches}, longest_context=self.longest, context_with_reply=True)

    async def setup(self) -> None:
        self.tokenizer = await self.blocking(tokenizer_of, self.model)

    async def run(self) -> None:
        await self.rollouts.each(self.grow, concurrency=64)

    async def grow(self, trunk: Sample) -> None:
        if self.grown.was_sent():  # the trunk is the last that is sent
            return
        if (places := np.flatnonzero(trunk.policy_mask)[1:]).size:
            cut = int(places[trunk.behavior_logprobs[places].argmin()])
            children = await self.context.derive(trunk, self.branches)
            for branch in await asyncio.gather(*(self.continued(child, trunk, cut) for child in children)):
                await self.grown.send(branch)
        await self.grown.send(trunk)

    async def continued(self, child: Prompt, trunk: Sample, cut: int) -> Sample:
        written = trunk.token_ids[trunk.prompt_tokens : cut]
        left = replace(self.sampling, max_tokens=self.sampling.max_tokens - len(written))
        reply = await self.policy.ask(trunk.token_ids[:cut], trained=True, sample=child, sampling=left)
        text = self.tokenizer.decode([*written, *reply.token_ids], skip_special_tokens=True)
        return self.policy.make_sample(child, [reply], response_text=text)


class Segments(Estimate):
    """Compares each segment of a tree with the value of the place where it begins."""

    def make_trainables(self, samples: Sequence[Scored], **settings: object) -> tuple[Trainable, ...]:
        return tuple(segment_advantages(samples))


def segment_advantages(samples: Sequence[Scored]) -> Iterator[Trainable]:
    """The trunks and branches of one prompt with their advantages. A trunk without branches is one segment."""
    root = float(np.mean([one.reward for one in samples if not one.parent_id] or [one.reward for one in samples]))
    for sample in samples:
        tree = [one for one in samples if (one.parent_id or one.sample_id) == (sample.parent_id or sample.sample_id)]
        cuts = [one.prompt_tokens for one in tree if one.parent_id]
        value = float(np.mean([one.reward for one in tree])) if cuts else root
        before = np.arange(len(sample.token_ids)) < (cuts[0] if cuts else 0)
        advantages = np.where(before, value - root, sample.reward - value)
        yield Trainable.of(sample, advantages * sample.policy_mask)


@dataclass(frozen=True)
class TreeRollouts(OnlineConfig):
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    loss: PolicyLoss = PolicyLoss()

    branches: int = 3
    """Continuations of each rollout, besides its own."""


def graph(cfg: TreeRollouts) -> Graph:
    g, tokens = Graph("tree_rollouts"), cfg.sampling.max_tokens
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    asked, most = generator.sampling, cfg.data.max_prompt_tokens + tokens
    branching = g.add("branching", Branching(cfg.model, sampling=asked, branches=cfg.branches, longest=most))
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(Segments("dr_grpo"), size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg))
    trainer = g.add("trainer", make_trainer(cfg, cfg.loss.build(tokens)), **cfg.place(cfg.trainer.size))
    g.call(branching.policy, generator.turns)
    reference, through = cfg.loss.compared_with(cfg), (branching.rollouts, branching.grown)
    return train_on_answers(
        g, cfg, prompts, generator, reward, advantage, batcher, trainer, reference=reference, through=through
    )
