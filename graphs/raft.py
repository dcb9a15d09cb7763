"""RAFT (arXiv 2304.06767): of several answers to a prompt the best is imitated; the next come from the result.

flowrl run graphs/raft.py --steps 100
flowrl run graphs/raft.py --judge runs/reward_model/checkpoints/step_000200 --steps 100
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    BestOfN,
    Evaluation,
    Generator,
    PromptSource,
    Reward,
    RewardModel,
    Sampling,
    Shaping,
    TokenBatch,
    Trainer,
)
from flowrl.tasks import Task
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class RAFT:
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
    """ZeRO ranks."""
    gpus: float = 0
    """GPUs of each generator and trainer, and of a trained judge."""
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

    judge: str = ""
    """Directory of a trained reward model, which judges in the place of the task's own reward; "": none."""
    least_reward: float | None = None
    """Prompts whose best answer has a lower raw reward are left out."""
    optimizer_steps: int = 1
    """Mini-batches into which a batch is cut."""


def graph(cfg: RAFT) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens)
    evaluated = sampling if cfg.evaluate_samples > 1 else None
    imitate = PolicyObjective(kind="reinforce", correction=None)
    shaping = Shaping(negate=cfg.negate_rewards)
    judge: Reward | RewardModel = (
        RewardModel(cfg.judge, policy, cfg.task, shaping=shaping) if cfg.judge else Reward(cfg.task, shaping=shaping)
    )

    g = Graph("raft")
    prompts = g.add("prompts", PromptSource(cfg.task, policy, repeat=cfg.group_size))
    generator = g.add(
        "generator",
        Generator(policy, sampling=sampling, evaluation=evaluated, lora=cfg.lora),
        replicas=cfg.num_generators,
        gpus=cfg.gpus,
    )
    reward = g.add("reward", judge, gpus=cfg.gpus if cfg.judge else 0)
    best = g.add("best", BestOfN(size=cfg.group_size, least_reward=cfg.least_reward))
    batcher = g.add(
        "batcher",
        TokenBatch(cfg.groups_per_step, token_budget=cfg.token_budget, optimizer_steps=cfg.optimizer_steps),
    )
    trainer = g.add(
        "trainer",
        Trainer(
            policy,
            objective=imitate,
            lr=cfg.lr,
            temperature=cfg.temperature,
            schedule=cfg.schedule,
            zero=cfg.zero.with_dtype(cfg.dtype),
            lora=cfg.lora,
        ),
        replicas=cfg.num_trainers,
        gpus=cfg.gpus,
    )
    if cfg.judge:
        g.time_share(trainer, reward)

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, best.scored)
    g.connect(best.groups, batcher.groups)
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
