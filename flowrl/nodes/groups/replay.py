"""Replay: older groups are trained again, beside the fresh groups of a batch.

A batch of P fresh groups, which have tickets, takes up to `Replay.groups` older ones along. An older group has had its
first use, so it is closed in the ledger: it holds no ticket, and nothing is booked for it but one more use, with its
number. Fresh groups, tickets, window and staleness are as without replay.

Invariants
- A group becomes available with the batch after the one that used it first, in the state of that first use.
- A group is used at most `max_uses` times, the first included, and by no batch that updates a version more than
  `max_age` after the one that its first use updated. So no token is older than staleness + `max_age`.
- Which groups a batch takes along depends on the groups so far, the batch's version and the run's seed only. So a
  resumed run, which forms the last unfinished batch again, takes the same ones along, and counts each use once.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from flowrl.messages import Group

ReplayOrder = Literal["fresh", "spread", "random"]


@dataclass(frozen=True)
class Replay:
    """How many older groups are trained again, how often, and which.

    A class that inherits from this one may rank groups by a function of its own (`rank_group`).
    """

    groups: int = 0
    """Older groups that a batch takes along, at most. 0: none."""
    keep: int = 64
    """Number of groups to choose from: the newest."""
    max_uses: int = 2
    """How often a group is trained in all, its first use included."""
    max_age: int = 4
    """Largest number of versions between a group's first use and its last."""
    prefer: ReplayOrder = "fresh"
    """Which groups are taken first: those used first most recently, those with the largest spread of rewards, or any
    by chance."""

    def find_problems(self) -> Iterator[str]:
        """Problems of these settings, as complete sentences."""
        for name, least in (("groups", 0), ("keep", 1), ("max_uses", 2), ("max_age", 1)):
            if (value := getattr(self, name)) < least:
                yield f"replay.{name} is {value}; it has to be {least} or more"
        if self.prefer not in get_args(ReplayOrder):
            yield f"replay.prefer is {self.prefer!r}; choose one of {', '.join(get_args(ReplayOrder))}"

    def rank_group(self, group: Group, age: int, rng: random.Random) -> float:
        """The rank of a group of that age, counted from its first use; the groups with the largest are taken."""
        if self.prefer == "spread":
            return float(np.std([sample.reward for sample in group.samples]))
        return rng.random() if self.prefer == "random" else -age


@dataclass
class KeptGroup:
    """A group that may be trained again."""

    group: Group
    first: int
    """The version that its first use updated."""
    uses: int = 1


class ReplayBuffer:
    """The groups of one batcher that may be trained again."""

    def __init__(self, options: Replay, seed: int) -> None:
        self._options = options
        self._seed = seed
        self._kept: list[KeptGroup] = []
        """In order of their first use."""

    def choose_groups(self, version: int) -> list[Group]:
        """The groups that the batch which updates `version` takes along; this counts as a use of each.

        Their samples say how many batches have trained them before.
        """
        rng = random.Random(f"{self._seed}/replay/{version}")
        ranked = [(self._options.rank_group(one.group, version - one.first, rng), one) for one in self._usable(version)]
        ranked.sort(key=lambda pair: pair[0], reverse=True)  # equal ranks stay in the order of their first use
        chosen = []
        for _, one in ranked[: self._options.groups]:
            samples = tuple(replace(sample, times_trained=one.uses) for sample in one.group.samples)
            chosen.append(replace(one.group, samples=samples))
            one.uses += 1
        return chosen

    def add_groups(self, groups: Sequence[Group], version: int) -> None:
        """Keep copies of the groups whose first use updates `version`; their arrays are valid only until then."""
        kept = self._usable(version + 1)
        kept += [KeptGroup(copy.deepcopy(replace(group, metrics={})), version) for group in groups]
        self._kept = kept[-self._options.keep :]

    def _usable(self, version: int) -> list[KeptGroup]:
        most, oldest = self._options.max_uses, version - self._options.max_age
        return [one for one in self._kept if one.uses < most and one.first >= oldest]

    def state(self) -> Mapping[str, Any]:
        """State for a checkpoint."""
        return {"kept": [[one.group, one.first, one.uses] for one in self._kept]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._kept = [KeptGroup(group, int(first), int(uses)) for group, first, uses in state["kept"]]


def spread_out(fresh: Sequence[Group], again: Sequence[Group]) -> list[Group]:
    """Both in one order, evenly mixed: the mini-batches of several optimizer steps are cut from it."""
    places = [
        (number / max(1, len(of)), of is again, group) for of in (fresh, again) for number, group in enumerate(of)
    ]
    return [group for *_, group in sorted(places, key=lambda place: place[:2])]
