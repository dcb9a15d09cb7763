"""Nodes of random graphs that match samples, or group them, or take note of what comes to the end of a tap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from flowrl import Group, In, Join, Out, Sample, Trainable, join
from flowrl.graph.node import Facts
from tests.random_graphs.dice import lot
from tests.random_graphs.nodes import STATES, Played, key_of


class Joining(Played):
    """Matches two branches by sample."""

    keyed_state = True

    first: In[Sample]
    second: In[Sample]
    done: Out[Sample]

    def facts(self) -> Facts:
        return Facts(drops=bool(self.part.losses), joins=tuple(name for name in PORTS if name in self.ports))

    def joined(self) -> Join[Any]:
        return join(self.first, self.second)

    async def run(self) -> None:
        async for samples in self.joined():
            sample = samples[0]
            await self.take_time(sample.sample_id)
            how = self.fate(sample.sample_id)
            if how in ("drop", "filter", "fail"):
                self.first.drop(sample, f"{self.name}_{how}", state=STATES[how])
            else:
                await self.done.send(sample)


class Joining3(Joining):
    third: In[Sample]

    def joined(self) -> Join[Any]:
        return join(self.first, self.second, self.third)


PORTS = ("first", "second", "third")


class GroupMaking(Played):
    """Collects groups, and loses some of their members or all of them."""

    keyed_state = True

    groups: Out[Group]

    def facts(self) -> Facts:
        return Facts(group_size=self.shape.group_size, drops=bool(self.part.losses), keeps_lineage=False)

    async def one(self, group_id: str, samples: Sequence[Sample], lose: Callable[..., None]) -> None:
        await self.take_time(group_id)
        fates = {sample.sample_id: self.fate(sample.sample_id) for sample in samples}
        kept = [sample for sample in samples if fates[sample.sample_id] in ("pass", "late")]
        for sample in samples:
            how = fates[sample.sample_id]
            if how not in ("pass", "late"):
                lose(sample, f"{self.name}_{how}", state=STATES[how])
        if kept:
            samples = tuple(self.trainable(sample) for sample in kept)
            group = Group(group_id, samples, self.shape.group_size)
            await self.groups.send(group, made_from=kept)
        self.record.see(self.name, group_id)

    def trainable(self, sample: Sample) -> Trainable:
        values = {field.name: getattr(sample, field.name) for field in fields(Sample)}
        drawn = [lot(self.name, sample.sample_id, position) for position in range(len(sample.token_ids))]
        mask = sample.policy_mask & (np.array(drawn) >= self.part.masks) if self.part.masks else None
        return Trainable(**values, advantages=np.zeros(len(drawn), np.float32), loss_mask=mask)


class Grouping(GroupMaking):
    samples: In[Sample]

    async def run(self) -> None:
        async for members in self.samples.groups(self.shape.group_size):
            await self.one(members.group_id, members.items, self.samples.drop)


class JoinedGrouping(GroupMaking):
    first: In[Sample]
    second: In[Sample]

    def facts(self) -> Facts:
        return replace(super().facts(), joins=("first", "second"))

    async def run(self) -> None:
        async for members in join(self.first, self.second).groups(self.shape.group_size):
            await self.one(members.group_id, [first for first, _ in members.items], self.first.drop)


class Sink(Played):
    """Takes in what comes, and that is all."""

    items: Any

    async def run(self) -> None:
        everything = any(link.dispatch == "broadcast" for link in self.shape.into(self.name))
        name = f"{self.name}/{self.context.replica}" if everything else self.name
        async for item in self.items:
            await self.take_time(key_of(item))
            self.record.see(name, key_of(item))


class SampleSink(Sink):
    items: In[Sample]


class GroupSink(Sink):
    items: In[Group]
