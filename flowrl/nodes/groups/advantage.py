"""Computes advantages from rewards by comparing the members of one group with each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flowrl.graph.node import Facts
from flowrl.graph.ports import In, Members, Out, join
from flowrl.messages import Group, Sample, Scored
from flowrl.nodes.curriculum import report_outcome
from flowrl.nodes.groups.group_filter import DynamicSampling, FilteringNode
from flowrl.training.advantages import GROUP_ESTIMATORS, Estimate, Estimator, leave_unvalued


class GroupAdvantage(FilteringNode):
    """Collects the `size` members of a group and assigns each of their policy tokens its advantage.

    `estimate` is an estimator's name or an `Estimate` with further settings. With `dynamic`, groups without a
    learning signal are filtered; without it, all groups with enough members to compare are trained on.

    Under `gae`, samples without values leave their advantages unset: the batcher, which needs the same
    estimate, sends the whole batch to a Critic. `outcomes` tells a source with a curriculum how groups were rewarded.
    """

    groups: Out[Group]

    def __init__(
        self, estimate: Estimate | Estimator = "group_norm", *, size: int, dynamic: DynamicSampling | None = None
    ) -> None:
        super().__init__(dynamic)
        self.estimate = estimate if isinstance(estimate, Estimate) else Estimate(estimate)
        self.size = size

    def facts(self) -> Facts:
        return Facts(group_size=self.size, drops=True, keeps_lineage=False, optional=("outcomes",))

    def check(self, facts: Any) -> list[str]:
        problems = self.estimate.list_problems()
        if self.size < 1:
            problems.append(f"the group size is {self.size}; it needs at least 1")
        elif self.size < 2 and self.estimate.estimator in GROUP_ESTIMATORS:
            problems.append(
                f"estimator {self.estimate.estimator!r} compares the members of a group, but the group size is 1"
            )
        elif self.size < self.estimate.least_members:
            problems.append(f"pass_k is {self.estimate.pass_k}, but a group has {self.size} samples; lower it")
        return problems + (self.dynamic.find_problems() if self.dynamic is not None else [])

    async def run(self) -> None:
        async for members in self.scored.groups(self.size):
            await self._send_or_filter(members, members.items)

    async def _send_or_filter(self, members: Members[Scored], taken: Sequence[Scored]) -> None:
        """Filter the group or send it; `taken` are the messages that delivered its samples."""
        await report_outcome(self.outcomes, members.items)
        if len(members.items) < self.estimate.least_members:  # nothing to compare with
            for sample in taken:
                self.scored.drop(sample, "group_too_small", state="filtered")
            return
        if self._drop_filtered(members.items, taken):
            return
        if self.dynamic is not None:
            self._filter.add_group(members.items, passed_on=members.items)
        await self.groups.send(self.make_group(members), made_from=taken)

    def make_group(self, members: Members[Scored]) -> Group:
        """The group of `members` with its advantages."""
        waits = self.estimate.estimator == "gae" and any(sample.values is None for sample in members.items)
        return Group(
            group_id=members.group_id,
            samples=leave_unvalued(members.items) if waits else self.estimate.make_trainables(members.items),
            group_size=members.size,
            metrics={} if self.dynamic is None else self._filter.take_sums(),
        )


class JoinedAdvantage(GroupAdvantage):
    """A GroupAdvantage for a graph with a Reference parallel to the reward: joins both branches by sample."""

    referenced: In[Sample]

    def facts(self) -> Facts:
        return dataclasses.replace(super().facts(), joins=("scored", "referenced"))

    async def run(self) -> None:
        async for pairs in join(self.scored, self.referenced).groups(self.size):
            samples = tuple(scored.with_columns_of(referenced) for scored, referenced in pairs.items)
            members = Members(pairs.group_id, pairs.ticket, pairs.size, samples, pairs.lost)
            await self._send_or_filter(members, [scored for scored, _ in pairs.items])
