"""A user's own trainer in one process with an evaluation and with its source; several evaluations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, Node, Out, Sample
from flowrl.nodes.groups.batch import TokenBatch


@dataclass(frozen=True)
class Evaluated:
    gang: bool = True
    """The trainer is one; a user need not say so."""
    seconds: float = 0.0
    """What an evaluation takes."""
    every: tuple[int, ...] = (0,)
    """Of each evaluation."""


class Generator(SleepingGenerator):
    cpus = 0


class Evaluate(Node):
    """As flowrl's own for the driver: `evaluate`, `finish` and `every`."""

    unused: Out[Sample]

    def __init__(self, every: int, seconds: float) -> None:
        self.every = every
        self.seconds = seconds
        self.finished = asyncio.Event()

    async def run(self) -> None:
        with self.context.waiting("the end of training"):
            await self.finished.wait()

    async def finish(self) -> None:
        self.finished.set()

    async def evaluate(self, *, phase: str, step: int) -> dict[str, float]:
        await asyncio.sleep(self.seconds)  # under test: slow, and alive
        return {"exact_match": step / 10, "score": step / 10, "num_answers": 1}


def graph(cfg: Evaluated) -> Graph:
    class Trainer(SleepingTrainer):
        cpus = 0
        gang = cfg.gang

    g = Graph("evaluated")
    source, generator = g.add("prompts", Numbers(2)), g.add("generator", Generator(0.001, 8))
    collect, batcher = g.add("collect", Collect(2)), g.add("batcher", TokenBatch(4, token_budget=4096))
    trainer = g.add("trainer", Trainer(0.001))
    for number, every in enumerate(cfg.every):
        g.ignore(g.add(f"evaluation{number}", Evaluate(every, cfg.seconds)).unused)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang" if cfg.gang else "share")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
