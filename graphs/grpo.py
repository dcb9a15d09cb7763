"""GRPO: groups of samples of one prompt, scored, compared with each other, trained on while the next are sampled.

flowrl run graphs/grpo.py --steps 60
flowrl run graphs/grpo.py --policy smollm2 --task reasoning_gym/chain_sum --steps 60
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    AdaptiveKL,
    DynamicSampling,
    Evaluation,
    Generator,
    GroupAdvantage,
    PromptSource,
    Reference,
    Reward,
    Sampling,
    Shaping,
    TokenBatch,
    Trainer,
)
from flowrl.tasks import Task
from flowrl.training.advantage.estimate import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class GRPO:
    policy: str = "tiny"
    """tiny, smollm2, or the path of a Hugging Face model directory."""
    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""
    lr: float = 1e-4
    max_tokens: int = 32
    """Longest response."""
    temperature: float = 1.0
    staleness: int = 1
    """Largest staleness of any trained token, in versions. 0 is synchronous."""
    group_size: int = 8
    """Samples of one prompt."""
    groups_per_step: int = 16
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
    """ZeRO ranks."""
    gpus: float = 0
    """GPUs of each generator, trainer and reference."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's parameters and activations."""
    token_budget: int = 8192
    """Most tokens of a micro-batch, padding included."""
    negate_rewards: bool = False
    """A control: every reward's sign turned. The policy must get worse."""
    lora: LoRA = LoRA()
    """Train adapters instead of all weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the trainer."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the learning rate."""

    advantage: Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce"] = "group_norm"
    """What a sample is compared with: its group's mean, with or without its spread, the others, or nothing."""
    objective: PolicyObjective = PolicyObjective()
    """The loss: ppo, gspo, cispo or reinforce; its options as in --objective.kl-coef 0.01. A KL adds a
    reference, unless adapters are trained."""
    optimizer_steps: int = 1
    """Mini-batches into which a batch is cut."""
    epochs: int = 1
    """Passes over each batch."""
    whiten: Literal["off", "full", "mean"] | None = None
    """Advantages normalised over the batch; None: full for reinforce and reinforce_baseline, else off."""
    normalise_rewards: bool = False
    """Rewards less their running mean, over their running standard deviation."""
    gamma: float = 1.0
    """Discount, for `advantage` reinforce."""
    reward_kl_coef: float = 0.0
    """Weight of the KL to the starting weights inside the reward; above 0 adds a reference."""
    reward_kl: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that KL."""
    kl_before_baseline: bool = False
    """Take a response's whole KL from its reward before the group's baseline, not token by token."""
    kl_target: float | None = None
    """Steer `reward_kl_coef` towards this KL of a response, in nats."""
    on_limit: Literal["wait", "mask"] = "wait"
    """At the limit of staleness generation waits, or tokens beyond it are masked out of the loss."""
    look_ahead: int = 1
    """Groups among which the batcher may choose a finished one; 1 is admission order."""
    cpus: float | None = None
    """Cores of each generator and trainer; None: one, or less for ranks that would not fit."""
    time_share: bool = False
    """Generator and trainer take turns on the same cores and GPUs instead of working side by side."""
    dynamic_sampling: bool = False
    """Filter groups whose rewards are all equal, which teach nothing, and sample others in their place."""
    shuffle_rewards: bool = False
    """A control: rewards dealt out at random within each group. Nothing must be learnt."""


def graph(cfg: GRPO) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens)
    whitened = cfg.whiten or ("full" if cfg.advantage.startswith("reinforce") else "off")
    estimate = Estimate(
        cfg.advantage,
        gamma=cfg.gamma,
        kl_coef=cfg.reward_kl_coef,
        kl_estimator=cfg.reward_kl,
        kl_before_baseline=cfg.kl_before_baseline,
        shuffle_rewards=cfg.shuffle_rewards,
    )
    dynamic = DynamicSampling(cfg.groups_per_step) if cfg.dynamic_sampling else None

    g = Graph("grpo")
    prompts = g.add("prompts", PromptSource(cfg.task, policy, repeat=cfg.group_size))
    generator = g.add(
        "generator",
        Generator(policy, sampling=sampling, evaluation=sampling if cfg.evaluate_samples > 1 else None, lora=cfg.lora),
        replicas=cfg.num_generators,
        cpus=cfg.cpus,
        gpus=cfg.gpus,
    )
    reward = g.add("reward", Reward(cfg.task, shaping=Shaping(negate=cfg.negate_rewards)))
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=dynamic))
    batcher = g.add(
        "batcher",
        TokenBatch(
            cfg.groups_per_step,
            token_budget=cfg.token_budget,
            optimizer_steps=cfg.optimizer_steps,
            whiten=whitened,
            estimate=estimate,
            normalise_rewards=cfg.normalise_rewards,
            adaptive_kl=None if cfg.kl_target is None else AdaptiveKL(cfg.kl_target),
        ),
    )
    trainer = g.add(
        "trainer",
        Trainer(
            policy,
            objective=cfg.objective,
            lr=cfg.lr,
            epochs=cfg.epochs,
            temperature=cfg.temperature,
            schedule=cfg.schedule,
            zero=cfg.zero.with_dtype(cfg.dtype),
            lora=cfg.lora,
        ),
        replicas=cfg.num_trainers,
        cpus=cfg.cpus,
        gpus=cfg.gpus,
    )
    if cfg.time_share:
        g.time_share(generator, trainer)

    g.connect(prompts.prompts, generator.prompts)
    # A trainer of adapters has the reference in itself, but only when the samples have reached it.
    if cfg.reward_kl_coef or (cfg.objective.kl_coef and not cfg.lora.rank):
        reference = g.add("reference", Reference(policy, temperature=cfg.temperature, dtype=cfg.dtype), gpus=cfg.gpus)
        g.connect(generator.rollouts, reference.rollouts)
        g.connect(reference.referenced, reward.rollouts)
        g.time_share(trainer, reference)
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
