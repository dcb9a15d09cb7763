"""Whether the failure of attempts depends on the length of episodes: then the episodes that are left are biased.

The length that a failed attempt would have had is not known, and the turns until it failed say little about it: an
attempt that fails in its first turn may belong to a long episode. So a failed attempt is compared with the finished
episodes of its group, which have the same start. There are two scores, both about 0 if failing does not depend on
length, whether attempts fail at their first step, at their last step or anywhere in between:

- between groups: the rank correlation of a group's share of failed attempts with the mean turns of its finished
  episodes, times sqrt(n - 1). It finds environments that fail more the longer an episode is.
- within groups: the mean of (turns of failed attempts) - (turns of finished episodes), divided by its standard error.
  A failed attempt has at most the turns that it would have had without the failure, so if failing does not depend on
  length, this is 0 or below.

A group counts once, so attempts of one group may fail together (a broken task) without a false alarm.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import nan, sqrt

import numpy as np
import numpy.typing as npt

MOST_GROUPS = 256
"""Number of the last groups that the scores are computed from."""
MOST_OPEN = 256
"""Most incomplete groups. If there are more, the oldest one is counted as it is: its members may be elsewhere."""
LEAST_GROUPS, LEAST_FAILED = 32, 12
"""With fewer groups, or fewer groups with a failed attempt, there is no score."""
LEAST_SPREAD = 0.5
"""The smallest standard deviation, in turns, that differences within groups are taken to have."""

Floats = npt.NDArray[np.float64]


@dataclass
class GroupTurns:
    """The turns of a group's attempts."""

    size: int
    failed: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    num_ended: int = 0
    """Number of members, not of attempts."""

    def row(self) -> tuple[float, float, float]:
        """(share of attempts that failed, mean turns of finished episodes, mean turns of failed attempts).

        A mean over no attempts is NaN. The group needs at least one attempt.
        """
        share = len(self.failed) / (len(self.failed) + len(self.finished))
        return share, _mean(self.finished), _mean(self.failed)


class FailingByLength:
    """Collects attempts as they end."""

    def __init__(self) -> None:
        self._open: dict[str, GroupTurns] = {}
        self._rows: deque[tuple[float, float, float]] = deque(maxlen=MOST_GROUPS)
        self._score: float | None = None

    def failed(self, group_id: str, size: int, turns: int) -> None:
        """An attempt failed after `turns` turns."""
        self._group(group_id, size).failed.append(turns)

    def finished(self, group_id: str, size: int, turns: int) -> None:
        """An episode ended by its own rules or by a limit."""
        self._group(group_id, size).finished.append(turns)
        self.ended(group_id, size)

    def ended(self, group_id: str, size: int) -> None:
        """A member of the group will not be tried again."""
        group = self._group(group_id, size)
        group.num_ended += 1
        if group.num_ended == size:
            self._close(group_id)

    def score(self) -> float | None:
        """Standard deviations by which failing seems to depend on length; None for too few groups."""
        return self._score

    def _group(self, group_id: str, size: int) -> GroupTurns:
        if group_id not in self._open:
            if len(self._open) == MOST_OPEN:
                self._close(next(iter(self._open)))
            self._open[group_id] = GroupTurns(size)
        return self._open[group_id]

    def _close(self, group_id: str) -> None:
        group = self._open.pop(group_id)
        if group.finished:
            self._rows.append(group.row())
            self._score = score_of(np.array(self._rows))


def score_of(rows: Floats) -> float | None:
    """The larger of both scores; None for too few groups. `rows` has a row of `GroupTurns.row` for each group."""
    both = rows[~np.isnan(rows[:, 2])]
    if len(rows) < LEAST_GROUPS or len(both) < LEAST_FAILED:
        return None
    return max(abs(between_groups(rows[:, 0], rows[:, 1])), within_groups(both[:, 2] - both[:, 1]))


def between_groups(shares: Floats, lengths: Floats) -> float:
    """Spearman's rank correlation of failed shares and lengths, in its standard deviations; 0 if one is constant."""
    a, b = ranks(shares), ranks(lengths)
    if not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1]) * sqrt(len(a) - 1)


def within_groups(differences: Floats) -> float:
    """How many more turns failed attempts had than the finished episodes of their group, in standard errors."""
    error = max(float(differences.std(ddof=1)), LEAST_SPREAD) / sqrt(len(differences))
    return float(differences.mean()) / error


def ranks(values: Floats) -> Floats:
    """The place of each value in their order; equal values get the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)


def _mean(turns: list[int]) -> float:
    return sum(turns) / len(turns) if turns else nan
