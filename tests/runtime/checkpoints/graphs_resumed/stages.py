"""The stages of benchmarks/runs/stages.py, as a run that is resumed with other options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Sample
from flowrl.nodes.groups.batch import TokenBatch


class Generating(SleepingGenerator):
    cpus = 0


class Training(SleepingTrainer):
    cpus = 0


class Remembering(Collect):
    """Keeps something of its own."""

    def state(self) -> Mapping[str, Any]:
        return {"size": self.size}


class FailingSetup(Collect):
    async def setup(self) -> None:
        raise ValueError("no such device")


class Tap(Node):
    """Looks at samples beside the way to the trainer."""

    samples: In[Sample]

    async def run(self) -> None:
        async for _ in self.samples:
            pass


COLLECTORS = {"plain": Collect, "remembering": Remembering, "failing": FailingSetup}


@dataclass(frozen=True)
class Config:
    groups_per_step: int = 2
    group_size: int = 2
    staleness: int = 1
    look_ahead: int = 1
    mask: bool = False
    generators: int = 1
    collectors: int = 1
    collector: Literal["plain", "remembering", "failing"] = "plain"
    taps: int = 0
    tapping: Literal["broadcast", "share"] = "broadcast"
    train_s: float = 0.0


def graph(cfg: Config) -> Graph:
    g = Graph("stages")
    source = g.add("prompts", Numbers(cfg.group_size))
    generator = g.add("generator", Generating(0.001, 8), replicas=cfg.generators)
    collect = g.add("collect", COLLECTORS[cfg.collector](cfg.group_size), replicas=cfg.collectors)
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(cfg.train_s))
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples, dispatch="key")
    if cfg.taps:
        tap = g.add("tap", Tap(), replicas=cfg.taps)
        g.connect(generator.samples, tap.samples, dispatch=cfg.tapping)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.mask:
        g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness, on_limit="mask")
    else:
        g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness, look_ahead=cfg.look_ahead)
    return g
