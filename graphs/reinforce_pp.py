"""REINFORCE++ (arXiv 2501.03262): no critic; advantages normalised over the whole batch, KL inside the reward.

flowrl run graphs/reinforce_pp.py --steps 60
flowrl run graphs/reinforce_pp.py --baseline --steps 60
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    AdaptiveKL,
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
class ReinforcePP:
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

    baseline: bool = False
    """REINFORCE++-baseline: the group's mean is taken from each reward before the batch is normalised."""
    kl_coef: float = 0.001
    """Weight of the KL to the starting weights: in the reward token by token, with `baseline` in the loss. 0: none."""
    kl_target: float | None = None
    """Steer `kl_coef` towards this KL of a response, in nats; for the KL in the reward."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    optimizer_steps: int = 1
    """Mini-batches into which a batch is cut."""


def graph(cfg: ReinforcePP) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens)
    evaluated = sampling if cfg.evaluate_samples > 1 else None
    in_loss = cfg.kl_coef if cfg.baseline else 0.0
    estimate = Estimate("reinforce_baseline") if cfg.baseline else Estimate("reinforce", kl_coef=cfg.kl_coef)
    objective = PolicyObjective(clip_low=cfg.clip_low, clip_high=cfg.clip_high, kl_coef=in_loss, kl_estimator="k2")

    g = Graph("reinforce_pp")
    prompts = g.add("prompts", PromptSource(cfg.task, policy, repeat=cfg.group_size))
    generator = g.add(
        "generator",
        Generator(policy, sampling=sampling, evaluation=evaluated, lora=cfg.lora),
        replicas=cfg.num_generators,
        gpus=cfg.gpus,
    )
    reward = g.add("reward", Reward(cfg.task, shaping=Shaping(negate=cfg.negate_rewards)))
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size))
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
    trainer = g.add(
        "trainer",
        Trainer(
            policy,
            objective=objective,
            lr=cfg.lr,
            temperature=cfg.temperature,
            schedule=cfg.schedule,
            zero=cfg.zero.with_dtype(cfg.dtype),
            lora=cfg.lora,
        ),
        replicas=cfg.num_trainers,
        gpus=cfg.gpus,
    )

    g.connect(prompts.prompts, generator.prompts)
    if cfg.kl_coef:
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
    g.admit(prompts.prompts, until=generator.weights, staleness=cfg.staleness)

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
