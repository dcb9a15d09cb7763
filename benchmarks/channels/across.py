"""Trainer and generator on machines of their own: real weights go to the other one, where every value is looked at.

Beside them, a node sends messages as fast as they are taken. What is measured is printed:
`benchmarks.channels.clusters` reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Out
from flowrl.graph.node import Facts
from flowrl.messages import Message, Weights
from flowrl.nodes.groups.batch import TokenBatch
from flowrl.weights.publish import Publisher
from flowrl.weights.receive import make_receiver
from flowrl.weights.shm import DATA_OFFSET, Segment, view_tensors
from flowrl.wire.connection import this_machine

KB, MB = 1 << 10, 1 << 20
IN_FLIGHT = 64
"""Messages that may wait at the receiver before it takes the first of them."""


@dataclass(frozen=True)
class Apart:
    megabytes: int = 32
    """Size of a version of the weights."""
    messages: int = 0
    """Messages of 1 KB; a hundredth as many of 4 MB follow."""
    cores: float = 2
    generators: int = 1
    gpus: float = 0
    """Declared GPUs of the trainer and of each generator, which do not use them."""


@dataclass(frozen=True)
class Payload(Message):
    index: int
    values: npt.NDArray[np.uint8]


def sizes(messages: int) -> tuple[tuple[int, int], ...]:
    """(number, bytes) of the messages."""
    return ((messages, KB), (max(2, messages // 100), 4 * MB)) if messages else ()


def begins(count: int) -> int:
    """Index of the message with which the clock begins: those before it may have waited, and have no rate."""
    return IN_FLIGHT if count > 2 * IN_FLIGHT else 0


class Flood(Node):
    """Sends the messages."""

    payloads: Out[Payload]

    def __init__(self, messages: int) -> None:
        self.messages = messages

    async def run(self) -> None:
        for count, size in sizes(self.messages):
            values = np.ones(size, np.uint8)
            for index in range(count):
                await self.payloads.send(Payload(index, values))


class Gauge(Node):
    """Takes the messages, and tells how many a second."""

    payloads: In[Payload]

    def __init__(self, messages: int) -> None:
        self.messages = messages

    async def run(self) -> None:
        counts, began = {size: count for count, size in sizes(self.messages)}, 0.0
        async for payload in self.payloads:
            size = payload.values.size
            first = begins(counts[size])
            if payload.index == first:
                began = perf_counter()
            elif payload.index == counts[size] - 1:
                rate = (payload.index - first) / (perf_counter() - began)
                self.context.progress(f"measured {size} bytes: {rate:.0f} messages/s, {rate * size / 1e6:.0f} MB/s")


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
        manifest = await self.blocking(self._publisher.publish_version, version)
        await self.weights.send(manifest)

    async def close(self) -> None:
        self._publisher.close()


class Fetching(SleepingGenerator):
    """Fetches every version, and looks at its values."""

    cpus = 2

    def facts(self) -> Facts:
        return dataclasses.replace(super().facts(), weights_in_host_memory=True)

    async def follow(self) -> None:
        mine = f"{self.name}/{self.context.replica}"
        fetching = make_receiver(self.context.weight_routes, mine, self.context.run_id)
        self.context.progress(f"on {this_machine().split(':')[0]}")
        async for manifest in self.weights:
            await self.blocking(self._look, fetching, manifest)
            self.version = manifest.version
            self.ready.set()
            self.context.ledger.holds(mine, manifest.policy, manifest.version)
        fetching.close()

    def _look(self, fetching: Any, manifest: Weights) -> None:
        began = perf_counter()
        fetched = fetching.fetch_version(manifest)
        took = perf_counter() - began
        segment = Segment(fetched.update["segment"])
        with segment.map_file() as mapping:
            ((_, tensor),) = view_tensors(mapping, fetched.update["tensors"], start=DATA_OFFSET)
            assert bool((tensor == manifest.version).all()) and tensor.nbytes == manifest.num_bytes
            del tensor
        segment.close()
        fetched.close()
        transport, rate = manifest.transport.partition(":")[0], manifest.num_bytes / took / 1e6
        self.context.progress(f"version {manifest.version}: {transport}, fetched at {rate:.0f} MB/s")


def graph(cfg: Apart) -> Graph:
    return made(cfg, Fetching(0.01, 8), Publishing(cfg.megabytes))


def made(cfg: Apart, fetching: Fetching, publishing: Publishing) -> Graph:
    g = Graph("apart")
    source = g.add("prompts", Numbers(2))
    generator = g.add("generator", fetching, cpus=cfg.cores, gpus=cfg.gpus, replicas=cfg.generators)
    collect = g.add("collect", Collect(2))
    batcher = g.add("batcher", TokenBatch(4, token_budget=4096))
    trainer = g.add("trainer", publishing, cpus=cfg.cores, gpus=cfg.gpus)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    if cfg.messages:
        flood, gauge = g.add("flood", Flood(cfg.messages)), g.add("gauge", Gauge(cfg.messages))
        g.together(trainer, flood)
        g.together(generator, gauge)
        g.connect(flood.payloads, gauge.payloads, capacity=IN_FLIGHT)
    return g
