"""REINFORCE++ (arXiv 2501.03262): no critic; advantages normalised over the whole batch, KL inside the reward.

flowrl run reinforce_pp --steps 60
flowrl run reinforce_pp --baseline --steps 60
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import evaluate
from flowrl.nodes import AdaptiveKL, GroupAdvantage, Reference
from flowrl.prompt_options import RewardOptions
from flowrl.role_options import ScoringSize
from flowrl.training.advantage.estimate import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class ReinforcePP(RewardOptions):
    reference: ScoringSize = ScoringSize()
    """The reference, which has the initial weights."""
    baseline: bool = False
    """REINFORCE++-baseline: subtract the group's mean from each reward before the batch is normalised."""
    kl_coef: float = 0.001
    """Weight of the KL to the initial weights: in the reward token by token, with `baseline` in the loss. 0: none."""
    kl_target: float | None = None
    """Adapt the weight of the KL in the reward until the KL of a response is this, in nats."""
    clip_low: float = 0.2
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """And above at 1 + clip_high."""


def graph(cfg: ReinforcePP) -> Graph:
    in_loss = cfg.kl_coef if cfg.baseline else 0.0
    estimate = Estimate("reinforce_baseline") if cfg.baseline else Estimate("reinforce", kl_coef=cfg.kl_coef)
    objective = PolicyObjective(clip_low=cfg.clip_low, clip_high=cfg.clip_high, kl_coef=in_loss, kl_estimator="k2")
    adaptive_kl = None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target)

    g = Graph("reinforce_pp")
    prompts = g.add("prompts", cfg.prompts())
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size))
    batcher = g.add("batcher", cfg.batcher(whiten="full", estimate=estimate, adaptive_kl=adaptive_kl))
    trainer = g.add("trainer", cfg.make_trainer(objective), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, generator.prompts)
    if cfg.kl_coef:
        initial = Reference(cfg.model, temperature=cfg.temperature, **cfg.scoring(cfg.reference))
        reference = g.add("reference", initial, **cfg.place(cfg.reference))
        g.connect(generator.rollouts, reference.rollouts)
        g.connect(reference.referenced, reward.rollouts)
    else:
        g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(
        prompts.prompts,
        until=generator.weights,
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.look_ahead,
    )
    evaluate(g, cfg, generator)
    cfg.take_turns(g, ("trainer", "reward", "reference"))
    return g
