"""One loop of admission, generation and training, with a branch, a router or another trainer by configuration."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer, record, sampled, trainable
from flowrl import Batch, Facts, Graph, Group, In, Message, Node, Out, Prompt, Sample, Weights
from flowrl.errors import SampleFailed
from flowrl.graph.ports import join
from flowrl.nodes.groups.batch import TokenBatch
from flowrl.runtime.ledger.ledger_client import Use

SEEN: list[Any] = []
"""What nodes have to tell a test of their run."""


@dataclass(frozen=True)
class Ways:
    kind: str = "plain"
    size: int = 2
    """Members of a group."""
    per_batch: int = 2
    num_groups: int = 0
    """0: no end."""
    staleness: int = 1
    swapped: bool = False
    """The second trainer has the branch that leaves nothing out; of `best_and_all`, it is sent its groups first."""
    slow_s: float = 0.0
    on_limit: str = "wait"
    beside: bool = False
    """Groups are given up on a branch that leads to no trainer."""
    ranks: int = 1
    """Of each trainer."""


class Source(Numbers):
    def __init__(self, cfg: Ways) -> None:
        super().__init__(cfg.size)
        self.num_groups = cfg.num_groups

    async def run(self) -> None:
        while not self.num_groups or self.number < self.num_groups:
            if not await self.prompts.admit([self.prompt(self.number, member) for member in range(self.size)]):
                return
            self.number += 1


class Twins(Source):
    """Numbers all members of a group alike."""

    def prompt(self, number: int, member: int) -> Prompt:
        return replace(super().prompt(number, member), member=0)


class Generator(SleepingGenerator):
    cpus = 0

    def __init__(self, cfg: Ways) -> None:
        super().__init__(0.001, 16)
        self.fails = cfg.kind in ("router", "routed_groups")

    async def generate(self, prompt: Prompt) -> None:
        if self.fails and prompt.seed % 5 == 3 and prompt.member == 0:
            raise SampleFailed("no_answer")
        await super().generate(prompt)


class Judged(Generator):
    """Also follows the weights of a second trainer."""

    values: In[Weights]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run())
            tasks.create_task(self.follow_values())

    async def follow_values(self) -> None:
        async for weights in self.values:
            self.context.ledger.holds(f"{self.name}/{self.context.replica}", weights.policy, weights.version)


class Trainer(SleepingTrainer):
    """Its ranks work in lockstep: each waits inside a batch for the others, as in a collective."""

    cpus = 0
    _meetings: dict[tuple[str, str, int], tuple[list[Batch], asyncio.Event]] = {}

    async def run(self) -> None:
        version = self.context.start_version
        if self.context.replica == 0:
            await self.publish(version)
        async for batch in self.batches:
            parts = self._booked(await self._meet(version, batch), batch)
            version += 1
            if self.context.replica == 0:
                samples = [sample for part in parts for sample in part.samples]
                self.context.ledger.step(record(version, samples), list(map(Use.of, samples)), policy=self.name)
                await self.publish(version)
            self.batches.finish(batch)
            await self.context.step_done(version)

    def _booked(self, parts: list[Batch], batch: Batch) -> list[Batch]:
        return parts

    async def _meet(self, version: int, batch: Batch) -> list[Batch]:
        """The parts of all ranks."""
        key = self.context.run_id, self.name, version
        parts, met = self._meetings.setdefault(key, ([], asyncio.Event()))
        parts.append(batch)
        if len(parts) == self.context.num_replicas:
            met.set()
        await met.wait()
        await asyncio.sleep(self.seconds)  # a slow trainer
        return parts


class Forgetful(Trainer):
    """Its first rank books the part that it has itself."""

    def _booked(self, parts: list[Batch], batch: Batch) -> list[Batch]:
        return [batch]


class Filter(Node):
    """Keeps nothing, and says why."""

    samples: In[Sample]
    kept: Out[Sample]

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        async for sample in self.samples:
            self.samples.drop(sample, "too_short", state="filtered")


class Log(Node):
    samples: In[Sample]

    async def run(self) -> None:
        async for sample in self.samples:
            SEEN.append(sample.sample_id)


class Groups(Node):
    """A tap that looks at whole groups."""

    keyed_state = True

    samples: In[Sample]

    def __init__(self, size: int) -> None:
        self.size = size

    def facts(self) -> Facts:
        return Facts(group_size=self.size, keeps_lineage=False)

    async def run(self) -> None:
        async for members in self.samples.groups(self.size):
            SEEN.append((members.group_id, len(members.items), len(members.lost)))
            for sample in members.items:
                self.samples.drop(sample, "seen")


class Leave(Node):
    """Leaves out every third group."""

    groups: In[Group]
    out: Out[Group]

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        await self.groups.each(self.one, concurrency=64)

    async def one(self, group: Group) -> None:
        if int(group.group_id.removeprefix("group")) % 3 != 2:
            await self.out.send(group)
            return
        await asyncio.sleep(self.slow_s)  # a slow filter
        self.groups.drop(group, "unsure", state="filtered")


@dataclass(frozen=True)
class Parsed(Message):
    sample: Sample
    answer: str


class Parse(Node):
    samples: In[Sample]
    parsed: Out[Parsed]

    async def run(self) -> None:
        async for sample in self.samples:
            await self.parsed.send(Parsed(sample, "42"))


class Verify(Node):
    parsed: In[Parsed]
    out: Out[Sample]

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        await self.parsed.each(self.one, concurrency=4)

    async def one(self, parsed: Parsed) -> None:
        if parsed.sample.member == 0 and int(parsed.sample.group_id.removeprefix("group")) % 2:
            raise SampleFailed("no_verdict")
        await self.out.send(parsed.sample)


class Router(Node):
    """Even members go one way, odd ones the other."""

    samples: In[Sample]
    even: Out[Sample]
    odd: Out[Sample]

    async def run(self) -> None:
        async for sample in self.samples:
            await (self.odd if sample.member % 2 else self.even).send(sample)


class GroupRouter(Node):
    """Whole groups go to one trainer or to the other."""

    groups: In[Group]
    even: Out[Group]
    odd: Out[Group]

    async def run(self) -> None:
        async for group in self.groups:
            await (self.odd if int(group.group_id.removeprefix("group")) % 2 else self.even).send(group)


class BestAndAll(GroupRouter):
    """One trainer gets the first two members of each group, the other all of them."""

    def __init__(self, all_first: bool) -> None:
        self.all_first = all_first

    async def run(self) -> None:
        async for group in self.groups:
            best = replace(group, samples=group.samples[:2])
            sends = [(self.even, best), (self.odd, group)]
            for port, part in reversed(sends) if self.all_first else sends:
                await port.send(part)


class Both(Router):
    """Sends each sample on both ports."""

    async def run(self) -> None:
        async for sample in self.samples:
            await self.even.send(sample)
            await self.odd.send(sample)


class Pass(Node):
    samples: In[Sample]
    out: Out[Sample]

    async def run(self) -> None:
        await self.samples.each(self.out.send, concurrency=8)


class FailsAfterSend(Pass):
    async def run(self) -> None:
        await self.samples.each(self.one, concurrency=1)

    async def one(self, sample: Sample) -> None:
        await self.out.send(sample)
        if sample.member == 0:
            raise SampleFailed("could_not_log_it")


class Mask(Pass):
    """Keeps the first token of each response out of the loss, and all of every fourth group's first member."""

    out: Out[Sample]

    async def run(self) -> None:
        async for sample in self.samples:
            whole = sample.member == 0 and int(sample.group_id.removeprefix("group")) % 4 == 0
            allowed = np.zeros_like(sample.policy_mask) if whole else sample.policy_mask.copy()
            allowed[np.argmax(sample.policy_mask)] = False
            await self.out.send(replace(trainable(sample), loss_mask=allowed))


class KeepsMasks(Collect):
    async def run(self) -> None:
        async for members in self.samples.groups(self.size):
            group = Group(members.group_id, members.items, members.size)  # type: ignore[arg-type]
            await self.groups.send(group, made_from=members.items)


class BestTwo(Collect):
    """Names all members as parents of a group that holds two of them."""

    async def run(self) -> None:
        async for members in self.samples.groups(self.size):
            kept = tuple(map(trainable, members.items[:2]))
            await self.groups.send(Group(members.group_id, kept, members.size), made_from=members.items)


class Impatient(Pass):
    """Takes with a time limit that is too short most of the time."""

    async def run(self) -> None:
        items = aiter(self.samples)
        while True:
            try:
                async with asyncio.timeout(0.0005):
                    sample = await anext(items)
            except TimeoutError:
                SEEN.append("late")
                continue
            except StopAsyncIteration:
                return
            await self.out.send(sample)


class Meet(Node):
    """Joins two ways of every sample."""

    first: In[Sample]
    second: In[Sample]
    out: Out[Sample]

    def facts(self) -> Facts:
        return Facts(joins=("first", "second"))

    async def run(self) -> None:
        async for sample, _ in join(self.first, self.second):
            await self.out.send(sample)


class GivesUp(Pass):
    """Gives every third group up with its first member, of which it has the verdict before others are generated."""

    async def run(self) -> None:
        await self.samples.each(self.one, concurrency=8)

    async def one(self, sample: Sample) -> None:
        if sample.member == 0 and int(sample.group_id.removeprefix("group")) % 3 == 1:
            self.samples.drop(sample, "hopeless", state="filtered", group=True)
        else:
            await self.out.send(sample)


class Slow(Generator):
    """Works on the second member of some groups until it is cancelled."""

    async def generate(self, prompt: Prompt) -> None:
        if prompt.member == 1 and prompt.seed % 3 == 1:
            try:
                await asyncio.Event().wait()
            finally:
                SEEN.append(prompt.group_id)
        await super().generate(prompt)


class Unsure(Pass):
    """Loses the first member of every third group."""

    async def run(self) -> None:
        async for sample in self.samples:
            if sample.member == 0 and int(sample.group_id.removeprefix("group")) % 3 == 1:
                self.samples.drop(sample, "unsure", state="filtered")
            else:
                await self.out.send(sample)


def graph(cfg: Ways) -> Graph:
    g = Graph("ways")
    source = g.add("prompts", (Twins if cfg.kind == "twins" else Source)(cfg))
    generator = g.add("generator", GENERATORS.get(cfg.kind, Generator)(cfg))
    collect = g.add("collect", COLLECTS.get(cfg.kind, Collect)(cfg.size))
    batcher = g.add("batcher", TokenBatch(cfg.per_batch, token_budget=4096))
    trainer = g.add("trainer", (Forgetful if cfg.kind == "forgetful" else Trainer)(0.002), replicas=cfg.ranks)
    g.connect(source.prompts, generator.prompts)
    g.connect(between(g, cfg, generator), collect.samples)
    g.connect(groups(g, cfg, collect, generator), batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    values = (generator.values,) if isinstance(generator, Judged) else ()
    g.admit(source.prompts, until=(generator.weights, *values), staleness=cfg.staleness, on_limit=cfg.on_limit)  # type: ignore[arg-type]
    return g


TWO = ("two", "routed_groups", "best_and_all")
GENERATORS: dict[str, type[Generator]] = {**dict.fromkeys(TWO, Judged), "gives_up": Slow}
COLLECTS: dict[str, type[Collect]] = {"masked": KeepsMasks, "best_two": BestTwo}
PASSES: dict[str, type[Pass]] = {
    "after_send": FailsAfterSend,
    "masked": Mask,
    "impatient": Impatient,
    "unsure": Unsure,
    "gives_up": GivesUp,
}


def between(g: Graph, cfg: Ways, generator: Generator) -> Out[Sample]:
    """What leads from the generator to the groups; the port whose edge is still to be drawn."""
    if cfg.beside:
        tap, log = g.add("beside", GivesUp()), g.add("log", Log())
        g.connect(generator.samples, tap.samples)
        g.connect(tap.out, log.samples)
        return generator.samples
    if cfg.kind in PASSES:
        one = g.add("pass", PASSES[cfg.kind]())
        g.connect(generator.samples, one.samples)
        return one.out
    if cfg.kind in ("tap", "grouped_tap"):
        beside = g.add("filter", Filter())
        log: Log | Groups = g.add("log", Groups(cfg.size) if cfg.kind == "grouped_tap" else Log())
        g.connect(generator.samples, beside.samples)
        g.connect(beside.kept, log.samples)
    if cfg.kind == "wrapped":
        parse, verify = g.add("parse", Parse()), g.add("verify", Verify())
        g.connect(generator.samples, parse.samples)
        g.connect(parse.parsed, verify.parsed)
        return verify.out
    if cfg.kind in ("router", "both", "joined"):
        return routed(g, cfg, generator)
    return generator.samples


def routed(g: Graph, cfg: Ways, generator: Generator) -> Out[Sample]:
    """Two ways that meet: in one port of a node that passes on, or in a join."""
    even, odd = g.add("even", Unsure() if cfg.kind == "joined" else Pass()), g.add("odd", Pass())
    if cfg.kind == "joined":
        meet = g.add("meet", Meet())
        g.connect(generator.samples, even.samples)
        g.connect(generator.samples, odd.samples)
        g.connect(even.out, meet.first)
        g.connect(odd.out, meet.second)
        return meet.out
    router = g.add("router", Both() if cfg.kind == "both" else Router())
    g.connect(generator.samples, router.samples)
    g.connect(router.even, even.samples)
    g.connect(router.odd, odd.samples)
    last = g.add("last", Pass())
    g.connect(even.out, last.samples)
    g.connect(odd.out, last.samples)
    return last.out


def groups(g: Graph, cfg: Ways, collect: Collect, generator: Generator) -> Out[Group]:
    """What leads from the groups to the batches, and to those of a second trainer."""
    if cfg.kind not in TWO:
        return collect.groups
    other = g.add("value_batcher", TokenBatch(cfg.per_batch, token_budget=4096))
    second = g.add("value_trainer", Trainer(0.002), replicas=cfg.ranks)
    g.connect(other.batches, second.batches, dispatch="gang")
    assert isinstance(generator, Judged)
    g.latest(second.weights, generator.values)
    if cfg.kind in ("routed_groups", "best_and_all"):
        router = g.add("router", BestAndAll(cfg.swapped) if cfg.kind == "best_and_all" else GroupRouter())
        g.connect(collect.groups, router.groups)
        g.connect(router.odd, other.groups)
        return router.even
    leave = g.add("leave", Leave(cfg.slow_s))
    g.connect(collect.groups, leave.groups)
    g.connect(collect.groups if cfg.swapped else leave.out, other.groups)
    return leave.out if cfg.swapped else collect.groups


__all__ = ["Batch", "graph", "sampled"]
