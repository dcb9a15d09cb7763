"""A source that sends outside of invocations, or a broadcast to two workers, or one that loses samples; and a sink."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowrl import Graph, In, Message, Node, Out, Prompt
from tests.runtime.checkpoints.graphs_snapshot.parts import NUM_PROMPTS, Sink, Source, Work, prompt
from tests.runtime.checkpoints.snapshot_rig import SEEN


class Plain(Node):
    """Sends without admission."""

    prompts: Out[Prompt]

    def __init__(self) -> None:
        self.next = 0

    async def run(self) -> None:
        while self.next < NUM_PROMPTS:
            await self.prompts.send(prompt(self.next, of=f"r{self.context.replica}s"))
            self.next += 1

    def state(self) -> Mapping[str, Any]:
        return {"next": self.next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class Groups(Node):
    """Takes groups slowly, lost members and all."""

    prompts: In[Prompt]

    async def run(self) -> None:
        async for members in self.prompts.groups(4):
            await asyncio.sleep(0.02)  # slow, in virtual time
            lost = [sample_id for marker in members.lost for sample_id in marker.sample_ids]
            SEEN.append(([item.sample_id for item in members.items], lost))
            for item in members.items:
                self.prompts.finish(item)


class Several(Node):
    """Makes three of each, one after the other."""

    prompts: In[Prompt]
    out: Out[Prompt]

    async def run(self) -> None:
        await self.prompts.each(self.make, concurrency=3)

    async def make(self, item: Prompt) -> None:
        for part in "abc":
            await self.out.send(replace(item, sample_id=f"{part}{item.sample_id}"))


@dataclass(frozen=True)
class Job(Message):
    """Work for a gang."""

    names: tuple[str, ...]

    def split(self, n: int) -> tuple[Job, ...]:
        return tuple(Job(self.names[rank::n]) for rank in range(n))


class Jobs(Node):
    """Sends four names at a time, without admission."""

    jobs: Out[Job]

    def __init__(self) -> None:
        self.next = 0

    async def run(self) -> None:
        while self.next < NUM_PROMPTS:
            await self.jobs.send(Job(tuple(f"s{index}" for index in range(self.next, self.next + 4))))
            self.next += 4

    def state(self) -> Mapping[str, Any]:
        return {"next": self.next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class Rank(Node):
    """Passes its parts on; the ranks are not equally fast."""

    gang = True
    jobs: In[Job]
    out: Out[Job]

    async def run(self) -> None:
        async for job in self.jobs:
            SEEN.append((self.context.replica, job.names))
            await asyncio.sleep(0.01 * (1 + 3 * self.context.replica))  # of virtual time: unequally slow
            await self.out.send(job)


class JobSink(Node):
    """Takes its time, and notes what came."""

    jobs: In[Job]

    async def run(self) -> None:
        async for job in self.jobs:
            await asyncio.sleep(0.01)  # slow, in virtual time
            SEEN.extend(job.names)


class Unstorable(Sink):
    """Has a state that cannot be stored."""

    def state(self) -> Mapping[str, Any]:
        return {"seen": {1, 2}}


@dataclass(frozen=True)
class Config:
    kind: str = "plain"
    replicas: int = 1
    sink_s: float = 0.01
    state: bool = False


def graph(config: Config) -> Graph:
    graph = Graph("line")
    if config.kind == "plain":
        sink = graph.add("sink", Unstorable(0.01) if config.state else Sink(config.sink_s))
        plain = graph.add("source", Plain(), replicas=config.replicas)
        graph.connect(plain.prompts, sink.prompts, capacity=8)
    elif config.kind == "several":
        source, several, sink = (
            graph.add("source", Source()),
            graph.add("several", Several()),
            graph.add("sink", Sink(0.004)),
        )
        graph.connect(source.prompts, several.prompts, capacity=8)
        graph.connect(several.out, sink.prompts, capacity=2)
    elif config.kind == "broadcast":
        source, sink = graph.add("source", Source()), graph.add("sink", Sink())
        work = graph.add("work", Work(0.01, 1, note=True), replicas=2)
        graph.connect(source.prompts, work.prompts, capacity=8, dispatch="broadcast")
        graph.connect(work.out, sink.prompts, capacity=8)
    elif config.kind == "gang":
        jobs, ranks, end = (
            graph.add("jobs", Jobs()),
            graph.add("ranks", Rank(), replicas=2),
            graph.add("end", JobSink()),
        )
        graph.connect(jobs.jobs, ranks.jobs, capacity=3, dispatch="gang")
        graph.connect(ranks.out, end.jobs, capacity=2)
    else:
        source, groups = graph.add("source", Source(4)), graph.add("groups", Groups())
        work = graph.add("work", Work(0, 8, note=True, fails=3))
        graph.connect(source.prompts, work.prompts, capacity=8)
        graph.connect(work.out, groups.prompts, capacity=1)
    return graph
