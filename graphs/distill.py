"""On-policy distillation: the student samples, a teacher scores every token, and the student learns from the scores.

flowrl run distill --steps 60
flowrl run distill --policy /models/Qwen3-0.6B --teacher /models/Qwen3-8B --task train.jsonl --steps 200
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import evaluate
from flowrl.loss_options import LossOptions
from flowrl.nodes import Teacher, TeacherAdvantage
from flowrl.prompt_options import PromptOptions
from flowrl.role_options import TeacherSize
from flowrl.training.loss.distillation_objective import ReverseKL
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class Distill(LossOptions, PromptOptions):
    policy: str = "tiny"
    """The student: tiny, smollm2, or the path of a Hugging Face model directory."""
    temperature: float = 1.0
    """Of student and teacher."""
    group_size: int = 8
    """Samples of one prompt. They are not compared with each other, so 1 is enough."""
    negate_rewards: bool = False
    """A control experiment: the student learns the opposite of what the teacher prefers and must get worse."""

    teacher: TeacherSize = TeacherSize()
    """The model that scores every token."""
    exact: bool = False
    """The student learns the teacher's whole next-token distributions (exact reverse KL), not sampled tokens alone."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.task.reward and not self.evaluates:
            yield "--task.reward scores held-out answers here, for the teacher scores the others, and --evaluate is 0"
        if self.exact and self.objective != PolicyObjective():
            yield "--exact trains the reverse KL itself, without advantages; leave --objective out"


def graph(cfg: Distill) -> Graph:
    student, teacher = cfg.model, cfg.model.like(cfg.teacher.model)
    objective = ReverseKL(negate=cfg.negate_rewards) if cfg.exact else cfg.loss(cfg.max_tokens)

    g = Graph("distill")
    prompts = g.add("prompts", cfg.prompts(student))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    judge = g.add(
        "teacher",
        Teacher(teacher, student=student, temperature=cfg.temperature, exact=cfg.exact, **cfg.scoring(cfg.teacher)),
        **cfg.place(cfg.teacher),
    )
    advantage = g.add("advantage", TeacherAdvantage(size=cfg.group_size, negate=cfg.negate_rewards))
    batcher = g.add("batcher", cfg.batcher())
    learner = cfg.make_trainer(objective, teacher=teacher if cfg.exact else None)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer))
    cfg.take_turns(g, ("trainer", "teacher"))

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
