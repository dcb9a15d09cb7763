"""A chain of stages with one odd node in it, which is slow, or ends, in the way that `how` names."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Out, Sample
from flowrl.nodes.groups.batch import TokenBatch
from tests.rigs.ticks import ticks


@dataclass(frozen=True)
class Odd:
    where: str = ""
    """Where it happens, if anywhere: turn, each, task, blocking, setup, close, state, load, forgets, or one of SLOW."""
    what: str = ""
    """What is raised there: a key of RAISED."""
    seconds: float = 0.5
    groups: int = 0
    """Groups that there are data for; 0: without end."""


class Generator(SleepingGenerator):
    cpus = 0


class Trainer(SleepingTrainer):
    cpus = 0


class Source(Numbers):
    def __init__(self, groups: int) -> None:
        super().__init__(2)
        self.groups = groups

    async def run(self) -> None:
        while not self.groups or self.number < self.groups:
            if not await self.prompts.admit([self.prompt(self.number, member) for member in range(self.size)]):
                return
            self.number += 1


async def cancel_what_is_awaited() -> None:
    """As a library does whose session is closed, or whose own time is up."""
    inner = asyncio.ensure_future(asyncio.get_running_loop().create_future())
    inner.cancel()
    await inner


def recurse() -> None:
    recurse()


def throw(error: BaseException) -> None:
    raise error


RAISED: Mapping[str, Callable[[], Any]] = {
    "cancelled": lambda: throw(asyncio.CancelledError()),
    "exit": lambda: sys.exit(2),
    "interrupt": lambda: throw(KeyboardInterrupt()),
    "generator exit": lambda: throw(GeneratorExit()),
    "stop iteration": lambda: next(iter(())),
    "recursion": recurse,
    "memory": lambda: throw(MemoryError("no room")),
    "group": lambda: throw(BaseExceptionGroup("several", [GeneratorExit()])),
}


class OddNode(Node):
    """Passes samples on; the ninth is where it happens."""

    samples: In[Sample]
    out: Out[Sample]

    def __init__(self, cfg: Odd) -> None:
        self.cfg = cfg
        self.number = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def setup(self) -> None:
        if self.cfg.where == "setup":
            await self.happen()

    async def run(self) -> None:
        if self.cfg.where == "each":
            await self.samples.each(self.turn, concurrency=2)
            return
        async for sample in self.samples:
            await self.turn(sample)

    async def turn(self, sample: Sample) -> None:
        self.number += 1
        if self.number == 9:
            if self.cfg.where in ("turn", "each"):
                await self.happen()
            if self.cfg.where == "blocking":
                await self.blocking(RAISED[self.cfg.what])
            if self.cfg.where == "task":
                self.tasks.append(asyncio.create_task(self.happen()))
        await self.out.send(sample)

    async def happen(self) -> None:
        if self.cfg.what == "awaited":
            await cancel_what_is_awaited()
        elif self.cfg.what == "itself":
            this = asyncio.current_task()
            assert this is not None
            this.cancel()
            await ticks()
        else:
            RAISED[self.cfg.what]()

    def state(self) -> Mapping[str, Any]:
        if self.cfg.where == "state":
            RAISED[self.cfg.what]()
        return {"number": self.number}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.cfg.where == "load":
            RAISED[self.cfg.what]()

    async def close(self) -> None:
        if self.cfg.where == "close":
            await self.happen()


class Forgets(Node):
    """Holds what it gets until it has more than there are tickets for."""

    samples: In[Sample]
    out: Out[Sample]

    async def run(self) -> None:
        async for sample in self.samples:
            self.samples.hold(sample)


class Slow(Node):
    """Collects eight samples and works on them for a while, in a task beside its port or where `where` says."""

    samples: In[Sample]
    out: Out[Sample]

    def __init__(self, cfg: Odd) -> None:
        self.cfg = cfg
        self.collected: list[Sample] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for sample in self.samples:
                self.samples.hold(sample)
                self.collected.append(sample)
                if len(self.collected) == 8:
                    collected, self.collected = self.collected, []
                    tasks.create_task(self.work(collected))

    async def work(self, samples: list[Sample]) -> None:
        await getattr(self, self.cfg.where)()
        for sample in samples:
            await self.out.send(sample, made_from=[sample])

    async def timer(self) -> None:
        await asyncio.sleep(self.cfg.seconds)  # under test, as all the ways below: slow, and alive

    async def thread(self) -> None:
        await self.blocking(time.sleep, self.cfg.seconds)

    async def child(self) -> None:
        process = await asyncio.create_subprocess_exec("sleep", str(self.cfg.seconds))
        await process.wait()

    async def outside(self) -> None:
        with self.context.outside("the game"):
            await asyncio.sleep(self.cfg.seconds)  # the game is slow

    async def callback(self) -> None:
        """A timer ends the wait, and no task waits for the timer itself."""
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(self.cfg.seconds, event.set)
        with self.context.waiting("what the timer sets"):
            await event.wait()


SLOW = ("timer", "thread", "child", "outside", "callback")


def graph(cfg: Odd) -> Graph:
    g = Graph("odd")
    source, generator = g.add("prompts", Source(cfg.groups)), g.add("generator", Generator(0.001, 8))
    odd = g.add("odd", Slow(cfg) if cfg.where in SLOW else Forgets() if cfg.where == "forgets" else OddNode(cfg))
    collect, batcher = g.add("collect", Collect(2)), g.add("batcher", TokenBatch(4, token_budget=4096))
    trainer = g.add("trainer", Trainer(0.001))
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, odd.samples)
    g.connect(odd.out, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
