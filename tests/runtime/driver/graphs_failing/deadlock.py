"""Two streams that are joined pairwise, and a source that fills the first before it begins the second."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl import Graph, In, Message, Node, Out


@dataclass(frozen=True)
class Number(Message):
    value: int


@dataclass(frozen=True)
class Deadlock:
    numbers: int = 8
    capacity: int = 2


class Source(Node):
    lefts: Out[Number]
    rights: Out[Number]

    def __init__(self, cfg: Deadlock) -> None:
        self.numbers = cfg.numbers
        self.room = cfg.capacity

    async def run(self) -> None:
        for value in range(self.numbers):
            if value == self.room:
                self.context.progress("its next send has no room")
            await self.lefts.send(Number(value))
        for value in range(self.numbers):
            await self.rights.send(Number(value))


class Pairs(Node):
    lefts: In[Number]
    rights: In[Number]

    async def run(self) -> None:
        lefts = aiter(self.lefts)
        async for right in self.rights:
            left = await anext(lefts)
            assert left.value == right.value


def graph(cfg: Deadlock) -> Graph:
    g = Graph("deadlock")
    source, pairs = g.add("source", Source(cfg)), g.add("pairs", Pairs())
    g.connect(source.lefts, pairs.lefts, capacity=cfg.capacity)
    g.connect(source.rights, pairs.rights, capacity=cfg.capacity)
    return g
