"""A batch whose first pieces a batcher has sent: what is kept of these pieces for the figures of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowrl.messages import Group, Trainable, no_ids, no_logprobs
from flowrl.tasks.rows import OF_TASK

PIECES = 8
"""A batch comes in at most this many pieces, or one more. Each piece costs the trainer a micro-batch that may be small,
and with ZeRO-3 a pass of all parameters over the network."""
PACE_S = 0.5
"""At most one piece is sent in this many seconds. A piece costs the trainer some hundredths of a second, whatever its
size; a batch that forms in less than PACE_S comes whole."""
_NO_ARRAYS: dict[str, Any] = {"behavior_logprobs": no_logprobs(), "versions": no_ids()}
_NO_COLUMNS: dict[str, Any] = {"advantages": no_logprobs()} | dict.fromkeys(
    ("ref_logprobs", "teacher_logprobs", "teacher_hidden", "values", "loss_mask", "returns", "mismatched")
)


@dataclass(frozen=True)
class BegunBatch:
    """The groups of the pieces so far, without the arrays that only the trainer needs."""

    groups: tuple[Group, ...] = ()
    num_pieces: int = 0

    def with_piece(self, groups: Sequence[Group]) -> BegunBatch:
        """This batch with one more piece. It keeps copies, which stay valid after the groups are finished."""
        return BegunBatch((*self.groups, *map(_light, groups)), self.num_pieces + 1)

    def state(self) -> Mapping[str, Any]:
        return {"groups": self.groups, "num_pieces": self.num_pieces}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> BegunBatch:
        """From what `state` returned."""
        return cls(tuple(state["groups"]), int(state["num_pieces"]))


class Pace:
    """How often a batcher sends pieces; times are in seconds of one clock."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When the last piece of this batch was sent, else when its first group arrived; None before that."""

    def begin(self, now_s: float) -> None:
        """A group has arrived."""
        if self._since_s is None:
            self._since_s = now_s

    def sent(self, now_s: float, *, last: bool) -> None:
        """A piece was sent."""
        self._since_s = None if last else now_s

    def is_due(self, now_s: float) -> bool:
        """Whether the next piece may be sent."""
        return self._since_s is not None and now_s - self._since_s >= PACE_S


def least_of_a_piece(num_groups: int) -> int:
    """The smallest number of groups in a piece, for a batch of `num_groups` groups."""
    return -(-num_groups // PIECES)


def _light(group: Group) -> Group:
    return copy.deepcopy(replace(group, samples=tuple(map(_light_sample, group.samples))))


def _light_sample(sample: Trainable) -> Trainable:
    """The sample with its token ids and policy masks, and no other arrays."""
    task = {OF_TASK: sample.columns[OF_TASK]} if OF_TASK in sample.columns else {}
    branches = tuple(replace(branch, **_NO_ARRAYS) for branch in sample.branches)
    return replace(sample, columns=task, branches=branches, **_NO_ARRAYS, **_NO_COLUMNS)
