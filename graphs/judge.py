"""GRPO with a generative judge: a second policy, which is not trained, reads a rubric and says what answers are worth.

    pointwise   R_i = (mark − 1) / 4, of the judge's mark from 1 to 5 for answer i
    pairwise    R_i = share of the other answers that answer i, shown first, is better than
    advantage   A_i = (R_i − mean R) / std R, over the answers to one prompt

flowrl run judge --steps 60
flowrl run judge --policy smollm2 --judge smollm2 --rubric default --way pointwise --steps 60
"""

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import Literal

from flowrl import Ask, Facts, Graph, Group, In, Members, Node, Out, Sample, SampleFailed, Scored
from flowrl.nodes import Generator, ReplySchema
from flowrl.options import (
    OnlineConfig,
    PolicyLoss,
    add_evaluation,
    add_reference,
    make_batcher,
    make_generator,
    make_prompts,
    make_trainer,
    train_on_groups,
)
from flowrl.training.advantages import Estimate

Way = Literal["pointwise", "pairwise"]
RUBRICS = {
    "pointwise": "Question: {question}\nAnswer: {first}\nMark the answer from 1 (wrong) to 5 (right and clear).",
    "pairwise": "Question: {question}\nAnswer A: {first}\nAnswer B: {second}\nWhich answer is better, A or B?",
}
REPLIES = {"pointwise": ReplySchema(choice=tuple("12345")), "pairwise": ReplySchema(choice=("A", "B"))}


class Judged(Node):
    keyed_state = True
    rollouts: In[Sample]
    groups: Out[Group]
    judge: Ask

    def __init__(self, way: Way, rubric: str, *, size: int) -> None:
        self.way, self.rubric, self.size, self.estimate = way, rubric, size, Estimate("group_norm")

    def facts(self) -> Facts:
        return Facts(group_size=self.size, drops=True, keeps_lineage=False, asks_schema=bool(self.rubric))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for members in self.rollouts.groups(self.size):
                tasks.create_task(self.judge_group(members))

    async def judge_group(self, members: Members[Sample]) -> None:
        answers = members.items
        pairs = list(itertools.permutations(answers, 1 if self.way == "pointwise" else 2))
        try:
            asked = answers[0].token_ids[: answers[0].prompt_tokens]
            own = None if self.rubric else (await self.judge.ask(asked)).text.strip()
            found = await asyncio.gather(*(self.find_worth(pair, own) for pair in pairs))
        except SampleFailed:
            for one in answers:
                self.rollouts.drop(one, "not_judged", state="failed")
            return
        worths = [[worth for pair, worth in zip(pairs, found, strict=True) if pair[0] is one] for one in answers]
        scored = [Scored.of(one, sum(worth) / max(1, len(worth))) for one, worth in zip(answers, worths, strict=True)]
        made = self.estimate.make_trainables(scored)
        await self.groups.send(Group(members.group_id, made, members.size), made_from=answers)

    async def find_worth(self, pair: tuple[Sample, ...], own: str | None) -> float:
        texts = [one.response_text.strip() for one in pair]
        if own is not None:
            return float(texts[0] == own) if len(pair) == 1 else (1 + (texts[0] == own) - (texts[1] == own)) / 2
        asked = self.rubric.format(question=pair[0].prompt_text, first=texts[0], second=texts[-1])
        said = (await self.judge.ask(asked, schema=REPLIES[self.way])).text
        return (int(said) - 1) / 4 if self.way == "pointwise" else float(said == "A")


@dataclass(frozen=True)
class JudgeConfig(OnlineConfig):
    loss: PolicyLoss = PolicyLoss()
    judge: str = "tiny_teacher"
    """The model that judges: tiny_teacher (for tiny), smollm2, a model directory, or OWNER/NAME of the Hub."""
    way: Way = "pairwise"
    """Answers get marks (pointwise), or are compared with each other (pairwise)."""
    rubric: str = ""
    """What the judge is told, with {question}, {first} and, for pairs, {second}; default: the rubric of this file. ""
    has the judge answer the prompt itself, in the policy's vocabulary; an answer that says the same is right."""

    @property
    def of_evaluations(self) -> tuple[str, ...]:
        return (*super().of_evaluations, "reward_timeout_s")


def graph(cfg: JudgeConfig) -> Graph:
    rubric, policy = RUBRICS[cfg.way] if cfg.rubric == "default" else cfg.rubric, cfg.model.with_model(cfg.judge)
    greedy = replace(cfg.sampling.build(cfg.generator.stop_strings), temperature=0.0)
    judging = Generator(replace(policy, name="judge"), sampling=greedy, engine=cfg.generator.engine, trained=False)

    g = Graph("judge")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    judged = g.add("judged", Judged(cfg.way, rubric, size=cfg.sampling.group_size))
    judge = g.add("judge", judging, **cfg.place_generator() | {"replicas": 1})
    batcher = g.add("batcher", make_batcher(cfg))
    objective = cfg.loss.build(cfg.sampling.max_tokens)
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, generator.prompts)
    rollouts, followers = add_reference(g, cfg, cfg.loss.compared_with(cfg), generator.rollouts, trainer)
    g.connect(rollouts, judged.rollouts)
    g.call(judged.judge, judge.turns)
    for port in (judge.weights, judge.prompts, judge.rollouts):
        g.ignore(port)
    train_on_groups(g, cfg, prompts.prompts, judged.groups, batcher, trainer, generator, followers=followers)
    add_evaluation(g, cfg, generator)
    cfg.share_devices(g, ("trainer", "judge", "reference"))
    return g
