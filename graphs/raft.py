"""RAFT (arXiv 2304.06767): imitates the best of several answers to a prompt; the trained policy gives the next ones.

    advantage   1 for the best answer to a prompt; the others are left out
    loss        −Σ log π(token) / number of tokens, of the best answers

flowrl run raft --steps 100
flowrl run raft --reward-model runs/reward_model/checkpoints/step_000300 --steps 100
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.nodes import BestOfN
from flowrl.options import (
    AnswerSteps,
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
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class RAFT(OnlineConfig):
    help_texts = {
        "objective": "The loss: the log likelihood of the best answers, regardless of which policy gave them."
    }

    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    loss: PolicyLoss = PolicyLoss(PolicyObjective(kind="reinforce", correction=None))
    steps: AnswerSteps = AnswerSteps(groups_per_step=32)

    least_reward: float | None = None
    """Leave out prompts whose best answer has a lower raw reward."""


def graph(cfg: RAFT) -> Graph:
    objective = cfg.loss.build(cfg.sampling.max_tokens)

    g = Graph("raft")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    best = g.add("best", BestOfN(size=cfg.sampling.group_size, least_reward=cfg.least_reward, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    reference = cfg.loss.compared_with(cfg)
    return train_on_answers(g, cfg, prompts, generator, reward, best, batcher, trainer, reference=reference)
