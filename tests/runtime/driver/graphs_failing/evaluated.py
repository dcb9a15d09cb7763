"""A training loop without models, with an evaluation whose scores are written here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from parts import Collect, Generator, Numbers, Ranks, leave_word

from flowrl import Graph, Node, Sample
from flowrl.nodes.groups.batch import TokenBatch

SCORES = {0: 0.1, 2: 0.6, 4: 0.3, 6: 0.5}
"""By step; the rest is 0.2."""


@dataclass(frozen=True)
class Evaluated:
    every: int = 2
    ranks: int = 2
    apart: bool = False
    """Whether the evaluation has a process of its own, and leaves a word with its id."""


class Timed(Ranks):
    """Leaves a word when a version is made."""

    def report(self, version: int, samples: Sequence[Sample]) -> None:
        leave_word(self, f"{version} {time.monotonic()}")
        super().report(version, samples)


class Evaluation(Node):
    def __init__(self, every: int, *, apart: bool) -> None:
        self.every, self.apart = every, apart
        self._end = asyncio.Event()

    async def setup(self) -> None:
        if self.apart:
            leave_word(self)

    async def run(self) -> None:
        with self.context.waiting("the end"):
            await self._end.wait()

    async def evaluate(self, *, phase: str, step: int) -> dict[str, float]:
        began = time.monotonic()
        await asyncio.sleep(0.3)  # under test: no version is made meanwhile
        leave_word(self, f"{phase} {step} {began} {time.monotonic()}")
        score = SCORES.get(step, 0.2)
        return {"exact_match": score, "score": score, "num_answers": 1}

    async def finish(self) -> None:
        self._end.set()


def graph(cfg: Evaluated) -> Graph:
    g = Graph("evaluated")
    source = g.add("prompts", Numbers(2))
    generator = g.add("generator", Generator(0.01, 4))
    collect = g.add("collect", Collect(2))
    batcher = g.add("batcher", TokenBatch(2, token_budget=4096))
    trainer = g.add("trainer", Timed(0.01), replicas=cfg.ranks, cpus=0.25)
    g.add("evaluation", Evaluation(cfg.every, apart=cfg.apart), cpus=0.25 if cfg.apart else 0)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
