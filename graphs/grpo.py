"""GRPO (arXiv 2402.03300): compares the samples of a prompt with each other; sampling and training run side by side.

    advantage   A_i = (R_i − mean R) / std R, over the samples of one prompt; a token has that of its sample
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled

flowrl run grpo --steps 60 --run-dir runs/first
flowrl run grpo --policy smollm2 --task reasoning_gym/chain_sum --steps 60
"""

from collections.abc import Iterator
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
    find_unused,
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

    advantage: Literal[
        "group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce", "max_rl", "pass_at_k", "gdpo"
    ] = "group_norm"
    """What a sample is compared with: the mean of its group, with or without division by the group's standard
    deviation or mean (max_rl), the other samples, the best of k samples (pass_at_k), nothing; or each part of its
    reward with that part of the others (gdpo)."""
    pass_k: int | None = None
    """k, for `advantage` pass_at_k: of so many samples one has to pass."""
    pass_at: float = 1.0
    """The reward from which a sample passes, for `advantage` pass_at_k."""
    gamma: float = 1.0
    """Discount, for `advantage` reinforce."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are shuffled within each group, so nothing can be learnt."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.advantage == "gdpo":
            why = "--advantage gdpo compares the parts of a reward, not what shaping makes of their sum; leave this out"
            names = ("reward_clip", "stop_penalty", "negate_rewards", "overlong_buffer", "overlong_factor")
            yield from find_unused(self, names, why)
        if self.advantage == "max_rl":
            why = "--advantage max_rl divides by a mean reward, and this makes rewards negative; leave it out"
            yield from find_unused(self, ("negate_rewards", "overlong_buffer"), why)


def graph(cfg: GRPO) -> Graph:
    estimate = Estimate(
        cfg.advantage,
        gamma=cfg.gamma,
        shuffle_rewards=cfg.shuffle_rewards,
        pass_k=cfg.pass_k,
        pass_at=cfg.pass_at,
        part_weights=cfg.reward.part_weights(cfg.data.task) if cfg.advantage == "gdpo" else (),
        **cfg.loss.of_estimate,
    )
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
