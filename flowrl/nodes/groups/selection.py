"""Nodes that select members of a group: the best one to imitate, or the best against the worst.

They compare the reward after shaping. Members that are not selected are filtered with a reason. With `dynamic`,
whole groups without a learning signal are filtered before that.
If rewards are equal, the first member counts as the better one, so that a run is reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from flowrl.graph.node import Facts
from flowrl.graph.ports import Members, Out
from flowrl.messages import Group, Scored, Trainable
from flowrl.nodes.curriculum import report_outcome
from flowrl.nodes.groups.group_filter import DynamicSampling, FilteringNode
from flowrl.nodes.scoring.reward import COMPARED_S, Comparisons, FailingRewards
from flowrl.nodes.scoring.scoring_model import require_one_sequence
from flowrl.tasks import Task
from flowrl.tasks.reward_calls.http import AWAY_S
from flowrl.tasks.reward_calls.judge import BadReward
from flowrl.training.advantages import all_equal, require_one_seat, whole_reward

PairReference = Literal["round", "initial"]


class BestOfN(FilteringNode):
    """Passes on the best of each group's `size` members with advantage 1 (RAFT, arXiv 2304.06767).

    The other members are filtered as `not_best`. With `least_reward`, a group whose best member has a lower raw
    reward is filtered completely; its best member is filtered as `below_least`.
    """

    groups: Out[Group]

    def __init__(self, *, size: int, least_reward: float | None = None, dynamic: DynamicSampling | None = None) -> None:
        super().__init__(dynamic)
        self.size = size
        self.least_reward = least_reward

    def facts(self) -> Facts:
        return Facts(group_size=self.size, drops=True, keeps_lineage=False, optional=("outcomes",), as_data=True)

    def check(self, facts: Any) -> list[str]:
        problems = [] if self.size >= 2 else [f"the group size is {self.size}; the best of a group needs at least 2"]
        return problems + ([] if self.dynamic is None else self.dynamic.find_problems())

    async def run(self) -> None:
        async for members in self.scored.groups(self.size):
            require_one_seat(members.items, "a BestOfN")
            await report_outcome(self.outcomes, members.items)
            if self._drop_filtered(members.items, members.items):
                continue
            best = max(members.items, key=whole_reward)
            kept = self.least_reward is None or best.raw_reward >= self.least_reward
            self._filter.add_group(members.items, passed_on=[best] if kept else ())
            for sample in members.items:
                if sample is not best:
                    self.scored.drop(sample, "not_best", state="filtered")
            if kept:
                await self.groups.send(self.make_group(members, best), made_from=[best])
            else:
                self.scored.drop(best, "below_least", state="filtered")
                self._filter.assert_some_pass(self.name, "below_least")

    def make_group(self, members: Members[Scored], best: Scored) -> Group:
        """A group of one sample in which training raises the probability of every policy token."""
        sample = Trainable.of(best, 1.0)
        return Group(members.group_id, (sample,), members.size, self._filter.take_sums())


class PairMaker(FilteringNode):
    """Makes a pair from each group: the best of its `size` members is chosen, the worst rejected.

    A group without a difference is filtered as `tie`, the members in between as `not_paired`, a group with
    fewer than two scored members as `group_too_small`. With `reference="round"` the reference is the weights
    that sampled the pair, whose logprobs every sample carries; with "initial" an upstream Reference node
    provides the reference logprobs. `prefer` is a pairwise reward for `task` (`Comparisons`): the best is
    then the answer that wins most comparisons, whatever its reward. A group that cannot be compared fails, also if the
    comparison takes longer than `timeout_s` (None: 60). Servers that cannot be reached are waited for `away_s`.
    """

    groups: Out[Group]

    def __init__(
        self,
        *,
        size: int,
        reference: PairReference = "round",
        prefer: str = "",
        task: Task | None = None,
        dynamic: DynamicSampling | None = None,
        timeout_s: float | None = None,
        away_s: float = AWAY_S,
    ) -> None:
        super().__init__(dynamic)
        self.size = size
        self.task = task
        limit_s = COMPARED_S if timeout_s is None else timeout_s
        self._failing = FailingRewards()
        self._comparisons = Comparisons(prefer, task or Task(), timeout_s=limit_s, away_s=away_s) if prefer else None
        self.reference: PairReference = reference

    def facts(self) -> Facts:
        return Facts(
            group_size=self.size,
            drops=True,
            keeps_lineage=False,
            optional=("outcomes",),
            correction="" if self.reference == "round" else None,
            correct_by="compare with another reference (--reference.weights initial)",
        )

    def check(self, facts: Any) -> list[str]:
        problems = []
        if self.size < 2:
            problems.append(f"the group size is {self.size}; a pair needs at least 2")
        if self.reference not in get_args(PairReference):
            problems.append(f"reference is {self.reference!r}; it has to be round or initial")
        if self._comparisons is not None and self.task is None:
            problems.append("prefer= needs task=: it is tried on rows of the task")
        return problems + ([] if self.dynamic is None else self.dynamic.find_problems())

    def preflight(self) -> None:
        if self._comparisons is not None:
            self._comparisons.preflight()

    async def setup(self) -> None:
        if self._comparisons is not None:
            await self.blocking(self._comparisons.open_client, self.context)

    async def close(self) -> None:
        if self._comparisons is not None:
            await self._comparisons.close()

    async def run(self) -> None:
        async for members in self.scored.groups(self.size):
            await report_outcome(self.outcomes, members.items)
            if self._drop_filtered(members.items, members.items):
                continue
            compared: Sequence[Scored] = members.items
            try:
                if self._comparisons is not None:
                    with self.context.busy("compare"):
                        won = await self._comparisons.shares_won(members.items)
                    compared = [replace(one, reward=share) for one, share in zip(members.items, won, strict=True)]
            except BadReward as bad:
                self._failing.note_failed(self.context, bad.reason, str(bad), samples=len(members.items))
                for sample in members.items:
                    self.scored.drop(sample, bad.reason, state="failed")
                continue
            self._failing.note_scored()
            pair, reason = self.choose_pair(compared)
            pair = tuple(sample for chosen in pair for sample in members.items if sample.sample_id == chosen.sample_id)
            self._filter.add_group(members.items, passed_on=pair)
            paired = {sample.sample_id for sample in pair}
            for sample in members.items:
                if sample.sample_id not in paired:
                    self.scored.drop(sample, reason, state="filtered")
            if pair:
                await self.groups.send(self.make_group(members, *pair), made_from=pair)
            else:
                self._filter.assert_some_pass(self.name, reason)

    def choose_pair(self, samples: Sequence[Scored]) -> tuple[tuple[Scored, ...], str]:
        """(chosen, rejected), or () if there is no pair, and the reason why the others are left out."""
        require_one_seat(samples, "a PairMaker")
        require_one_sequence(samples, "a PairMaker")
        if len(samples) < 2:
            return (), "group_too_small"
        if all_equal([whole_reward(sample) for sample in samples]):
            return (), "tie"
        order = sorted(samples, key=whole_reward, reverse=True)  # equal rewards keep their order
        return (order[0], order[-1]), "not_paired"

    def make_group(self, members: Members[Scored], chosen: Scored, rejected: Scored) -> Group:
        """The pair as neighbours that stay together."""
        pair: list[Trainable] = []
        for sample, label in ((chosen, 1), (rejected, -1)):
            made = Trainable.of(sample, 0.0)
            labelled = replace(made, label=label, pair=members.group_id)
            own = self.reference == "round"  # then the reference is the policy that sampled the pair
            pair.append(replace(labelled, ref_logprobs=sample.behavior_logprobs) if own else labelled)
        return Group(members.group_id, tuple(pair), members.size, self._filter.take_sums())
