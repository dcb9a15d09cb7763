"""Two teachers and a reward in one loss: on-policy distillation by domain, beside GRPO.

Each prompt belongs to a domain, and the teacher of that domain scores the tokens of its answers; the task's reward
compares the answers to one prompt. In a mixture, the first data set is the first teacher's domain, all others are the
second's; in a single one, prompts are shared out by their ids.

    advantage   A_t = (R_i − mean R) / std R + distill · (log π_teacher(token t) − log π_b(token t)); π_b sampled it
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token

flowrl run teachers --steps 60
"""

import zlib
from dataclasses import dataclass, replace

from flowrl import Graph, Group, In, Node, Out, Sample, Trainable
from flowrl.nodes import GroupAdvantage, Teacher
from flowrl.options import (
    OnlineConfig,
    PolicyLoss,
    ResponseShaping,
    RewardOptions,
    TeacherSize,
    add_evaluation,
    add_reference,
    make_batcher,
    make_generator,
    make_prompts,
    make_reward,
    make_trainer,
    train_on_groups,
)
from flowrl.tasks.rows import OF_TASK
from flowrl.training.advantages import distillation_advantages


class ByDomain(Node):
    """Sends each sample to the teacher of its prompt's domain."""

    rollouts: In[Sample]
    first: Out[Sample]
    second: Out[Sample]

    def __init__(self, sources: tuple[str, ...]) -> None:
        self.sources = sources

    async def run(self) -> None:
        async for sample in self.rollouts:
            is_first = zlib.crc32(sample.prompt_id.encode()) % 2 == 0
            if len(self.sources) > 1:
                is_first = sample.columns[OF_TASK] == self.sources[0]
            self.context.metric("samples_of_first", is_first)
            await (self.first if is_first else self.second).send(sample)


class AddTeachers(Node):
    """Adds what the teachers say of each token to the advantages from rewards."""

    rewarded: In[Group]
    groups: Out[Group]

    def __init__(self, distill: float) -> None:
        self.distill = distill

    async def run(self) -> None:
        async for group in self.rewarded:
            await self.groups.send(replace(group, samples=tuple(map(self.add_teacher, group.samples))))

    def add_teacher(self, sample: Trainable) -> Trainable:
        assert sample.teacher_logprobs is not None, "every way leads past a teacher"
        gap_T = distillation_advantages(sample.teacher_logprobs, sample.behavior_logprobs, sample.policy_mask)
        return Trainable.of(sample, sample.advantages + self.distill * gap_T)


@dataclass(frozen=True)
class TwoTeachers(OnlineConfig):
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    loss: PolicyLoss = PolicyLoss()

    teacher: TeacherSize = TeacherSize()
    """The teacher of the first domain."""
    second_teacher: str = "tiny_teacher"
    """The model of the second domain's teacher: as --teacher."""
    distill: float = 0.5
    """Weight of the distillation, beside 1 for the reward."""


def graph(cfg: TwoTeachers) -> Graph:
    scoring = {"student": cfg.model, "temperature": cfg.sampling.temperature, **cfg.trainer.scoring(cfg.teacher)}
    objective = cfg.loss.build(cfg.sampling.max_tokens)

    g = Graph("teachers")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    domain = g.add("domain", ByDomain(tuple(cfg.data.task.source_names)))
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    advantage = g.add("advantage", GroupAdvantage("group_norm", size=cfg.sampling.group_size))
    taught = g.add("taught", AddTeachers(cfg.distill))
    batcher = g.add("batcher", make_batcher(cfg))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, generator.prompts)
    rollouts, followers = add_reference(g, cfg, cfg.loss.compared_with(cfg), generator.rollouts, trainer)
    g.connect(rollouts, domain.rollouts)
    models = {"teacher": (cfg.teacher.model, domain.first), "second_teacher": (cfg.second_teacher, domain.second)}
    for name, (model, out) in models.items():
        teacher = g.add(name, Teacher(cfg.model.with_model(model), **scoring), **cfg.place(cfg.teacher))
        g.connect(out, teacher.rollouts)
        g.connect(teacher.scored, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, taught.rewarded)
    train_on_groups(g, cfg, prompts.prompts, taught.groups, batcher, trainer, generator, followers=followers)
    add_evaluation(g, cfg, generator)
    cfg.share_devices(g, ("trainer", "teacher", "second_teacher", "reference"))
    return g
