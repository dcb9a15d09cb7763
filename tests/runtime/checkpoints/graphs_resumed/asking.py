"""Groups whose samples wait for further groups: each asks its source for one, and passes when that is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Call, Facts, Graph, In, Message, Node, Out, Prompt, Sample, Scored, Serve
from flowrl.nodes.groups.batch import TokenBatch


class Generating(SleepingGenerator):
    cpus = 0


class Training(SleepingTrainer):
    cpus = 0


@dataclass(frozen=True)
class Named(Message):
    """The sample that asks for a group, or that is answered; "" if no group was admitted for it."""

    sample_id: str


class Asking(Numbers):
    """Admits groups, and further ones that their samples ask for. Its state changes before `admit`, or after it."""

    asked: Serve[Named, Named]
    answered: Serve[Named, Named]

    def __init__(self, size: int, asks: int, state: str) -> None:
        super().__init__(size)
        self.asks, self.before = asks, state == "before"
        self.known: dict[str, bool] = {}
        """Sample that has asked -> whether its group is answered."""

    def facts(self) -> Facts:
        return replace(super().facts(), asks=self.asks)

    async def run(self) -> None:
        self.answers = {name: asyncio.Event() for name in self.known}
        for name, answered in self.known.items():
            if answered:
                self.answers[name].set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.asked.each(self.ask, concurrency=1000))
            tasks.create_task(self.answered.each(self.note, concurrency=1000))
            while True:
                number = self.number
                self.number += self.before
                if not await self.prompts.admit(self.members(number), asks=self.asks):
                    break
                self.number = number + 1
            self.prompts.close()

    def members(self, number: int, of: str = "") -> list[Prompt]:
        prompts = [self.prompt(number, member) for member in range(self.size)]
        if not of:
            return prompts
        group_id = f"for {of}"
        return [replace(one, group_id=group_id, sample_id=f"{group_id}:{one.member}") for one in prompts]

    async def ask(self, request: Named) -> Named:
        name = request.sample_id
        if name not in self.known:
            self.known[name], self.answers[name] = False, asyncio.Event()
            by = name if self.asks else None
            if not await self.prompts.admit(self.members(0, of=name), asked_by=by):
                return Named("")
        await self.answers[name].wait()
        return request

    async def note(self, request: Named) -> Named:
        self.known[request.sample_id] = True
        self.answers[request.sample_id].set()
        return request

    def state(self) -> Mapping[str, Any]:
        return {"number": self.number, "known": self.known}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.number, self.known = int(state["number"]), dict(state["known"])


class Arena(Node):
    """A sample of every `every`th group asks for a group before it passes."""

    samples: In[Sample]
    passed: Out[Sample]
    ask: Call[Named, Named]
    answer: Call[Named, Named]

    def __init__(self, every: int) -> None:
        self.every = every

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        await self.samples.each(self.play, concurrency=1000)

    async def play(self, sample: Sample) -> None:
        if self.passed.was_sent():
            return
        if sample.group_id.startswith("for "):
            if sample.member == 0:
                await self.answer(Named(sample.group_id.removeprefix("for ")))
        elif int(sample.group_id.removeprefix("group")) % self.every == 0:
            asked = await self.ask(Named(sample.sample_id))
            if not asked.sample_id:
                self.samples.drop(sample, "not_asked")
                return
        self.context.ledger.scored(Scored(**{one.name: getattr(sample, one.name) for one in fields(Sample)}))
        await self.passed.send(sample)


@dataclass(frozen=True)
class Config:
    groups_per_step: int = 4
    group_size: int = 2
    staleness: int = 1
    asks: int = 1
    every: int = 1
    state: Literal["before", "after"] = "before"


def graph(cfg: Config) -> Graph:
    g = Graph("asking")
    source = g.add("prompts", Asking(cfg.group_size, cfg.asks, cfg.state))
    generator = g.add("generator", Generating(0.001, 8))
    arena = g.add("arena", Arena(cfg.every))
    collect = g.add("collect", Collect(cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(0.0))
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, arena.samples)
    g.call(arena.ask, source.asked, capacity=1000)
    g.call(arena.answer, source.answered)
    g.connect(arena.passed, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness)
    return g
