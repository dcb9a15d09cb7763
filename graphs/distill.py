"""On-policy distillation: the student samples, a teacher judges every token, the student learns from that.

flowrl run graphs/distill.py --steps 60
flowrl run graphs/distill.py --policy /models/Qwen3-0.6B --teacher /models/Qwen3-8B --task train.jsonl --steps 200
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    Evaluation,
    Generator,
    PromptSource,
    Sampling,
    Teacher,
    TeacherAdvantage,
    TokenBatch,
    Trainer,
)
from flowrl.tasks import Task
from flowrl.training.loss.distillation_objective import ReverseKL
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class Distill:
    policy: str = "tiny"
    """The student: tiny, smollm2, or the path of a Hugging Face model directory."""
    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""
    lr: float = 1e-4
    max_tokens: int = 32
    """Longest response."""
    temperature: float = 1.0
    """Of student and teacher."""
    staleness: int = 1
    """Largest staleness of any trained token, in versions. 0 is synchronous."""
    group_size: int = 8
    """Samples of one prompt. They are not compared with each other: 1 will do."""
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
    """GPUs of each generator and trainer, and of the teacher."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's parameters and activations."""
    token_budget: int = 8192
    """Most tokens of a micro-batch, padding included."""
    negate_rewards: bool = False
    """A control: what the teacher likes is taken for what it dislikes. The policy must get worse."""
    lora: LoRA = LoRA()
    """Train adapters instead of all weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the trainer."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the learning rate."""

    teacher: str = "tiny_teacher"
    """tiny_teacher (for tiny), or the path of a model directory with the student's vocabulary."""
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    exact: bool = False
    """The student learns the teacher's whole next-token distributions (exact reverse KL), not sampled tokens alone."""


def graph(cfg: Distill) -> Graph:
    student, teacher = Policy(cfg.policy, task=cfg.task), Policy(cfg.teacher, task=cfg.task)
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens)

    g = Graph("distill")
    prompts = g.add("prompts", PromptSource(cfg.task, student, repeat=cfg.group_size))
    generator = g.add(
        "generator",
        Generator(student, sampling=sampling, evaluation=sampling if cfg.evaluate_samples > 1 else None, lora=cfg.lora),
        replicas=cfg.num_generators,
        gpus=cfg.gpus,
    )
    judge = g.add(
        "teacher",
        Teacher(teacher, student=student, temperature=cfg.temperature, dtype=cfg.teacher_dtype, exact=cfg.exact),
        gpus=cfg.gpus,
    )
    advantage = g.add("advantage", TeacherAdvantage(size=cfg.group_size, negate=cfg.negate_rewards))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=cfg.token_budget))
    trainer = g.add(
        "trainer",
        Trainer(
            student,
            objective=ReverseKL(negate=cfg.negate_rewards) if cfg.exact else PolicyObjective(),
            teacher=teacher if cfg.exact else None,
            lr=cfg.lr,
            temperature=cfg.temperature,
            schedule=cfg.schedule,
            zero=cfg.zero.with_dtype(cfg.dtype),
            lora=cfg.lora,
        ),
        replicas=cfg.num_trainers,
        gpus=cfg.gpus,
    )
    g.time_share(trainer, judge)

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, judge.rollouts)
    g.connect(judge.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=cfg.staleness)

    if cfg.evaluate:
        held_out = Evaluation(
            cfg.task,
            student,
            num_prompts=cfg.evaluate,
            num_samples=cfg.evaluate_samples,
            every=cfg.evaluate_every,
            also=cfg.evaluate_also,
        )
        evaluation = g.add("evaluation", held_out)
        g.call(evaluation.generate, generator.requests)
    return g
