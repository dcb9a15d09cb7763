"""Buckets of rows that share a pass rate, and the next row of each. They are arrays: there may be a bucket per row.

A row waits while its outcome is expected. The next row of a bucket is one that was never asked, in the given order; if
there is none, it is the row asked least often.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from flowrl.nodes.curricula.rising_queue import Key, RisingQueue

DECAY = 0.5
"""Factor on the samples in a pass rate when another group is added, because older samples are from an older policy."""


class RateBuckets:
    """`names` has the bucket of each row, and `order` the rows in the order in which they are first asked.

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
        self._rows, self._starts = self._by_bucket(order)
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

    def _by_bucket(self, order: Sequence[int]) -> tuple[array[int], array[int]]:
        """(rows, bucket after bucket; where each bucket begins)."""
        starts = array("q", bytes(8 * (len(self.names) + 1)))
        for bucket in self.of_row:
            starts[bucket + 1] += 1
        for bucket in range(len(self.names)):
            starts[bucket + 1] += starts[bucket]
        rows, filled = array("q", bytes(8 * len(self.of_row))), array("q", starts)
        for row in order:
            bucket = self.of_row[row]
            rows[filled[bucket]] = row
            filled[bucket] += 1
        return rows, starts

    def __len__(self) -> int:
        return len(self.names)

    def pass_rate(self, bucket: int) -> float:
        """Mean pass rate of the known samples; 0 if there are none."""
        return self._passed[bucket] / self._samples[bucket] if self._samples[bucket] else 0.0

    def weight(self, bucket: int) -> float:
        """p·(1 − p) of the pass rate; 0 while all rows of the bucket wait."""
        rate = self.pass_rate(bucket)
        return rate * (1 - rate) if self._waiting[bucket] < self._size(bucket) else 0.0

    def turn(self, bucket: int) -> int:
        """The row to ask next. At least one row of the bucket must not be waiting."""
        start, size = self._starts[bucket], self._size(bucket)
        while self._begun[bucket] < size and self._visits(self._rows[start + self._begun[bucket]]):
            self._begun[bucket] += 1
        if self._begun[bucket] < size:
            return self._rows[start + self._begun[bucket]]
        row = self._rows[start] if size == 1 else self._again[bucket].first()
        assert row is not None, "a row does not wait"
        return row

    def waits(self, row: int) -> None:
        """Note that the row's outcome is expected now, and was not before."""
        self._waiting[self.of_row[row]] += 1

    def rests(self, row: int) -> None:
        """Note that the row has been asked, and that no outcome of it is expected."""
        bucket = self.of_row[row]
        if self._size(bucket) > 1:
            self._again.setdefault(bucket, RisingQueue(self._key)).put(row)

    def answered(self, row: int) -> None:
        """Note that the last outcome that was expected of the row has arrived."""
        self._waiting[self.of_row[row]] -= 1
        self.rests(row)

    def count(self, row: int, passed: int, samples: int) -> None:
        """Add a group of the row to the pass rate of its bucket."""
        bucket = self.of_row[row]
        self._passed[bucket] = DECAY * self._passed[bucket] + passed
        self._samples[bucket] = DECAY * self._samples[bucket] + samples

    def sums(self) -> Iterator[tuple[str, list[float]]]:
        """(bucket's name, [samples that passed, samples], both decayed) of the buckets that have samples."""
        for bucket, name in enumerate(self.names):
            if self._samples[bucket]:
                yield name, [self._passed[bucket], self._samples[bucket]]

    def load_sums(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Load what `sums` returned; buckets that no longer exist are left out."""
        for bucket, name in enumerate(self.names):
            self._passed[bucket], self._samples[bucket] = map(float, sums.get(name, (0.0, 0.0)))

    def _size(self, bucket: int) -> int:
        return self._starts[bucket + 1] - self._starts[bucket]

    def _key(self, row: int) -> Key | None:
        return None if self._is_open(row) else (self._visits(row), self._turns[row])
