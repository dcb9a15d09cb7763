"""Trainer and generator on machines of their own: real weights go to the other one, where every value is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph
from flowrl.channel.address import this_machine
from flowrl.messages import Weights
from flowrl.nodes.batch import TokenBatch
from flowrl.weights.backends import receiver
from flowrl.weights.manifest import views
from flowrl.weights.publish import Publisher
from flowrl.weights.shm import DATA_OFFSET, Segment


@dataclass(frozen=True)
class Apart:
    megabytes: int = 32
    cores: float = 2


class Values:
    """A model of one tensor, whose values are the version."""

    rank, vocab_size = 0, 8

    def __init__(self, megabytes: int) -> None:
        self.tensor = torch.zeros(megabytes << 18)

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]]:
        yield ["weight"], [self.tensor]

    def score(self, sequences: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        raise AssertionError("nobody asks for the probe")


class Publishing(SleepingTrainer):
    """Publishes its version as the values of a tensor."""

    cpus = 2

    def __init__(self, megabytes: int) -> None:
        super().__init__(0.01)
        self.values = Values(megabytes)
        self._publisher: Any = None

    async def publish(self, version: int) -> None:
        if self._publisher is None:
            routes, run_id = self.context.weight_routes, self.context.run_id
            self._publisher = Publisher(self.values, self.name, run_id=run_id, routes=routes, probe_every=0)
            self.context.progress(f"on {this_machine().split(':')[0]}")
        self.values.tensor.fill_(version)
        manifest = await self.blocking(self._publisher.publish, version)
        await self.weights.send(manifest)

    async def close(self) -> None:
        self._publisher.close()


class Fetching(SleepingGenerator):
    """Fetches every version, and looks at its values."""

    cpus = 2

    async def follow(self) -> None:
        mine = f"{self.name}/{self.context.replica}"
        fetching = receiver(self.context.weight_routes, mine, self.context.run_id)
        self.context.progress(f"on {this_machine().split(':')[0]}")
        async for manifest in self.weights:
            await self.blocking(self._look, fetching, manifest)
            self.version = manifest.version
            self.ready.set()
            self.context.ledger.holds(mine, manifest.policy, manifest.version)
        fetching.close()

    def _look(self, fetching: Any, manifest: Weights) -> None:
        fetched = fetching.fetch(manifest)
        segment = Segment(fetched.update["segment"])
        with segment.map() as mapping:
            ((_, tensor),) = views(mapping, fetched.update["tensors"], start=DATA_OFFSET)
            assert bool((tensor == manifest.version).all()) and tensor.nbytes == manifest.num_bytes
            del tensor
        segment.close()
        fetched.close()
        self.context.progress(f"version {manifest.version}: {manifest.transport.partition(':')[0]}")


def graph(cfg: Apart) -> Graph:
    g = Graph("apart")
    source = g.add("prompts", Numbers(2))
    generator = g.add("generator", Fetching(0.01, 8), cpus=cfg.cores)
    collect = g.add("collect", Collect(2))
    batcher = g.add("batcher", TokenBatch(4, token_budget=4096))
    trainer = g.add("trainer", Publishing(cfg.megabytes), cpus=cfg.cores)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
