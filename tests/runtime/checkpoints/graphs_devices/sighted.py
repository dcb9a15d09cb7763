"""Nodes that leave a word about the GPUs that they see: ranks and a reader in turns, two that share, one with none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flowrl import Graph, In, Message, Node, Out


@dataclass(frozen=True)
class Number(Message):
    value: int


@dataclass(frozen=True)
class Sighted:
    ranks: int = 2


class Source(Node):
    numbers: Out[Number]

    async def run(self) -> None:
        leave_word(self)
        await self.numbers.send(Number(0))


class Watcher(Node):
    numbers: In[Number]

    async def run(self) -> None:
        async for _ in self.numbers:
            leave_word(self)


class Rank(Watcher):
    gang = True


def leave_word(node: Node) -> None:
    word = f"{','.join(map(str, node.context.gpus))} sees {os.environ['CUDA_VISIBLE_DEVICES']}"
    (Path(node.context.run_dir) / f"{node.name}-{node.context.replica}").write_text(word)


def graph(cfg: Sighted) -> Graph:
    g = Graph("sighted")
    source = g.add("source", Source())
    trainer = g.add("trainer", Rank(), replicas=cfg.ranks, cpus=0.25, gpus=1)
    generator = g.add("generator", Watcher(), cpus=0.25, gpus=2)
    reference = g.add("reference", Watcher(), cpus=0.25, gpus=0.5)
    critic = g.add("critic", Watcher(), cpus=0.25, gpus=0.5)
    judge = g.add("judge", Watcher(), cpus=0.25)
    for node in (trainer, generator, reference, critic, judge):
        g.connect(source.numbers, node.numbers, dispatch="broadcast")
    g.time_share(trainer, generator)
    return g
