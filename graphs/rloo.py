"""RLOO (arXiv 2402.14740): compares each sample with the mean of the prompt's other samples; a response is one action.

    advantage   A_i = R_i − mean R of the prompt's other samples, with R less β·KL of the whole response
    loss        −Σ w_t·A_i·log π(token t of response i) / (number of responses · max_tokens), w = min(π_p/π_b, 2);
                π_p is the policy at the batch's start, π_b the one that sampled

flowrl run rloo --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.nodes import AdaptiveKL, GroupAdvantage
from flowrl.options import (
    GraphConfig,
    GroupOptions,
    NormalisationOptions,
    OnlineConfig,
    PolicyLoss,
    ResponseShaping,
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
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class RLOOLoss(PolicyLoss):
    """The loss, and the KL in the reward."""

    objective: PolicyObjective = PolicyObjective(kind="reinforce", aggregation="constant")
    """The loss: the gradient of a whole response, not clipped; --objective.kind ppo clips it, as OpenRLHF does."""
    kl_coef: float = 0.001
    """Weight of the KL to the initial weights in the reward; 0: none."""
    kl_before_baseline: bool = True
    """Subtract the KL of a whole response from its reward before the baseline, as in the paper, or token by token."""
    kl_target: float | None = None
    """Adapt `kl_coef` until the KL of a response is this, in nats."""

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if not self.kl_coef:
            yield from find_unused(
                cfg, ("kl_before_baseline", "kl_target"), "--kl-coef is 0; raise it, or leave this out"
            )

    @property
    def kl_in_reward(self) -> float:
        return self.kl_coef

    @property
    def adaptive_kl(self) -> AdaptiveKL | None:
        return None if self.kl_target is None else AdaptiveKL(self.kl_target)


@dataclass(frozen=True)
class RLOO(OnlineConfig):
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: RLOOLoss = RLOOLoss()


def graph(cfg: RLOO) -> Graph:
    estimate = Estimate("rloo", kl_coef=cfg.loss.kl_coef, kl_before_baseline=cfg.loss.kl_before_baseline)
    objective = cfg.loss.build(cfg.sampling.max_tokens)

    g = Graph("rloo")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    reference = cfg.loss.compared_with(cfg)
    return train_on_answers(g, cfg, prompts, generator, reward, advantage, batcher, trainer, reference=reference)
