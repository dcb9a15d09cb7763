"""GRPO (arXiv 2402.03300): compares the samples of a prompt with each other; sampling and training run side by side.

flowrl run grpo --steps 60 --run-dir runs/first
flowrl run grpo --policy smollm2 --task reasoning_gym/chain_sum --steps 60
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import RewardKLOptions
from flowrl.nodes import GroupAdvantage
from flowrl.prompt_options import RewardOptions
from flowrl.training.advantages import Estimate


@dataclass(frozen=True)
class GRPO(RewardKLOptions, RewardOptions):
    advantage: Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce"] = "group_norm"
    """What a sample is compared with: the mean of its group, with or without division by the group's standard
    deviation, the other samples, or nothing."""
    gamma: float = 1.0
    """Discount, for `advantage` reinforce."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are shuffled within each group, so nothing can be learnt."""


def graph(cfg: GRPO) -> Graph:
    estimate = Estimate(cfg.advantage, gamma=cfg.gamma, shuffle_rewards=cfg.shuffle_rewards, **cfg.reward_kl_settings)
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("grpo")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=cfg.adaptive_kl))
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.max_tokens)), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, generator.prompts)
    rollouts, followers = refer(g, cfg, cfg.compared_with, generator.rollouts, trainer)
    g.connect(rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.curriculum.used:
        g.call(advantage.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=(generator.weights, *followers),
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.look_ahead,
    )
    evaluate(g, cfg, generator)
    cfg.share_devices(g, ("trainer", "reward", "reference"))
    return g
