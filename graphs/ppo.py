"""PPO (arXiv 1707.06347): an actor and a critic, trained side by side on the same batches, each with its own weights.

The reward and the reference work on each sample at the same time; their results are joined by sample. When a
batch is formed, the critic values all of it at one version, and GAE computes the advantages.

flowrl run ppo --steps 60
flowrl run ppo --reward-model runs/reward_model/checkpoints/step_000300 --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from flowrl import Graph
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import AdvantageOptions
from flowrl.models.sizes.model_layout import trainer_layout
from flowrl.nodes import (
    AdaptiveKL,
    Critic,
    GroupAdvantage,
    JoinedAdvantage,
    Trainer,
)
from flowrl.prompt_options import RewardOptions
from flowrl.role_options import CriticSize, CriticTrainerSize, Size, TrainerSize, unused
from flowrl.training.advantages import Estimate
from flowrl.training.loss.token_objectives import ValueObjective
from flowrl.training.settings import Layout, Schedule, ZeroSettings


@dataclass(frozen=True)
class PPO(AdvantageOptions, RewardOptions):
    group_size: int = 4
    trainer: TrainerSize = TrainerSize()
    """Ranks of the actor."""
    groups_per_step: int = 32
    optimizer_steps: int = 2

    critic: CriticSize = CriticSize()
    """The critic, which values every token."""
    critic_trainer: CriticTrainerSize = CriticTrainerSize()
    """Ranks of the critic's trainer."""
    critic_lr: float = 3e-4
    """Peak learning rate of the critic."""
    critic_zero: ZeroSettings = ZeroSettings()
    """As `zero`, for the critic's trainer."""
    critic_schedule: Schedule = Schedule()
    """Warm-up and decay of the critic's learning rate."""
    critic_warmup: int = 5
    """Number of batches on which only the critic is trained: the policy makes versions, but does not change."""
    gamma: float = 1.0
    """Discount of GAE."""
    lam: float = 0.95
    """λ of GAE."""
    kl_coef: float = 0.01
    """Weight of the KL to the initial weights, token by token in the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that KL."""
    kl_target: float | None = None
    """Adapt `kl_coef` until the KL of a response is this, in nats."""
    value_clip: float = 0.2
    """Largest distance of a value from the one that made the advantages; 0 does not clip."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.unused_settings("critic_zero", "critic_schedule")
        if not self.kl_coef:
            yield from unused(self, ("kl_estimator", "kl_target"), "--kl-coef is 0; raise it, or leave this out")

    @property
    def kl_in_reward(self) -> float:
        return self.kl_coef

    def share(self, size: Size) -> dict[str, Any]:
        """Like `place`. On a CPU, the ranks of the two trainers share one core, unless their sizes say otherwise."""
        return self.place(size, cpus=1 if self.uses_gpus else 0.5 / self.trainer.replicas)

    @property
    def packed_as(self) -> Layout:
        """Trees only if the critic's trainer can compute them as well."""
        model = replace(self.model, model=self.critic.model or self.policy)
        kind = self.critic_trainer.sized(self.trainer).sequence_parallel_kind
        critic = trainer_layout(model, self.critic_zero, kind)
        return super().packed_as if critic.trees else "rows"


def graph(cfg: PPO) -> Graph:
    critic_model = replace(cfg.model, model=cfg.critic.model or cfg.policy, name="critic")
    estimate = Estimate("gae", gamma=cfg.gamma, lam=cfg.lam, kl_coef=cfg.kl_coef, kl_estimator=cfg.kl_estimator)
    filtering = cfg.filtering(cfg.groups_per_step)
    adaptive_kl = None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target)
    critic_size = cfg.critic_trainer.sized(cfg.trainer)

    g = Graph("ppo")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add(
        "reward", cfg.make_reward(normalise=True), **(cfg.share(cfg.reward_model) if cfg.reward_model.model else {})
    )
    kind = GroupAdvantage if cfg.compared_with is None else JoinedAdvantage
    advantage = g.add("advantage", kind(estimate, size=cfg.group_size, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=adaptive_kl))
    values = Critic(critic_model, **cfg.scoring(cfg.critic) | {"layout": cfg.critic_zero.layout})
    critic = g.add("critic", values, **cfg.share(cfg.critic))
    actor = g.add(
        "actor",
        cfg.make_trainer(cfg.loss(cfg.max_tokens), start_after=cfg.critic_warmup),
        **cfg.share(cfg.trainer),
    )
    critic_trainer = g.add(
        "critic_trainer",
        Trainer(
            critic_model,
            objective=ValueObjective(clip=cfg.value_clip or None),
            lr=cfg.critic_lr,
            epochs=cfg.epochs,
            schedule=cfg.critic_schedule,
            zero=cfg.critic_zero.with_dtype(cfg.dtype),
            sequence_parallel_size=critic_size.sequence_parallel_size,
            sequence_parallel_kind=critic_size.sequence_parallel_kind,
            tensor_parallel_size=critic_size.tensor_parallel_size,
        ),
        **cfg.share(critic_size),
    )

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    size, placed = cfg.compared_with, cfg.share(cfg.reference)
    rollouts, followers = refer(g, cfg, size, generator.rollouts, actor, placed=placed)
    if isinstance(advantage, JoinedAdvantage):
        g.connect(rollouts, advantage.referenced)
    g.connect(advantage.groups, batcher.groups)
    g.call(batcher.values, critic.requests)
    g.connect(batcher.batches, actor.batches, dispatch="gang")
    g.connect(batcher.batches, critic_trainer.batches, dispatch="gang")
    g.latest(actor.weights, generator.weights)
    g.latest(critic_trainer.weights, critic.weights)
    if cfg.curriculum.used:
        g.call(advantage.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=(generator.weights, critic.weights, *followers),
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.look_ahead,
    )
    evaluate(g, cfg, generator)
    cfg.share_devices(g, ("actor", "reference", "reward"), ("critic_trainer", "critic"))
    return g
