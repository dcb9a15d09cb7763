"""Which samples a run keeps: all, a share of the groups, as many as cost little, or none."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flowrl.errors import ConfigError

PART_OF_TIME = 0.004
"""Share of a replica's time that keeping may take under `auto`. The driver's process spends about as much."""
FIRST_S, MOST_S = 0.002, 1.0
"""The time that may be spent at the start, and the largest time that can be saved up."""


@dataclass(frozen=True)
class SampleShare:
    """A parsed `--keep-samples`. `share` of the groups is kept; None: as many as PART_OF_TIME allows."""

    share: float | None = None
    held_out: bool = True
    """Whether held-out answers are kept; all of them are."""

    @staticmethod
    def parse(text: str) -> SampleShare:
        """Parse the value of the option. Raises ConfigError for any other text."""
        named = {
            "auto": SampleShare(),
            "all": SampleShare(1.0),
            "none": SampleShare(0.0),
            "off": SampleShare(0.0, held_out=False),
        }
        if text in named:
            return named[text]
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ConfigError(
                f"--keep-samples is {text!r}; it has to be auto, all, none, off, or a share of the groups such as 0.1"
            )
        return SampleShare(share)


class SampleChoice:
    """Decides for each group whether its samples are kept. With a share, a resumed run chooses the same groups."""

    def __init__(self, share: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._credit_s = FIRST_S
        self._seen_s: float | None = None

    def may(self) -> bool:
        """Whether any group can be kept now."""
        if self._share is not None:
            return self._share > 0
        self._earn()
        return self._credit_s > 0

    def wants(self, group_id: str) -> bool:
        """Whether the samples of the group are kept."""
        return self.may() if self._share is None else hashed(group_id) < self._share

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside as spent on keeping."""
        began_s = self._clock()
        yield
        self._credit_s -= self._clock() - began_s

    def _earn(self) -> None:
        now = self._clock()
        passed_s = now - (now if self._seen_s is None else self._seen_s)
        self._credit_s = min(MOST_S, self._credit_s + PART_OF_TIME * passed_s)
        self._seen_s = now


def hashed(group_id: str) -> float:
    """A number in [0, 1) that depends only on the group."""
    return zlib.crc32(group_id.encode()) / 2**32
