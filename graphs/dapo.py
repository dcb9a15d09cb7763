"""DAPO (arXiv 2503.14476): replaces groups that teach nothing, clips wider above, and penalises long responses.

flowrl run dapo --steps 60
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import RewardKLOptions
from flowrl.nodes import GroupAdvantage
from flowrl.prompt_options import RewardOptions
from flowrl.training.advantages import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class DAPO(RewardKLOptions, RewardOptions):
    dynamic_sampling: bool = True
    objective: PolicyObjective = PolicyObjective(clip_high=0.28)
    """The loss: clipped wider above than below, so that unlikely tokens can grow."""
    overlong_buffer: int = 8


def graph(cfg: DAPO) -> Graph:
    estimate = Estimate("group_norm", **cfg.reward_kl_settings)
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("dapo")
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
