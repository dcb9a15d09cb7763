"""Generator, scorer and trainer with one GPU in turns; DEVICE fails if two are on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Out, Prompt, Sample
from flowrl.nodes.groups.batch import TokenBatch
from tests.runtime.checkpoints.graphs_devices.device import DEVICE
from tests.runtime.runs.graphs_alive.evaluated import Evaluate


@dataclass(frozen=True)
class Turns:
    generate_s: float = 0.05
    staleness: int = 1
    every: int = 0
    """Of the evaluation."""


class OnDevice(Node):
    """Loads to the device in `setup`, leaves it at the end of each turn."""

    async def setup(self) -> None:
        DEVICE.take(self.name)
        await asyncio.sleep(0.01)  # of virtual time: loading takes its time
        DEVICE.use(self.name, "loads")

    async def on_acquire(self) -> None:
        DEVICE.take(self.name)
        await asyncio.sleep(0.001)  # of virtual time

    async def on_release(self) -> None:
        await asyncio.sleep(0.001)  # of virtual time
        DEVICE.leave(self.name)


class Generator(OnDevice, SleepingGenerator):
    cpus = 0

    async def generate(self, prompt: Prompt) -> None:
        DEVICE.use(self.name, "samples")
        await super().generate(prompt)
        assert DEVICE.on_it == self.name

    async def snapshot(self) -> dict[str, object]:
        assert DEVICE.on_it != self.name, "a checkpoint waits for the end of its turn"
        return {}

    async def resume(self) -> None:
        """Nothing was stopped."""


class Scorer(OnDevice):
    samples: In[Sample]
    scored: Out[Sample]

    async def run(self) -> None:
        await self.samples.each(self.score, concurrency=4)

    async def score(self, sample: Sample) -> None:
        DEVICE.use(self.name, "scores")
        await asyncio.sleep(0.01)  # of virtual time
        DEVICE.use(self.name, "scores")
        await self.scored.send(sample)


class Trainer(OnDevice, SleepingTrainer):
    cpus = 0

    async def publish(self, version: int) -> None:
        async with self.context.on_devices():
            DEVICE.use(self.name, f"publishes {version}")
            await super().publish(version)

    async def checkpoint(self, path: str) -> None:
        async with self.context.on_devices():
            DEVICE.use(self.name, "saves")
            (Path(path) / "weights").write_text("")
            await asyncio.sleep(0.01)  # of virtual time
            DEVICE.use(self.name, "saves")


def graph(cfg: Turns) -> Graph:
    g = Graph("turns")
    source = g.add("prompts", Numbers(2))
    generator = g.add("generator", Generator(cfg.generate_s, 3), gpus=1)
    scorer = g.add("scorer", Scorer(), gpus=1)
    collect, batcher = g.add("collect", Collect(2)), g.add("batcher", TokenBatch(4, token_budget=4096))
    trainer = g.add("trainer", Trainer(0.05), gpus=1)
    if cfg.every:
        g.ignore(g.add("evaluation", Evaluate((cfg.every), 0.01)).unused)
    g.time_share(generator, scorer, trainer)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, scorer.samples)
    g.connect(scorer.scored, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness)
    return g
