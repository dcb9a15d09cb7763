"""From rewards to advantages: the members of one group compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Members, Out
from flowrl.messages import Group, Scored
from flowrl.nodes.dynamic import DynamicSampling, GroupFilter
from flowrl.training.advantages import GROUP_ESTIMATORS, Estimator
from flowrl.training.estimate import Estimate


class GroupAdvantage(Node):
    """Collects the `size` members of a group and gives each of their policy tokens its advantage.

    `estimate` is an estimator's name or an `Estimate` with further settings. With `dynamic` groups that
    teach nothing are filtered; without it all are trained on that have members enough to compare.
    """

    keyed_state = True

    scored: In[Scored]
    groups: Out[Group]

    def __init__(
        self, estimate: Estimate | Estimator = "group_norm", *, size: int, dynamic: DynamicSampling | None = None
    ) -> None:
        self.estimate = estimate if isinstance(estimate, Estimate) else Estimate(estimate)
        self.size = size
        self.dynamic = dynamic
        self._filter = GroupFilter(dynamic)

    def facts(self) -> Facts:
        return Facts(group_size=self.size, drops=True, keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        problems = self.estimate.problems()
        if self.size < 1:
            problems.append(f"the group size is {self.size}; it needs at least 1")
        elif self.size < 2 and self.estimate.estimator in GROUP_ESTIMATORS:
            problems.append(
                f"estimator {self.estimate.estimator!r} compares the members of a group, but the group size is 1"
            )
        return problems + (self.dynamic.problems() if self.dynamic is not None else [])

    async def run(self) -> None:
        async for members in self.scored.groups(self.size):
            reason = self._why_filtered(members)
            if reason:
                for sample in members.items:
                    self.scored.drop(sample, reason, state="filtered")
                self._filter.assert_within(self.name)
            else:
                await self.groups.send(self.group(members), made_from=members.items)

    def group(self, members: Members[Scored]) -> Group:
        """The group of `members` with its advantages."""
        return Group(
            group_id=members.group_id,
            samples=self.estimate.trainable(members.items),
            group_size=members.size,
            metrics=self._filter.since_kept(),
        )

    def _why_filtered(self, members: Members[Scored]) -> str:
        """The reason for which the group is not trained, "" if it is."""
        if len(members.items) < 2 and self.estimate.estimator in GROUP_ESTIMATORS:
            return "group_too_small"
        return self._filter.judge(members.items)

    def state(self) -> Mapping[str, Any]:
        return self._filter.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._filter.load_state(state)
