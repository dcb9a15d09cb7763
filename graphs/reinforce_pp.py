"""REINFORCE++ (arXiv 2501.03262): no critic; advantages normalised over the whole batch, KL inside the reward.

    advantage   A_t = R − β·Σ of the KL of the tokens from t on, then normalised over the batch;
                with --baseline A_i = R_i − mean R of the prompt's samples, normalised, and the KL is in the loss
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled

flowrl run reinforce_pp --steps 60
flowrl run reinforce_pp --baseline --steps 60
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
class ReinforcePPLoss(PolicyLoss):
    """The loss, and the KL in the reward or the loss."""

    objective: PolicyObjective = PolicyObjective(kl_estimator="k2")
    baseline: bool = False
    """REINFORCE++-baseline: subtract the group's mean from each reward before the batch is normalised."""
    kl_coef: float = 0.001
    """Weight of the KL to the initial weights: in the reward token by token, with `baseline` in the loss. 0: none."""
    kl_target: float | None = None
    """Adapt the weight of the KL in the reward until the KL of a response is this, in nats."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.baseline and self.objective.kl_coef:
            yield "with --baseline the KL in the loss is --kl-coef; leave --objective.kl-coef out"

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if not self.kl_in_reward:
            why = "there is no KL in the reward with --baseline, or a --kl-coef of 0; leave this out"
            yield from find_unused(cfg, ("kl_target",), why)

    @property
    def kl_in_reward(self) -> float:
        return 0.0 if self.baseline else self.kl_coef

    @property
    def kl_in_loss(self) -> float:
        return self.kl_coef if self.baseline else super().kl_in_loss

    @property
    def adaptive_kl(self) -> AdaptiveKL | None:
        return None if self.kl_target is None else AdaptiveKL(self.kl_target)


@dataclass(frozen=True)
class ReinforcePP(OnlineConfig):
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: ReinforcePPLoss = ReinforcePPLoss()


def graph(cfg: ReinforcePP) -> Graph:
    loss = cfg.loss
    estimate = Estimate("reinforce_baseline") if loss.baseline else Estimate("reinforce", kl_coef=loss.kl_coef)
    objective = loss.build(cfg.sampling.max_tokens)

    g = Graph("reinforce_pp")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    reference = loss.compared_with(cfg)
    return train_on_answers(g, cfg, prompts, generator, reward, advantage, batcher, trainer, reference=reference)
