"""REINFORCE++ (arXiv 2501.03262): no critic; advantages normalised over the whole batch, KL inside the reward.

flowrl run reinforce_pp --steps 60
flowrl run reinforce_pp --baseline --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.blocks import evaluate
from flowrl.loss_options import AdvantageOptions, require_reference
from flowrl.nodes import AdaptiveKL, GroupAdvantage, Reference
from flowrl.prompt_options import RewardOptions
from flowrl.role_options import ReferenceSize
from flowrl.training.advantage.estimate import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class ReinforcePP(AdvantageOptions, RewardOptions):
    has_reference = True

    objective: PolicyObjective = PolicyObjective(kl_estimator="k2")
    reference: ReferenceSize = ReferenceSize()
    """The reference, which has the initial weights."""
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


def graph(cfg: ReinforcePP) -> Graph:
    estimate = Estimate("reinforce_baseline") if cfg.baseline else Estimate("reinforce", kl_coef=cfg.kl_coef)
    loss = cfg.loss(cfg.max_tokens)
    objective = replace(loss, kl_coef=cfg.kl_coef) if cfg.baseline else loss
    filtering = cfg.filtering(cfg.groups_per_step)
    adaptive_kl = None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target)

    g = Graph("reinforce_pp")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batch = cfg.batcher(
        whiten="full", estimate=estimate, normalise_rewards=cfg.normalise_rewards, adaptive_kl=adaptive_kl
    )
    batcher = g.add("batcher", batch)
    trainer = g.add("trainer", cfg.make_trainer(objective), **cfg.place(cfg.trainer))

    readers = [generator.weights]
    g.connect(prompts.prompts, generator.prompts)
    if cfg.kl_coef or (cfg.objective.kl_coef and not cfg.lora.rank):
        initial = Reference(
            cfg.model, temperature=cfg.temperature, **cfg.scoring(cfg.reference), **cfg.reference.refreshed
        )
        reference = g.add("reference", initial, **cfg.place(cfg.reference))
        g.connect(generator.rollouts, reference.rollouts)
        g.connect(reference.referenced, reward.rollouts)
        if cfg.reference.refresh_every:
            g.latest(trainer.weights, reference.weights)
            readers.append(reference.weights)
    else:
        require_reference(cfg.reference, "give it a KL, as with --kl-coef 0.01")
        g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.curriculum.used:
        g.call(advantage.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=tuple(readers),
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.look_ahead,
    )
    evaluate(g, cfg, generator)
    cfg.take_turns(g, ("trainer", "reward", "reference"))
    return g
