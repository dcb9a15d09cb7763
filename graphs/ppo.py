"""PPO (arXiv 1707.06347): an actor and a critic, trained side by side on the same batches, each with its own weights.

The reward and the reference work on each sample at the same time; their results are joined by sample. When a
batch is formed, the critic values all of it at one version, and GAE computes the advantages.

flowrl run ppo --steps 60
flowrl run ppo --reward-model runs/reward_model/checkpoints/step_000100 --steps 60
"""

from dataclasses import dataclass, replace
from typing import Literal

from flowrl import Graph
from flowrl.blocks import evaluate
from flowrl.nodes import (
    AdaptiveKL,
    Critic,
    JoinedAdvantage,
    Reference,
    Trainer,
)
from flowrl.prompt_options import RewardOptions
from flowrl.training.advantage.estimate import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.value_objective import ValueObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import ZeroSettings


@dataclass(frozen=True)
class PPO(RewardOptions):
    gpus: float = 0
    """GPUs of each model process. Actor and reference take turns on theirs, so do critic trainer and critic."""
    group_size: int = 4
    num_trainers: int = 1
    """ZeRO ranks of the actor, and as many of the critic."""
    groups_per_step: int = 32
    optimizer_steps: int = 2

    critic: str = ""
    """Initial model of the critic; empty: the policy. A reward model keeps its head, others get a new one."""
    critic_lr: float = 3e-4
    """Peak learning rate of the critic."""
    critic_zero: ZeroSettings = ZeroSettings()
    """As `zero`, of the critic's trainer."""
    critic_schedule: Schedule = Schedule()
    """Warm-up and decay of the critic's learning rate."""
    critic_warmup: int = 5
    """Batches on which the critic trains alone: the policy makes versions, but does not change."""
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
    clip: float = 0.2
    """Largest distance of the importance ratio from 1."""
    value_clip: float = 0.2
    """Largest distance of a value from the one that made the advantages; 0 does not clip."""
    cpus: float | None = None
    """Cores of each process that runs a model, except generators. None: 1 with GPUs, else 0.5 / `num_trainers`."""


def graph(cfg: PPO) -> Graph:
    critic_model = replace(cfg.model, model=cfg.critic or cfg.policy, name="critic")
    estimate = Estimate("gae", gamma=cfg.gamma, lam=cfg.lam, kl_coef=cfg.kl_coef, kl_estimator=cfg.kl_estimator)
    adaptive_kl = None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target)
    cpus = cfg.cpus if cfg.cpus is not None else 1 if cfg.gpus else 0.5 / cfg.num_trainers

    g = Graph("ppo")
    prompts = g.add("prompts", cfg.prompts())
    generator = g.add("generator", cfg.generator(cfg.sampling), replicas=cfg.num_generators, gpus=cfg.gpus)
    judge = cfg.scoring(normalise=True)
    reward = g.add("reward", judge, cpus=cpus if cfg.reward_model else None, gpus=cfg.reward_gpus)
    initial = Reference(cfg.model, temperature=cfg.temperature, dtype=cfg.dtype)
    reference = g.add("reference", initial, cpus=cpus, gpus=cfg.one_gpu)
    advantage = g.add("advantage", JoinedAdvantage(estimate, size=cfg.group_size))
    batcher = g.add("batcher", cfg.batcher(whiten="full", estimate=estimate, adaptive_kl=adaptive_kl))
    values = Critic(critic_model, dtype=cfg.dtype, token_budget=cfg.token_budget)
    critic = g.add("critic", values, cpus=cpus, gpus=cfg.one_gpu)
    actor = g.add(
        "actor",
        cfg.trainer(PolicyObjective(clip_low=cfg.clip, clip_high=cfg.clip), start_after=cfg.critic_warmup),
        replicas=cfg.num_trainers,
        cpus=cpus,
        gpus=cfg.one_gpu,
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
        ),
        replicas=cfg.num_trainers,
        cpus=cpus,
        gpus=cfg.one_gpu,
    )
    g.time_share(actor, reference)
    g.time_share(critic_trainer, critic)
    if cfg.reward_model:
        g.time_share(reference, reward)

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(generator.rollouts, reference.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(reference.referenced, advantage.referenced)
    g.connect(advantage.groups, batcher.groups)
    g.call(batcher.values, critic.requests)
    g.connect(batcher.batches, actor.batches, dispatch="gang")
    g.connect(batcher.batches, critic_trainer.batches, dispatch="gang")
    g.latest(actor.weights, generator.weights)
    g.latest(critic_trainer.weights, critic.weights)
    g.admit(
        prompts.prompts,
        until=(generator.weights, critic.weights),
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.look_ahead,
    )
    evaluate(g, cfg, generator)
    return g
