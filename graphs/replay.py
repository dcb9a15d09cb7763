"""GRPO that trains groups again: a batch takes older groups along, weighed by the logprobs at sampling.

    advantage   A_i = (R_i − mean R) / std R, over the samples of one prompt, as at the group's first use
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled, up to staleness + max_age versions ago

flowrl run replay --steps 60
flowrl run replay --replay.groups 16 --replay.prefer spread --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.nodes import GroupAdvantage, Replay
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


@dataclass(frozen=True)
class ReplayConfig(OnlineConfig):
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    loss: PolicyLoss = PolicyLoss()
    replay: Replay = Replay(groups=8)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.replay.find_problems()


def graph(cfg: ReplayConfig) -> Graph:
    objective = cfg.loss.build(cfg.sampling.max_tokens)

    g = Graph("replay")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage("group_norm", size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, replay=cfg.replay))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    reference = cfg.loss.compared_with(cfg)
    return train_on_answers(g, cfg, prompts, generator, reward, advantage, batcher, trainer, reference=reference)
