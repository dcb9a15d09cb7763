"""REINFORCE++ (arXiv 2501.03262): no critic; advantages normalised over the whole batch, KL inside the reward.

flowrl run reinforce_pp --steps 60
flowrl run reinforce_pp --baseline --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import AdvantageOptions
from flowrl.nodes import AdaptiveKL, GroupAdvantage
from flowrl.prompt_options import RewardOptions
from flowrl.role_options import unused
from flowrl.training.advantages import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class ReinforcePP(AdvantageOptions, RewardOptions):
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
        if not self.kl_in_reward:
            why = "there is no KL in the reward with --baseline, or a --kl-coef of 0; leave this out"
            yield from unused(self, ("kl_target",), why)

    @property
    def kl_in_reward(self) -> float:
        return 0.0 if self.baseline else self.kl_coef

    @property
    def kl_in_loss(self) -> float:
        return self.kl_coef if self.baseline else super().kl_in_loss


def graph(cfg: ReinforcePP) -> Graph:
    estimate = Estimate("reinforce_baseline") if cfg.baseline else Estimate("reinforce", kl_coef=cfg.kl_coef)
    objective = replace(cfg.loss(cfg.max_tokens), kl_coef=cfg.kl_in_loss)
    filtering = cfg.filtering(cfg.groups_per_step)
    adaptive_kl = None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target)

    g = Graph("reinforce_pp")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=adaptive_kl))
    trainer = g.add("trainer", cfg.make_trainer(objective), **cfg.place(cfg.trainer))

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
