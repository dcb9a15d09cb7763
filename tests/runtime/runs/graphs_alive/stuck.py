"""Small graphs that come to a standstill for good, each in the way that `how` names."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from flowrl import Call, Graph, In, Message, Node, Out, Serve


@dataclass(frozen=True)
class Stuck:
    how: str = "credit"
    """credit, lock, reply or beside (a node that sleeps stands beside the deadlock)."""


@dataclass(frozen=True)
class Number(Message):
    value: int


class Source(Node):
    """Fills one port before it begins the other."""

    lefts: Out[Number]
    rights: Out[Number]

    async def run(self) -> None:
        for value in range(8):
            await self.lefts.send(Number(value))
        for value in range(8):
            await self.rights.send(Number(value))


class Pairs(Node):
    """Takes pairwise, the right one first."""

    lefts: In[Number]
    rights: In[Number]

    async def run(self) -> None:
        lefts = aiter(self.lefts)
        async for right in self.rights:
            left = await anext(lefts)
            assert left.value == right.value


class LockedSource(Source):
    """Sends from several tasks, one at a time."""

    async def run(self) -> None:
        lock = asyncio.Lock()

        async def send(value: int) -> None:
            async with lock:
                await self.lefts.send(Number(value))

        async with asyncio.TaskGroup() as tasks:
            for value in range(8):
                tasks.create_task(send(value))
        await super().run()


class Beat(Node):
    """Is alive, and beside the point."""

    beats: Out[Number]

    async def run(self) -> None:
        await asyncio.sleep(3600)  # under test: its timer says that it lives


class Asker(Node):
    """Asks about each number, and tells one who tells it back."""

    ask: Call[Number, Number]
    told: In[Number]

    async def run(self) -> None:
        await self.ask(Number(0))
        async for _ in self.told:
            pass


class Answerer(Node):
    """Tells the asker more than it can take in before it answers."""

    asked: Serve[Number, Number]
    tells: Out[Number]

    async def run(self) -> None:
        await self.asked.each(self.answer)

    async def answer(self, number: Number) -> Number:
        for value in range(8):
            await self.tells.send(Number(value))
        return number


def graph(cfg: Stuck) -> Graph:
    g = Graph("stuck")
    if cfg.how == "reply":
        asker, answerer = g.add("asker", Asker()), g.add("answerer", Answerer())
        g.call(asker.ask, answerer.asked)
        g.connect(answerer.tells, asker.told, capacity=2)
        return g
    source = g.add("source", LockedSource() if cfg.how == "lock" else Source())
    pairs = g.add("pairs", Pairs())
    g.connect(source.lefts, pairs.lefts, capacity=2)
    g.connect(source.rights, pairs.rights, capacity=2)
    if cfg.how == "beside":
        g.ignore(g.add("beat", Beat()).beats)
    return g
