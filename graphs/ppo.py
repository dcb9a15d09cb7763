"""PPO (arXiv 1707.06347): an actor and a critic, trained side by side on the same batches, each with its own weights.

The reward and the reference work on each sample at the same time; their results are joined by sample. When a
batch is formed, the critic values all of it at one version, and GAE computes the advantages.

    advantage   A_t = Σ_k (γλ)^k δ_(t+k), δ_t = r_t + γ V_(t+1) − V_t; r_t is −β·KL_t, and the reward at the last token
    actor       −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled
    critic      (V_t − return_t)² / 2, V clipped around the value that made the advantages

flowrl run ppo --steps 60
flowrl run ppo --reward-model runs/reward_model/checkpoints/step_000300 --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from flowrl import Graph
from flowrl.graph.option_types import named
from flowrl.models import Policy
from flowrl.models.model_layout import trainer_layout
from flowrl.nodes import AdaptiveKL, Critic, GroupAdvantage, JoinedAdvantage, Trainer
from flowrl.options import (
    AnswerSteps,
    ConfigPart,
    CriticSize,
    CriticTrainerSize,
    GraphConfig,
    GroupOptions,
    NormalisationOptions,
    OnlineConfig,
    PolicyLoss,
    ResponseShaping,
    RewardOptions,
    SamplingOptions,
    Size,
    add_evaluation,
    add_reference,
    find_unused,
    make_batcher,
    make_generator,
    make_prompts,
    make_reward,
    make_trainer,
    unused_settings,
)
from flowrl.training.advantages import Estimate
from flowrl.training.loss.token_objectives import ValueObjective
from flowrl.training.settings import Layout, Schedule, ZeroSettings


@dataclass(frozen=True)
class PPOLoss(PolicyLoss):
    """The actor's loss, GAE, and the KL in the reward."""

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

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if not self.kl_coef:
            yield from find_unused(cfg, ("kl_estimator", "kl_target"), "--kl-coef is 0; raise it, or leave this out")

    @property
    def kl_in_reward(self) -> float:
        return self.kl_coef

    @property
    def adaptive_kl(self) -> AdaptiveKL | None:
        return None if self.kl_target is None else AdaptiveKL(self.kl_target)


@dataclass(frozen=True)
class CriticOptions(ConfigPart):
    """The critic, whose weights are used by one node and trained by another."""

    size: CriticSize = named("critic", CriticSize())
    """The critic, which values every token."""
    trainer_size: CriticTrainerSize = named("critic_trainer", CriticTrainerSize())
    """Ranks of the critic's trainer."""
    lr: float = named("critic_lr", 3e-4)
    """Peak learning rate of the critic."""
    zero: ZeroSettings = named("critic_zero", ZeroSettings())
    """As `zero`, for the critic's trainer."""
    schedule: Schedule = named("critic_schedule", Schedule())
    """Warm-up and decay of the critic's learning rate."""
    warmup: int = named("critic_warmup", 5)
    """Number of batches on which only the critic is trained: the policy makes versions, but does not change."""
    value_clip: float = 0.2
    """Largest distance of a value from the one that made the advantages; 0 does not clip."""

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        yield from unused_settings(cfg, "critic_zero", "critic_schedule")


@dataclass(frozen=True)
class PPO(OnlineConfig):
    help_texts = {"trainer": "Ranks of the actor."}

    sampling: SamplingOptions = SamplingOptions(group_size=4)
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: PPOLoss = PPOLoss()
    critic: CriticOptions = CriticOptions()
    steps: AnswerSteps = AnswerSteps(groups_per_step=32, optimizer_steps=2)

    def share(self, size: Size) -> dict[str, Any]:
        """Like `place`. On a CPU, the ranks of the two trainers share one core, unless their sizes say otherwise."""
        return self.place(size, cpus=1 if self.uses_gpus else 0.5 / self.trainer.size.replicas)

    @property
    def critic_model(self) -> Policy:
        """The critic's initial model."""
        return replace(self.model, model=self.critic.size.model or self.policy.name, name="critic")

    @property
    def layout(self) -> Layout:
        """How batches are packed: as trees only if both trainers can compute them."""
        kind = self.critic.trainer_size.sized(self.trainer.size).sequence_parallel_kind
        critic = trainer_layout(self.critic_model, self.critic.zero, kind)
        return self.trainer.layout(self.model) if critic.has_trees else "rows"


def graph(cfg: PPO) -> Graph:
    loss, critic_model = cfg.loss, cfg.critic_model
    estimate = Estimate("gae", gamma=loss.gamma, lam=loss.lam, kl_coef=loss.kl_coef, kl_estimator=loss.kl_estimator)
    critic_size = cfg.critic.trainer_size.sized(cfg.trainer.size)
    reference = loss.compared_with(cfg)

    g = Graph("ppo")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    judged_by = cfg.reward.reward_model
    reward = g.add("reward", make_reward(cfg, normalise=True), **(cfg.share(judged_by) if judged_by.model else {}))
    kind = GroupAdvantage if reference is None else JoinedAdvantage
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", kind(estimate, size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, estimate, layout=cfg.layout))
    scoring: dict[str, Any] = {**cfg.trainer.scoring(cfg.critic.size), "layout": cfg.critic.zero.layout}
    critic = g.add("critic", Critic(critic_model, **scoring), **cfg.share(cfg.critic.size))
    learner = make_trainer(cfg, loss.build(cfg.sampling.max_tokens), start_after=cfg.critic.warmup)
    actor = g.add("actor", learner, **cfg.share(cfg.trainer.size))
    critic_trainer = g.add(
        "critic_trainer",
        Trainer(
            critic_model,
            objective=ValueObjective(clip=cfg.critic.value_clip or None),
            lr=cfg.critic.lr,
            epochs=cfg.steps.epochs,
            schedule=cfg.critic.schedule,
            zero=cfg.critic.zero.with_dtype(cfg.trainer.dtype),
            sequence_parallel_size=critic_size.sequence_parallel_size,
            sequence_parallel_kind=critic_size.sequence_parallel_kind,
            tensor_parallel_size=critic_size.tensor_parallel_size,
        ),
        **cfg.share(critic_size),
    )

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    placed = cfg.share(loss.reference)
    rollouts, followers = add_reference(g, cfg, reference, generator.rollouts, actor, placed=placed)
    if isinstance(advantage, JoinedAdvantage):
        g.connect(rollouts, advantage.referenced)
    g.connect(advantage.groups, batcher.groups)
    g.call(batcher.values, critic.requests)
    g.connect(batcher.batches, actor.batches, dispatch="gang")
    g.connect(batcher.batches, critic_trainer.batches, dispatch="gang")
    g.latest(actor.weights, generator.weights)
    g.latest(critic_trainer.weights, critic.weights)
    if prompts.curriculum is not None:
        g.call(advantage.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=(generator.weights, critic.weights, *followers),
        staleness=cfg.steps.staleness,
        on_limit=cfg.steps.on_limit,
        look_ahead=cfg.steps.look_ahead,
    )
    add_evaluation(g, cfg, generator)
    cfg.share_devices(g, ("actor", "reference", "reward"), ("critic_trainer", "critic"))
    return g
