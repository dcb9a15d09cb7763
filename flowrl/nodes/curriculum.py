"""Which prompt of a source is asked next, depending on how the policy did on earlier prompts: a curriculum, and replay.

A share of all groups asks prompts chosen by pass rate, another share repeats prompts that no sample has passed, and the
remaining groups ask the prompts of the data in their order. So no prompt starves: the remaining groups reach every
prompt once an epoch.

A prompt with pass rate p is chosen with weight p·(1 − p), its learnability (arXiv 2408.15099; for language models arXiv
2502.12272): most often near 1/2, and never while all of its samples pass or none do.

Invariants of `PassRates`, which makes the choices

- A choice depends on the seed, the number of the choice and the outcomes known by then, and on nothing else.
- The outcome of a group counts once: the visits of its prompt are numbered, and an outcome counts only if its visit is
  later than that of the prompt's last outcome.
- A prompt whose outcome is still expected is not chosen, and not replayed.
- A choice, a group and an outcome each cost O(log n) for n prompts; the indexes for that are rebuilt from `state`.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.graph.ports import Call
from flowrl.messages import Message, Scored

PASSED = 1.0
ROUNDING = 1e-6


@dataclass(frozen=True)
class Curriculum:
    """Which prompts are asked more often than the others. By default none are."""

    chosen: float = 0.0
    """Share of the groups whose prompt is chosen by its pass rate, most often near 1/2; 0: none."""
    replayed: float = 0.0
    """Share of the groups that repeat a prompt which no sample has passed, the longest waiting first; 0: none."""
    replay_after: int = 256
    """Number of groups after which a prompt that no sample has passed may be repeated."""
    pass_at: float | None = None
    """Lowest raw reward with which a sample has passed; None: 1."""
    by: str = ""
    """Column of the rows, such as level or of_task: rows with the same value share a pass rate. Empty: one per row."""

    @property
    def used(self) -> bool:
        """Whether any prompt is chosen by outcomes."""
        return bool(self.chosen or self.replayed)

    def find_problems(self) -> Iterator[str]:
        """Sentences that name a field and say what is wrong with its value."""
        for name in ("chosen", "replayed"):
            if not 0 <= getattr(self, name) < 1:
                yield f"curriculum.{name} is {getattr(self, name)}; it has to be in [0, 1)"
        if self.chosen + self.replayed >= 1:
            yield (
                f"curriculum.chosen and curriculum.replayed are {self.chosen} and {self.replayed}; their sum has to be "
                "below 1, or prompts that are neither chosen nor replayed would never be asked"
            )
        if self.replay_after < 0:
            yield f"curriculum.replay_after is {self.replay_after}; it has to be 0 or more"
        if not self.used and self != Curriculum():
            yield "curriculum has settings, but neither curriculum.chosen nor curriculum.replayed is above 0"


@dataclass(frozen=True)
class GroupOutcome(Message):
    """What the policy could do with a prompt: the raw rewards of the group's samples, without those that failed."""

    prompt_id: str
    epoch: int
    """The epoch of the group's prompts: with a curriculum, how often the prompt was asked before."""
    raw_rewards: tuple[float, ...]


@dataclass(frozen=True)
class Noted(Message):
    """The answer to an outcome."""

    is_new: bool
    """False if this outcome, or a later one of the same prompt, was noted before."""


async def report_outcome(outcomes: Call[GroupOutcome, Noted], samples: Sequence[Scored]) -> None:
    """Tell the source how a group was rewarded, if the graph has an edge for that and a sample was scored."""
    if outcomes.connected and samples:
        first, rewards = samples[0], tuple(float(sample.raw_reward) for sample in samples)
        await outcomes(GroupOutcome(first.prompt_id, first.epoch, rewards))


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
        self._buckets = RateBuckets(buckets or self._names, order, visits=self.num_visits, is_open=self._is_open)
        self._draw = WeightedDraw(len(self._buckets))
        self._unsolved_rows = RisingQueue(self._asked_at_if_unsolved)
        self._at_rate = Counter[float]()
        """Pass rate -> number of prompts whose newest outcome has it."""

    def num_visits(self, row: int) -> int:
        """How often the row has been asked."""
        return int(self._known[self._names[row]][ASKED]) if self._names[row] in self._known else 0

    def choose_row(self) -> ChosenRow | None:
        """The choice for the next group; None: the next row in the order of the data."""
        rng = random.Random(f"{self._seed}/chosen/{self._number}")
        drawn = rng.random()
        if drawn < self._settings.chosen:
            bucket = self._draw.draw_number(rng)
            if bucket is None:
                return None
            return ChosenRow(self._buckets.next_row(bucket), "chosen", self._buckets.pass_rate(bucket))
        if drawn < self._settings.chosen + self._settings.replayed:
            row = self._unsolved_rows.first_number()
            if row is not None and self._number - self._known[self._names[row]][AT] >= self._settings.replay_after:
                return ChosenRow(row, "replayed", 0.0)
        return None

    def _asked_at_if_unsolved(self, row: int) -> Key | None:
        known = self._known[self._names[row]]
        unsolved = known[HEARD] >= 0 and known[RATE] == 0 and not self._is_open(row)
        return (known[AT], row) if unsolved else None

    def _is_open(self, row: int) -> bool:
        known = self._known.get(self._names[row])
        return known is not None and known[HEARD] < known[ASKED] - 1

    def note_asked(self, row: int) -> None:
        """Note that a group of the row was asked."""
        if not self._is_open(row):
            self._buckets.count_waiting(row, 1)
        known = self._known.setdefault(self._names[row], [0.0, -1.0, 0.0, 0.0])
        known[ASKED] += 1
        known[AT] = self._number
        self._number += 1
        self._weigh_row(row)

    def note_outcome(self, outcome: GroupOutcome) -> bool:
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
        if (row := self._rows.get(outcome.prompt_id)) is not None:  # else the data have lost the row since
            self._buckets.count_samples(row, passed, len(outcome.raw_rewards))
            if not self._is_open(row):
                self._buckets.count_waiting(row, -1)
                self._unsolved_rows.put_number(row)
            self._weigh_row(row)
        return True

    def _weigh_row(self, row: int) -> None:
        bucket = self._buckets.of_row[row]
        self._draw.set_weight(bucket, self._buckets.learnability(bucket))

    def num_at(self, rate: float) -> int:
        """Number of prompts whose newest outcome has this pass rate: 1 for solved ones, 0 for unsolved ones."""
        return self._at_rate[rate]

    def state(self) -> Mapping[str, Any]:
        return {
            "number": self._number,
            "known": {name: list(known) for name, known in self._known.items()},
            "sums": dict(self._buckets.decayed_sums()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of another instance; this one must not know any outcome yet."""
        self._number = int(state["number"])
        self._known = {name: [float(value) for value in known] for name, known in state["known"].items()}
        self._buckets.load_sums(state["sums"])
        for name, known in self._known.items():
            if known[HEARD] >= 0:
                self._at_rate[known[RATE]] += 1
            if (row := self._rows.get(name)) is None:
                continue
            if self._is_open(row):
                self._buckets.count_waiting(row, 1)
            else:
                self._buckets.count_waiting(row, 0)
                self._unsolved_rows.put_number(row)
            self._weigh_row(row)


DECAY = 0.5
"""Factor on the samples in a pass rate when another group is added, because older samples are from an older policy."""


class RateBuckets:
    """Buckets of rows that share a pass rate, and the next row of each. They are arrays: there may be a bucket per row.

    A row waits while its outcome is expected. The next row of a bucket is one that was never asked, in the given order;
    if there is none, it is the row asked least often.

    `names` has the bucket of each row, and `order` the rows in the order in which they are first asked.

    `visits(row)` says how often the row was asked, `is_open(row)` whether its outcome is expected.
    """

    def __init__(
        self,
        names: Sequence[str],
        order: Sequence[int],
        *,
        visits: Callable[[int], int],
        is_open: Callable[[int], bool],
    ) -> None:
        self._visits, self._is_open = visits, is_open
        self.names = tuple(dict.fromkeys(names))
        numbers = {name: number for number, name in enumerate(self.names)}
        self.of_row = array("q", [numbers[name] for name in names])
        """Row -> number of its bucket."""
        self._starts = array("q", bytes(8 * (len(self.names) + 1)))
        """Bucket -> where its rows begin in `_rows`."""
        for bucket in self.of_row:
            self._starts[bucket + 1] += 1
        for bucket in range(len(self.names)):
            self._starts[bucket + 1] += self._starts[bucket]
        self._rows, filled = array("q", bytes(8 * len(self.of_row))), array("q", self._starts)
        for row in order:
            bucket = self.of_row[row]
            self._rows[filled[bucket]] = row
            filled[bucket] += 1
        self._turns = array("q", bytes(8 * len(names)))
        """Row -> its place in the order."""
        for turn, row in enumerate(order):
            self._turns[row] = turn
        self._begun = array("q", bytes(8 * len(self.names)))
        """Bucket -> number of rows at its front that have all been asked."""
        self._waiting = array("q", bytes(8 * len(self.names)))
        self._passed, self._samples = (array("d", bytes(8 * len(self.names))) for _ in range(2))
        self._again: dict[int, RisingQueue] = {}
        """Bucket of several rows -> its rows that were asked and answered, by their visits."""

    def __len__(self) -> int:
        return len(self.names)

    def pass_rate(self, bucket: int) -> float:
        """Mean pass rate of the known samples; 0 if there are none."""
        return self._passed[bucket] / self._samples[bucket] if self._samples[bucket] else 0.0

    def learnability(self, bucket: int) -> float:
        """p·(1 − p) of the pass rate; 0 while all rows of the bucket wait."""
        rate = self.pass_rate(bucket)
        return rate * (1 - rate) if self._waiting[bucket] < self._bucket_size(bucket) else 0.0

    def next_row(self, bucket: int) -> int:
        """The row to ask next. At least one row of the bucket must not be waiting."""
        start, size = self._starts[bucket], self._bucket_size(bucket)
        while self._begun[bucket] < size and self._visits(self._rows[start + self._begun[bucket]]):
            self._begun[bucket] += 1
        if self._begun[bucket] < size:
            return self._rows[start + self._begun[bucket]]
        row = self._rows[start] if size == 1 else self._again[bucket].first_number()
        assert row is not None, "a row does not wait"
        return row

    def count_waiting(self, row: int, change: int) -> None:
        """Note whether the outcome of the row is expected now (1), has arrived (−1), or is not expected (0)."""
        bucket = self.of_row[row]
        self._waiting[bucket] += change
        if change < 1 and self._bucket_size(bucket) > 1:  # it may be asked again
            self._again.setdefault(bucket, RisingQueue(self._visits_if_answered)).put_number(row)

    def count_samples(self, row: int, passed: int, samples: int) -> None:
        """Add a group of the row to the pass rate of its bucket."""
        bucket = self.of_row[row]
        self._passed[bucket] = DECAY * self._passed[bucket] + passed
        self._samples[bucket] = DECAY * self._samples[bucket] + samples

    def decayed_sums(self) -> Iterator[tuple[str, list[float]]]:
        """(bucket's name, [samples that passed, samples], both decayed) of the buckets that have samples."""
        for bucket, name in enumerate(self.names):
            if self._samples[bucket]:
                yield name, [self._passed[bucket], self._samples[bucket]]

    def load_sums(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Load what `decayed_sums` returned; buckets that no longer exist are left out."""
        for bucket, name in enumerate(self.names):
            self._passed[bucket], self._samples[bucket] = map(float, sums.get(name, (0.0, 0.0)))

    def _bucket_size(self, bucket: int) -> int:
        return self._starts[bucket + 1] - self._starts[bucket]

    def _visits_if_answered(self, row: int) -> Key | None:
        return None if self._is_open(row) else (self._visits(row), self._turns[row])


Key = tuple[float, int]
Current = Callable[[int], Key | None]


class RisingQueue:
    """Finds the entry with the lowest key, where keys only rise and entries may leave and return: a lazy heap.

    Numbers are ordered by `current(number)`, their present key; it is None while a number is not in the queue.

    A number that enters or returns has to be put. A number that leaves, or whose key rises, needs no call: its old
    entry is found to be wrong when it comes first. Every number has at most one entry, so a put costs O(log n). Each
    correction in `first_number` is due to a change of the number's key since its entry was put or last corrected.
    """

    def __init__(self, current: Current) -> None:
        self._current = current
        self._heap: list[tuple[Key, int]] = []
        self._entered: set[int] = set()

    def put_number(self, number: int) -> None:
        """Add the number, unless it already has an entry, whose key `first_number` corrects when necessary."""
        key = self._current(number)
        if number not in self._entered and key is not None:
            self._entered.add(number)
            heapq.heappush(self._heap, (key, number))

    def first_number(self) -> int | None:
        """The number with the lowest key; None if the queue is empty."""
        while self._heap:
            key, number = self._heap[0]
            now = self._current(number)
            if now == key:
                return number
            if now is None:
                heapq.heappop(self._heap)
                self._entered.discard(number)
            else:
                heapq.heapreplace(self._heap, (now, number))
        return None


UNIT = 1 << 32
"""The whole number for weight 1. With weights up to 1, sums of 2^31 weights fit into 64 bits."""


class WeightedDraw:
    """Draws one of many by weight in O(log n): a Fenwick tree (P. M. Fenwick, 1994, DOI 10.1002/spe.4380240306).

    Weights are kept as whole numbers, so that sums do not depend on the order in which weights were set: a run resumed
    from a checkpoint makes the same draw as the run without the interruption.

    Numbers from 0 to `size` − 1, each with a weight in [0, 1], at first 0."""

    def __init__(self, size: int) -> None:
        self._weights = array("q", bytes(8 * size))
        self._sums = array("q", bytes(8 * (size + 1)))
        """At place i the sum of the i & −i weights that end with number i − 1."""
        self._highest = 1 << size.bit_length() >> 1

    def set_weight(self, number: int, weight: float) -> None:
        """Give a number another weight; one above 0 stays above 0, however small it is."""
        whole = max(1, round(weight * UNIT)) if weight > 0 else 0
        change = whole - self._weights[number]
        self._weights[number] = whole
        place = number + 1 if change else len(self._sums)
        while place < len(self._sums):
            self._sums[place] += change
            place += place & -place

    def draw_number(self, rng: random.Random) -> int | None:
        """A number, with a probability proportional to its weight; None if all weights are 0."""
        total, place = 0, len(self._sums) - 1
        while place:
            total += self._sums[place]
            place -= place & -place
        if not total:
            return None
        left, place, step = rng.randrange(total), 0, self._highest
        while step:
            if place + step < len(self._sums) and self._sums[place + step] <= left:
                place += step
                left -= self._sums[place]
            step >>= 1
        return place
