"""RAFT (arXiv 2304.06767): imitates the best of several answers to a prompt; the trained policy gives the next ones.

flowrl run raft --steps 100
flowrl run raft --reward-model runs/reward_model/checkpoints/step_000300 --steps 100
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import FilterOptions, LossOptions
from flowrl.nodes import BestOfN
from flowrl.prompt_options import RewardOptions
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class RAFT(LossOptions, FilterOptions, RewardOptions):
    groups_per_step: int = 32
    objective: PolicyObjective = PolicyObjective(kind="reinforce", correction=None)
    """The loss: the log likelihood of the best answers, regardless of which policy gave them."""

    least_reward: float | None = None
    """Leave out prompts whose best answer has a lower raw reward."""


def graph(cfg: RAFT) -> Graph:
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("raft")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    best = g.add("best", BestOfN(size=cfg.group_size, least_reward=cfg.least_reward, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher())
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.max_tokens)), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, generator.prompts)
    rollouts, followers = refer(g, cfg, cfg.compared_with, generator.rollouts, trainer)
    g.connect(rollouts, reward.rollouts)
    g.connect(reward.scored, best.scored)
    g.connect(best.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.curriculum.used:
        g.call(best.outcomes, prompts.outcomes)
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
