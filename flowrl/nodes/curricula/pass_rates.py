"""What is known about the prompts of a source, and which prompt is asked next: the choices of a curriculum.

Invariants

- A choice depends on the seed, the number of the choice and the outcomes known by then, and on nothing else.
- The outcome of a group counts once: the visits of its prompt are numbered, and an outcome counts only if its visit is
  later than that of the prompt's last outcome.
- A prompt whose outcome is still expected is not chosen, and not replayed.
- A choice, a group and an outcome each cost O(log n) for n prompts; the indexes for that are rebuilt from `state`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.nodes.curricula.curriculum import PASSED, ROUNDING, Curriculum, GroupOutcome
from flowrl.nodes.curricula.rate_buckets import RateBuckets
from flowrl.nodes.curricula.rising_queue import Key, RisingQueue
from flowrl.nodes.curricula.weighted_draw import WeightedDraw

Reason = Literal["order", "chosen", "replayed"]
ASKED, HEARD, RATE, AT = range(4)


@dataclass(frozen=True)
class ChosenRow:
    """A row, and why it is asked."""

    row: int
    reason: Reason
    pass_rate: float | None = None
    """The pass rate by which the row was chosen."""


class PassRates:
    """What is known about the prompts of a source, and the choices that follow from it.

    `prompt_ids` and `buckets` are those of the rows, in their order: rows of one bucket share a pass rate.
    """

    def __init__(
        self, settings: Curriculum, prompt_ids: Sequence[str], buckets: Sequence[str] | None, *, seed: int
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._rows = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
        self._names = tuple(prompt_ids)
        self._number = 0
        """Number of groups asked."""
        self._known: dict[str, list[float]] = {}
        """Prompt -> [times asked, visit of its newest outcome or −1, that outcome's pass rate, number of the newest
        group that asked it]."""
        order = random.Random(f"{seed}/buckets").sample(range(len(self._names)), len(self._names))
        self._buckets = RateBuckets(buckets or self._names, order, visits=self.visits, is_open=self._is_open)
        self._draw = WeightedDraw(len(self._buckets))
        self._unsolved_rows = RisingQueue(self._asked_at_if_unsolved)
        self._at_rate = Counter[float]()
        """Pass rate -> number of prompts whose newest outcome has it."""

    def visits(self, row: int) -> int:
        """How often the row has been asked."""
        return int(self._known[self._names[row]][ASKED]) if self._names[row] in self._known else 0

    def choose(self) -> ChosenRow | None:
        """The choice for the next group; None: the next row in the order of the data."""
        rng = random.Random(f"{self._seed}/chosen/{self._number}")
        drawn = rng.random()
        if drawn < self._settings.chosen:
            return self._by_pass_rate(rng)
        return self._unsolved() if drawn < self._settings.chosen + self._settings.replayed else None

    def _by_pass_rate(self, rng: random.Random) -> ChosenRow | None:
        number = self._draw.draw(rng)
        if number is None:
            return None
        return ChosenRow(self._buckets.turn(number), "chosen", self._buckets.pass_rate(number))

    def _unsolved(self) -> ChosenRow | None:
        row = self._unsolved_rows.first()
        if row is None or self._number - self._known[self._names[row]][AT] < self._settings.replay_after:
            return None
        return ChosenRow(row, "replayed", 0.0)

    def _asked_at_if_unsolved(self, row: int) -> Key | None:
        known = self._known[self._names[row]]
        unsolved = known[HEARD] >= 0 and known[RATE] == 0 and not self._is_open(row)
        return (known[AT], row) if unsolved else None

    def _is_open(self, row: int) -> bool:
        known = self._known.get(self._names[row])
        return known is not None and known[HEARD] < known[ASKED] - 1

    def asked(self, row: int) -> None:
        """Note that a group of the row was asked."""
        if not self._is_open(row):
            self._buckets.waits(row)
        known = self._known.setdefault(self._names[row], [0.0, -1.0, 0.0, 0.0])
        known[ASKED] += 1
        known[AT] = self._number
        self._number += 1
        self._weigh(row)

    def note(self, outcome: GroupOutcome) -> bool:
        """Note an outcome; return whether it is new."""
        known = self._known.get(outcome.prompt_id)
        if known is None or not known[HEARD] < outcome.epoch < known[ASKED]:
            return False
        least = PASSED if self._settings.pass_at is None else self._settings.pass_at
        passed = sum(reward >= least - ROUNDING for reward in outcome.raw_rewards)
        if known[HEARD] >= 0:
            self._at_rate[known[RATE]] -= 1
        known[HEARD], known[RATE] = outcome.epoch, passed / len(outcome.raw_rewards)
        self._at_rate[known[RATE]] += 1
        if outcome.prompt_id in self._rows:
            self._answered(self._rows[outcome.prompt_id], passed, len(outcome.raw_rewards))
        return True

    def _answered(self, row: int, passed: int, samples: int) -> None:
        self._buckets.count(row, passed, samples)
        if not self._is_open(row):
            self._buckets.answered(row)
            self._unsolved_rows.put(row)
        self._weigh(row)

    def _weigh(self, row: int) -> None:
        bucket = self._buckets.of_row[row]
        self._draw.set(bucket, self._buckets.weight(bucket))

    def num_at(self, rate: float) -> int:
        """Number of prompts whose newest outcome has this pass rate: 1 for solved ones, 0 for unsolved ones."""
        return self._at_rate[rate]

    def state(self) -> Mapping[str, Any]:
        return {
            "number": self._number,
            "known": {name: list(known) for name, known in self._known.items()},
            "sums": dict(self._buckets.sums()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of another instance; this one must not know any outcome yet."""
        self._number = int(state["number"])
        self._known = {name: [float(value) for value in known] for name, known in state["known"].items()}
        self._buckets.load_sums(state["sums"])
        for name, known in self._known.items():
            if known[HEARD] >= 0:
                self._at_rate[known[RATE]] += 1
            if name in self._rows:
                self._enter(self._rows[name])

    def _enter(self, row: int) -> None:
        if self._is_open(row):
            self._buckets.waits(row)
        else:
            self._buckets.rests(row)
            self._unsolved_rows.put(row)
        self._weigh(row)
