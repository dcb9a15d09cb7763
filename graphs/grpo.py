"""GRPO (arXiv 2402.03300): compares the samples of a prompt with each other; sampling and training run side by side.

flowrl run grpo --steps 60 --run-dir runs/first
flowrl run grpo --policy smollm2 --task reasoning_gym/chain_sum --steps 60
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import evaluate
from flowrl.loss_options import AdvantageOptions, require_reference
from flowrl.nodes import AdaptiveKL, GroupAdvantage, Reference
from flowrl.prompt_options import RewardOptions
from flowrl.role_options import ReferenceSize
from flowrl.training.advantage.estimate import Estimate


@dataclass(frozen=True)
class GRPO(AdvantageOptions, RewardOptions):
    has_reference = True

    advantage: Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce"] = "group_norm"
    """What a sample is compared with: the mean of its group, with or without division by the group's standard
    deviation, the other samples, or nothing."""
    whiten: Literal["off", "full", "mean"] | None = None
    """Normalise advantages over the batch; None: full for reinforce and reinforce_baseline, otherwise off."""
    gamma: float = 1.0
    """Discount, for `advantage` reinforce."""
    reward_kl_coef: float = 0.0
    """Weight of the KL to the initial weights in the reward; above 0 adds a reference."""
    reward_kl: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that KL."""
    kl_before_baseline: bool = False
    """Subtract the KL of a whole response from its reward before the group's baseline, not token by token."""
    kl_target: float | None = None
    """Adapt `reward_kl_coef` until the KL of a response is this, in nats."""
    reference: ReferenceSize = ReferenceSize()
    """The reference, which has the initial weights. A KL adds it, in the loss unless adapters are trained."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are shuffled within each group, so nothing can be learnt."""


def graph(cfg: GRPO) -> Graph:
    whitened = cfg.whiten or ("full" if cfg.advantage.startswith("reinforce") else "off")
    estimate = Estimate(
        cfg.advantage,
        gamma=cfg.gamma,
        kl_coef=cfg.reward_kl_coef,
        kl_estimator=cfg.reward_kl,
        kl_before_baseline=cfg.kl_before_baseline,
        shuffle_rewards=cfg.shuffle_rewards,
    )
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("grpo")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batch = cfg.batcher(
        whiten=whitened,
        estimate=estimate,
        normalise_rewards=cfg.normalise_rewards,
        adaptive_kl=None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target),
    )
    batcher = g.add("batcher", batch)
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.max_tokens)), **cfg.place(cfg.trainer))

    readers = [generator.weights]
    g.connect(prompts.prompts, generator.prompts)
    # A trainer of adapters has the reference in itself, but only when the samples have reached it.
    if cfg.reward_kl_coef or (cfg.objective.kl_coef and not cfg.lora.rank):
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
        require_reference(cfg.reference, "give it a KL, as with --objective.kl-coef 0.01")
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
