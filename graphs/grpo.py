"""GRPO (arXiv 2402.03300): compares the samples of a prompt with each other; sampling and training run side by side.

    advantage   A_i = (R_i − mean R) / std R, over the samples of one prompt; a token has that of its sample
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled

flowrl run grpo --steps 60 --run-dir runs/first
flowrl run grpo --policy smollm2 --task reasoning_gym/chain_sum --steps 60
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.nodes import GroupAdvantage
from flowrl.options import (
    GroupOptions,
    NormalisationOptions,
    OnlineConfig,
    ResponseShaping,
    RewardKLLoss,
    RewardOptions,
    make_batcher,
    make_generator,
    make_prompts,
    make_reward,
    make_trainer,
    train_on_answers,
)
from flowrl.training.advantages import Estimate


@dataclass(frozen=True)
class GRPO(OnlineConfig):
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: RewardKLLoss = RewardKLLoss()

    advantage: Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce"] = "group_norm"
    """What a sample is compared with: the mean of its group, with or without division by the group's standard
    deviation, the other samples, or nothing."""
    gamma: float = 1.0
    """Discount, for `advantage` reinforce."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are shuffled within each group, so nothing can be learnt."""


def graph(cfg: GRPO) -> Graph:
    kl = cfg.loss.of_estimate
    estimate = Estimate(cfg.advantage, gamma=cfg.gamma, shuffle_rewards=cfg.shuffle_rewards, **kl)
    objective = cfg.loss.build(cfg.sampling.max_tokens)

    g = Graph("grpo")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    reference = cfg.loss.compared_with(cfg)
    return train_on_answers(g, cfg, prompts, generator, reward, advantage, batcher, trainer, reference=reference)
