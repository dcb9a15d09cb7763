"""On-policy distillation: the student samples, a teacher scores every token, and the student learns from the scores.

flowrl run distill --steps 60
flowrl run distill --policy /models/Qwen3-0.6B --teacher /models/Qwen3-8B --task train.jsonl --steps 200
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import evaluate
from flowrl.nodes import Teacher, TeacherAdvantage
from flowrl.prompt_options import PromptOptions
from flowrl.training.loss.distillation_objective import ReverseKL
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class Distill(PromptOptions):
    policy: str = "tiny"
    """The student: tiny, smollm2, or the path of a Hugging Face model directory."""
    temperature: float = 1.0
    """Of student and teacher."""
    group_size: int = 8
    """Samples of one prompt. They are not compared with each other, so 1 is enough."""
    negate_rewards: bool = False
    """A control experiment: the student learns the opposite of what the teacher prefers and must get worse."""

    teacher: str = "tiny_teacher"
    """tiny_teacher (for tiny), or the path of a model directory with the student's vocabulary."""
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    exact: bool = False
    """The student learns the teacher's whole next-token distributions (exact reverse KL), not sampled tokens alone."""


def graph(cfg: Distill) -> Graph:
    student, teacher = cfg.model, cfg.model.like(cfg.teacher)
    objective = ReverseKL(negate=cfg.negate_rewards) if cfg.exact else PolicyObjective()

    g = Graph("distill")
    prompts = g.add("prompts", cfg.prompts(student))
    generator = g.add("generator", cfg.generator(cfg.sampling), replicas=cfg.num_generators, gpus=cfg.gpus)
    judge = g.add(
        "teacher",
        Teacher(teacher, student=student, temperature=cfg.temperature, dtype=cfg.teacher_dtype, exact=cfg.exact),
        gpus=cfg.one_gpu,
    )
    advantage = g.add("advantage", TeacherAdvantage(size=cfg.group_size, negate=cfg.negate_rewards))
    batcher = g.add("batcher", cfg.batcher())
    learner = cfg.trainer(objective, teacher=teacher if cfg.exact else None)
    trainer = g.add("trainer", learner, replicas=cfg.num_trainers, gpus=cfg.one_gpu)
    g.time_share(trainer, judge)

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, judge.rollouts)
    g.connect(judge.scored, advantage.scored)
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
    evaluate(g, cfg, generator)
    return g
