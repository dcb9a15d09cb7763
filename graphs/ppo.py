"""PPO: an actor and a critic, trained side by side on the same batches, each with its own weights edge.

Every sample is scored and compared with the reference at the same time; both branches meet by sample.
When a batch is formed the critic values all of it at one version, and GAE makes the advantages.

flowrl run graphs/ppo.py --steps 60
flowrl run graphs/ppo.py --reward-model runs/reward_model/checkpoints/step_000100 --steps 60
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    AdaptiveKL,
    Critic,
    Evaluation,
    Generator,
    JoinedAdvantage,
    PromptSource,
    Reference,
    Reward,
    RewardModel,
    Sampling,
    Shaping,
    TokenBatch,
    Trainer,
)
from flowrl.tasks import Task
from flowrl.training.advantage.estimate import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.value_objective import ValueObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class PPO:
    policy: str = "tiny"
    """tiny, smollm2, or the path of a Hugging Face model directory."""
    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""
    lr: float = 1e-4
    """Of the actor."""
    max_tokens: int = 32
    """Longest response."""
    temperature: float = 1.0
    staleness: int = 1
    """Largest staleness of any trained token, in versions. 0 is synchronous."""
    group_size: int = 4
    """Samples of one prompt."""
    groups_per_step: int = 32
    """Prompts of one batch."""
    evaluate: int = 512
    """Held-out prompts asked before and after; 0 for none."""
    evaluate_samples: int = 1
    """Answers to each of them: one is greedy, several are sampled at `temperature`."""
    evaluate_every: int = 0
    """Steps between evaluations during training; 0 for none."""
    evaluate_also: tuple[str, ...] = ()
    """Further tasks that are asked then, each judged by its own verifier."""
    num_generators: int = 1
    num_trainers: int = 1
    """ZeRO ranks of the actor, and as many of the critic."""
    gpus: float = 0
    """GPUs of each model process. Actor and reference take turns on theirs, so do critic trainer and critic."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations of all trained models."""
    token_budget: int = 8192
    """Most tokens of a micro-batch, padding included."""
    negate_rewards: bool = False
    """A control: every reward's sign turned. The policy must get worse."""
    lora: LoRA = LoRA()
    """Train adapters of the actor instead of all its weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the actor."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the actor's learning rate."""

    reward_model: str = ""
    """Directory of a trained reward model that judges the responses; empty: the task's verifier."""
    critic: str = ""
    """Model that the critic starts from; empty: the policy. A reward model keeps its head, else one is drawn."""
    critic_lr: float = 3e-4
    critic_zero: ZeroSettings = ZeroSettings()
    """As `zero`, of the critic's trainer."""
    critic_schedule: Schedule = Schedule()
    critic_warmup: int = 5
    """Batches on which the critic trains alone: the policy makes versions, but does not change."""
    gamma: float = 1.0
    lam: float = 0.95
    """λ of GAE."""
    kl_coef: float = 0.01
    """Weight of the KL to the starting weights, token by token in the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_target: float | None = None
    """Steer `kl_coef` towards this KL of a response, in nats."""
    clip: float = 0.2
    """How far the ratio may move from 1."""
    value_clip: float = 0.2
    """How far a value may move from the one that made the advantages; 0 does not clip."""
    optimizer_steps: int = 2
    """Mini-batches into which a batch is cut."""
    epochs: int = 1
    """Passes over a batch."""
    cpus: float | None = None
    """Cores of the actor, and of the critic trainer. None: with GPUs one, without half a one, shared by the two."""


def graph(cfg: PPO) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    critic_model = Policy(cfg.critic or cfg.policy, task=cfg.task, name="critic")
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens)
    estimate = Estimate("gae", gamma=cfg.gamma, lam=cfg.lam, kl_coef=cfg.kl_coef, kl_estimator=cfg.kl_estimator)
    shaping = Shaping(negate=cfg.negate_rewards)
    cpus = cfg.cpus if cfg.cpus is not None else 1 if cfg.gpus else 0.5 / cfg.num_trainers

    g = Graph("ppo")
    prompts = g.add("prompts", PromptSource(cfg.task, policy, repeat=cfg.group_size))
    generator = g.add(
        "generator",
        Generator(policy, sampling=sampling, evaluation=sampling if cfg.evaluate_samples > 1 else None, lora=cfg.lora),
        replicas=cfg.num_generators,
        gpus=cfg.gpus,
    )
    judge: Reward | RewardModel = (
        RewardModel(cfg.reward_model, policy, cfg.task, normalise=True, shaping=shaping, dtype=cfg.dtype)
        if cfg.reward_model
        else Reward(cfg.task, shaping=shaping)
    )
    judge_cpus, judge_gpus = (cpus, cfg.gpus) if cfg.reward_model else (None, None)
    reward = g.add("reward", judge, cpus=judge_cpus, gpus=judge_gpus)
    fixed = Reference(policy, temperature=cfg.temperature, dtype=cfg.dtype)
    reference = g.add("reference", fixed, cpus=cpus, gpus=cfg.gpus)
    advantage = g.add("advantage", JoinedAdvantage(estimate, size=cfg.group_size))
    batcher = g.add(
        "batcher",
        TokenBatch(
            cfg.groups_per_step,
            token_budget=cfg.token_budget,
            optimizer_steps=cfg.optimizer_steps,
            whiten="full",
            estimate=estimate,
            adaptive_kl=None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target),
        ),
    )
    critic = g.add(
        "critic", Critic(critic_model, dtype=cfg.dtype, token_budget=cfg.token_budget), cpus=cpus, gpus=cfg.gpus
    )
    actor = g.add(
        "actor",
        Trainer(
            policy,
            objective=PolicyObjective(clip_low=cfg.clip, clip_high=cfg.clip),
            lr=cfg.lr,
            epochs=cfg.epochs,
            temperature=cfg.temperature,
            schedule=cfg.schedule,
            zero=cfg.zero.with_dtype(cfg.dtype),
            lora=cfg.lora,
            start_after=cfg.critic_warmup,
        ),
        replicas=cfg.num_trainers,
        cpus=cpus,
        gpus=cfg.gpus,
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
        gpus=cfg.gpus,
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
    g.admit(prompts.prompts, until=(generator.weights, critic.weights), staleness=cfg.staleness)

    if cfg.evaluate:
        held_out = Evaluation(
            cfg.task,
            policy,
            num_prompts=cfg.evaluate,
            num_samples=cfg.evaluate_samples,
            every=cfg.evaluate_every,
            also=cfg.evaluate_also,
        )
        evaluation = g.add("evaluation", held_out)
        g.call(evaluation.generate, generator.requests)
    return g
