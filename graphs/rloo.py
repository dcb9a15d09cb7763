"""RLOO (arXiv 2402.14740): compares each sample with the mean of the prompt's other samples; a response is one action.

flowrl run rloo --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import AdvantageOptions
from flowrl.nodes import AdaptiveKL, GroupAdvantage
from flowrl.prompt_options import RewardOptions
from flowrl.role_options import unused
from flowrl.training.advantages import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class RLOO(AdvantageOptions, RewardOptions):
    objective: PolicyObjective = PolicyObjective(kind="reinforce", aggregation="constant")
    """The loss: the gradient of a whole response, not clipped; --objective.kind ppo clips it, as OpenRLHF does."""
    kl_coef: float = 0.001
    """Weight of the KL to the initial weights in the reward; 0: none."""
    kl_before_baseline: bool = True
    """Subtract the KL of a whole response from its reward before the baseline, as in the paper, or token by token."""
    kl_target: float | None = None
    """Adapt `kl_coef` until the KL of a response is this, in nats."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.kl_coef:
            yield from unused(self, ("kl_before_baseline", "kl_target"), "--kl-coef is 0; raise it, or leave this out")

    @property
    def kl_in_reward(self) -> float:
        return self.kl_coef


def graph(cfg: RLOO) -> Graph:
    estimate = Estimate("rloo", kl_coef=cfg.kl_coef, kl_before_baseline=cfg.kl_before_baseline)
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("rloo")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    adaptive_kl = None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target)
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=adaptive_kl))
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
