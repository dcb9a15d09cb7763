"""A training loop in which a node between generator and trainer changes one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Out, Sample
from flowrl.nodes.groups.batch import TokenBatch

CHANGED = "group2:1"
LAST = -1


def added(array: np.ndarray, index: int, value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] += value
    return changed


CHANGES: dict[str, Callable[[Sample], Sample]] = {
    "nothing": lambda sample: sample,
    "id": lambda sample: replace(sample, token_ids=added(sample.token_ids, LAST, 1)),
    "id of the prompt": lambda sample: replace(sample, token_ids=added(sample.token_ids, 0, 1)),
    "logprob": lambda sample: replace(sample, behavior_logprobs=added(sample.behavior_logprobs, LAST, -(2.0**-20))),
    "version": lambda sample: replace(sample, versions=added(sample.versions, LAST, 1)),
    "mask": lambda sample: replace(sample, policy_mask=np.roll(sample.policy_mask, -1)),
    "metrics": lambda sample: replace(sample, metrics={"seen": 1.0}, columns={"more": "text"}),
    "wider types": lambda sample: replace(
        sample,
        token_ids=sample.token_ids.astype(np.int64),
        behavior_logprobs=sample.behavior_logprobs.astype(np.float64),
    ),
}


@dataclass(frozen=True)
class Changed:
    change: str = "nothing"


class Change(Node):
    samples: In[Sample]
    out: Out[Sample]

    def __init__(self, change: Callable[[Sample], Sample]) -> None:
        self.change = change

    async def run(self) -> None:
        async for sample in self.samples:
            await self.out.send(self.change(sample) if sample.sample_id == CHANGED else sample)


class Generator(SleepingGenerator):
    cpus = 0


class Trainer(SleepingTrainer):
    cpus = 0


def graph(cfg: Changed) -> Graph:
    g = Graph("changed")
    source, generator = g.add("prompts", Numbers(2)), g.add("generator", Generator(0.001, 8))
    change = g.add("change", Change(CHANGES[cfg.change]))
    collect, batcher = g.add("collect", Collect(2)), g.add("batcher", TokenBatch(2, token_budget=4096))
    trainer = g.add("trainer", Trainer(0.001))
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, change.samples)
    g.connect(change.out, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
