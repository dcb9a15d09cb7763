"""Distillation: a teacher scores every token of the student's samples, or of the data's answers, for the student.

    advantage   A_t = log π_teacher(token t) − log π(token t), at every sampled token, and the loss is that of a policy
    --exact     loss = KL(π ‖ π_teacher) of whole next-token distributions; with --beta the divergence of GKD
    --shown     the teacher reads this first: the student's own model can teach it so (SDFT, arXiv 2601.19897)

flowrl run distill --steps 60
flowrl run distill --beta 0.5 --lmbda 0.5 --steps 60
flowrl run distill --beta 0 --lmbda 0 --policy /models/small --teacher /models/large --task answers.jsonl --steps 200
flowrl run distill --policy /models/Qwen3-0.6B --teacher /models/Qwen3-8B --task train.jsonl --steps 200
flowrl run distill --policy /models/a --teacher /models/a --task train.jsonl --shown "An answer: {answer}" --steps 200
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import GivenAnswers, Teacher, TeacherAdvantage
from flowrl.options import (
    ANSWERING,
    OnlineConfig,
    PolicyLoss,
    TeacherSize,
    add_evaluation,
    add_offline_evaluation,
    add_reference,
    find_unused,
    make_batcher,
    make_generator,
    make_prompts,
    make_trainer,
    too_low,
    train_on_groups,
)
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.token_objectives import GeneralizedJSD, ReverseKL


@dataclass(frozen=True)
class Distill(OnlineConfig):
    help_texts = {
        "policy": "The student: tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub.",
        "temperature": "Temperature of student and teacher.",
        "group_size": "Number of samples for one prompt. They are not compared with each other, so 1 is enough.",
    }

    loss: PolicyLoss = PolicyLoss()

    negate_rewards: bool = False
    """A control experiment: the student learns the opposite of what the teacher prefers and must get worse."""

    teacher: TeacherSize = TeacherSize()
    """The model that scores every token."""
    exact: bool = False
    """The student learns the teacher's whole next-token distributions (exact reverse KL), not only the sampled
    tokens."""
    beta: float | None = None
    """Learn whole distributions by the generalized Jensen-Shannon divergence of GKD: 0 is the forward KL (the
    cross-entropy with the teacher), 1 the reverse KL. None: as `exact` says."""
    shown: str = ""
    """What the teacher reads before each conversation and the student does not, with columns of the row in braces, as
    in "An answer: {answer}". With the student's own model as --teacher this is self-distillation (SDFT)."""
    lmbda: float = 1.0
    """Share of the prompts that the student answers; the other prompts have the answers of the data, such as a
    teacher's. 0: nothing is sampled, and only an evaluation needs a generator."""

    max_answer_tokens: int = 2048
    """Maximum number of tokens in a prompt with the data's answer; --too-long says what happens to longer ones."""

    @property
    def compares_whole(self) -> bool:
        """Whether whole distributions are compared."""
        return self.exact or self.beta is not None

    def answers(self, student: Policy) -> GivenAnswers:
        """The node that gives the data's answers to the prompts that the student does not answer."""
        return GivenAnswers(
            self.data.task,
            student,
            share=1 - self.lmbda,
            max_tokens=self.max_answer_tokens,
            too_long=self.data.too_long,
            part=self.evaluation.trained_part(self.data.task),
        )

    def judge(self, student: Policy, *, exact: bool) -> Teacher:
        """The node that scores the student's tokens; `exact`: for whole distributions, which the trainer computes."""
        teacher, scoring = self.model.with_model(self.teacher.model), self.trainer.scoring(self.teacher)
        settings = {"temperature": self.sampling.temperature, "exact": exact, "shown": self.shown, **scoring}
        return Teacher(teacher, student=student, **settings)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.beta is not None and not 0 <= self.beta <= 1:
            yield f"--beta is {self.beta}; it has to be from 0 to 1"
        if not 0 <= self.lmbda <= 1:
            yield f"--lmbda is {self.lmbda}; it has to be from 0 to 1"
        if self.lmbda < 1 and not self.compares_whole:
            yield "--lmbda below 1 trains on answers that the student has not sampled, which needs --beta or --exact"
        if self.lmbda < 1 and self.shown:
            yield "--shown is for answers that the student samples, and --lmbda is below 1; leave one of the two out"
        yield from too_low(self, max_answer_tokens=2)
        if self.lmbda == 1:
            why = "every prompt has answers of the student, for --lmbda is 1; lower it, or leave this out"
            yield from find_unused(self, ("max_answer_tokens",), why)
        if not self.lmbda:
            why = "nothing is sampled, for --lmbda is 0: every prompt has the one answer of the data; leave this out"
            names = ("staleness", "on_limit", "look_ahead", "overlong_filter")
            yield from find_unused(self, names if self.sampling.group_size == 1 else ("group_size", *names), why)
        if self.data.task.reward and not self.evaluation.evaluates:
            yield "--task.reward scores held-out answers here, for the teacher scores the others, and --evaluate is 0"
        if self.exact and self.beta is not None:
            yield "--exact is the same as --beta 1; give one of the two"
        if self.compares_whole and self.loss.objective != PolicyObjective():
            what = "--exact trains the reverse KL" if self.exact else "--beta trains the divergence"
            yield f"{what} itself, without advantages; leave --objective out"

    @property
    def of_evaluations(self) -> tuple[str, ...]:
        sampled = ("reward_timeout_s",) if self.lmbda else (*ANSWERING, "max_tokens")
        return (*super().of_evaluations, *sampled)


def graph(cfg: Distill) -> Graph:
    student, teacher = cfg.model, cfg.model.with_model(cfg.teacher.model)
    whole, negate = cfg.compares_whole, cfg.negate_rewards
    exact = ReverseKL(negate=negate) if cfg.beta is None else GeneralizedJSD(negate=negate, beta=cfg.beta)

    if not cfg.lmbda:
        return offline_graph(replace(cfg, sampling=replace(cfg.sampling, group_size=1)), exact)

    g = Graph("distill")
    prompts = g.add("prompts", make_prompts(cfg, student))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    judge = g.add("teacher", cfg.judge(student, exact=whole), **cfg.place(cfg.teacher))
    advantage = g.add("advantage", TeacherAdvantage(size=cfg.sampling.group_size, negate=negate))
    batcher = g.add("batcher", make_batcher(cfg))
    objective = exact if whole else cfg.loss.build(cfg.sampling.max_tokens)
    learner = make_trainer(cfg, objective, teacher=teacher if whole else None)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer.size))

    rollouts, followers = add_reference(g, cfg, cfg.loss.compared_with(cfg), generator.rollouts, trainer)
    g.connect(rollouts, judge.rollouts)
    if cfg.lmbda == 1:
        g.connect(prompts.prompts, generator.prompts)
    else:
        given = g.add("answers", cfg.answers(student))
        g.connect(prompts.prompts, given.prompts)
        g.connect(given.rollouts, judge.rollouts)
        g.connect(given.others, generator.prompts)
    g.connect(judge.scored, advantage.scored)
    train_on_groups(g, cfg, prompts.prompts, advantage.groups, batcher, trainer, generator, followers=followers)
    add_evaluation(g, cfg, generator)
    cfg.share_devices(g, ("trainer", "teacher", "reference"))
    return g


def offline_graph(cfg: Distill, objective: ReverseKL) -> Graph:
    """The graph that samples nothing: every prompt has the data's answer."""
    student, teacher = cfg.model, cfg.model.with_model(cfg.teacher.model)

    g = Graph("distill")
    prompts = g.add("prompts", make_prompts(cfg, student))
    answers = g.add("answers", cfg.answers(student))
    judge = g.add("teacher", cfg.judge(student, exact=True), **cfg.place(cfg.teacher))
    advantage = g.add("advantage", TeacherAdvantage(size=cfg.sampling.group_size, negate=cfg.negate_rewards))
    batcher = g.add("batcher", make_batcher(cfg))
    trainer = g.add("trainer", make_trainer(cfg, objective, teacher=teacher), **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, answers.prompts)
    g.ignore(answers.others)
    g.connect(answers.rollouts, judge.rollouts)
    g.connect(judge.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    sampling = cfg.sampling.build(cfg.generator.stop_strings)
    add_offline_evaluation(g, cfg, trainer=trainer, prompts=prompts, sampling=sampling)
    cfg.share_devices(g, ("trainer", "teacher"))
    return g
