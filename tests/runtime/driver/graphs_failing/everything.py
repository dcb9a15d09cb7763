"""Every way of joining nodes in one run: replicas that share and that go by key, broadcast, nodes together
in a process, calls with sessions and cancellation; and every way in which a single sample can be lost.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from parts import Collect, Generator, Numbers, Trainer, leave_word

from flowrl import Call, Graph, Group, In, Message, Node, Out, Sample, Serve
from flowrl.errors import SampleFailed
from flowrl.graph.node import Facts
from flowrl.nodes.groups.batch import TokenBatch

SIZE = 3


@dataclass(frozen=True)
class Everything:
    staleness: int = 1


@dataclass(frozen=True)
class Question(Message):
    session: str
    hard: bool = False


@dataclass(frozen=True)
class Answer(Message):
    judge: int


class Filter(Node):
    """Drops member 0 of every fifth group, and all of every seventh."""

    samples: In[Sample]
    kept: Out[Sample]

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        leave_word(self)
        async for sample in self.samples:
            number = number_of(sample)
            if number % 7 == 6 or (number % 5 == 4 and sample.member == 0):
                self.samples.drop(sample, "too_short", state="filtered")
            else:
                await self.kept.send(sample)


class Reward(Node):
    """Asks a judge about every sample, the one of its group; fails member 1 of every third group."""

    samples: In[Sample]
    scored: Out[Sample]
    judge: Call[Question, Answer]

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        leave_word(self)
        await self.samples.each(self.score, concurrency=4)

    async def score(self, sample: Sample) -> None:
        number = number_of(sample)
        answer = await self.judge(Question(sample.group_id), session=sample.group_id)
        leave_word(self, f"{sample.group_id} {answer.judge}")
        if number == 0 and sample.member == 0:
            with suppress(TimeoutError):
                await self.judge(Question(sample.group_id, hard=True), session=sample.group_id, timeout_s=0.2)
        if number == 1 and sample.member == 0:
            time.sleep(2.5)  # noqa: ASYNC251 - under test: the warning about an event loop that stood still
        if number % 3 == 2 and sample.member == 1:
            raise SampleFailed("no_answer")
        await self.scored.send(sample)


class Judge(Node):
    questions: Serve[Question, Answer]

    async def run(self) -> None:
        leave_word(self)
        await self.questions.each(self.answer, concurrency=4)

    async def answer(self, question: Question) -> Answer:
        if question.hard:
            try:
                await asyncio.Event().wait()
            finally:
                leave_word(self, "cancelled")
        return Answer(self.context.replica)


class Tap(Node):
    """Gets a copy of every group."""

    groups: In[Group]

    async def run(self) -> None:
        leave_word(self)
        async for group in self.groups:
            leave_word(self, f"{group.group_id} {len(group.samples)}")


def number_of(sample: Sample) -> int:
    return int(sample.group_id.removeprefix("group"))


def graph(cfg: Everything) -> Graph:
    g = Graph("everything")
    source = g.add("prompts", Numbers(SIZE))
    generator = g.add("generator", Generator(0.02, 6), replicas=2, cpus=0.25)
    kept = g.add("filter", Filter(), replicas=2)
    reward = g.add("reward", Reward(), replicas=2)
    judge = g.add("judge", Judge(), replicas=2)
    collect = g.add("collect", Collect(SIZE), replicas=2)
    tap = g.add("tap", Tap(), replicas=2)
    batcher = g.add("batcher", TokenBatch(2, token_budget=4096))
    trainer = g.add("trainer", Trainer(0.02))
    g.together(generator, kept)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, kept.samples)
    g.connect(kept.kept, reward.samples)
    g.call(reward.judge, judge.questions, affinity_margin=100)
    g.connect(reward.scored, collect.samples, dispatch="key")
    g.connect(collect.groups, batcher.groups)
    g.connect(collect.groups, tap.groups, dispatch="broadcast")
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness)
    return g
