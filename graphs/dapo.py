"""DAPO (arXiv 2503.14476): replaces groups that teach nothing, clips wider above, and penalises long responses.

    advantage   A_i = (R_i − mean R) / std R, over the samples of one prompt; groups of equal rewards are replaced
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.28)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled

flowrl run dapo --steps 60
"""

from dataclasses import dataclass

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
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class DAPO(OnlineConfig):
    help_texts = {"objective": "The loss: clipped wider above than below, so that unlikely tokens can grow."}

    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping(overlong_buffer=8)
    groups: GroupOptions = GroupOptions(dynamic_sampling=True)
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: RewardKLLoss = RewardKLLoss(PolicyObjective(clip_high=0.28))


def graph(cfg: DAPO) -> Graph:
    estimate = Estimate("group_norm", **cfg.loss.of_estimate)
    objective = cfg.loss.build(cfg.sampling.max_tokens)

    g = Graph("dapo")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    reference = cfg.loss.compared_with(cfg)
    return train_on_answers(g, cfg, prompts, generator, reward, advantage, batcher, trainer, reference=reference)
