"""One stream to two nodes that work at different speeds, and joined again; or to two ports of one node."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from flowrl import Graph, In, Node, Prompt, join
from tests.runtime.checkpoints.graphs_snapshot.parts import Source, Work
from tests.runtime.checkpoints.snapshot_rig import SEEN


class Meet(Node):
    """Joins both branches."""

    a: In[Prompt]
    b: In[Prompt]

    async def run(self) -> None:
        async for one, _ in join(self.a, self.b):
            SEEN.append(one.sample_id)


class Twice(Node):
    """Has the same messages on two ports, and finishes those of one long before those of the other."""

    a: In[Prompt]
    b: In[Prompt]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.a.each(self.fast, concurrency=4))
            tasks.create_task(self.b.each(self.slow, concurrency=1))

    async def fast(self, prompt: Prompt) -> None:
        SEEN.append(("fast", prompt.sample_id))

    async def slow(self, prompt: Prompt) -> None:
        await asyncio.sleep(0.01)  # slow, in virtual time
        SEEN.append(("slow", prompt.sample_id))


@dataclass(frozen=True)
class Config:
    one_node: bool = False


def graph(config: Config) -> Graph:
    graph = Graph("fan")
    source = graph.add("source", Source())
    if config.one_node:
        twice = graph.add("twice", Twice())
        graph.connect(source.prompts, twice.a, capacity=8)
        graph.connect(source.prompts, twice.b, capacity=8)
        return graph
    fast, slow = graph.add("fast", Work(0.03, 4)), graph.add("slow", Work(0.02, 1))
    meet = graph.add("meet", Meet())
    for work, into in ((fast, meet.a), (slow, meet.b)):
        graph.connect(source.prompts, work.prompts, capacity=8)
        graph.connect(work.out, into, capacity=8)
    return graph
