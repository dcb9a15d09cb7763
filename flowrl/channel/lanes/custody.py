"""Custody: decides when a node may ack an item that it took.

An item is due for its ack when its invocation has ended and the next process has taken every message made from
it (its children), on every lane on which the child was sent. From then on the child's own producer keeps the
copy that a crash would need.

Invariants
- Each item counts what it still waits for: its open invocation, and one for each lane on which a child has not
  arrived. The item is due exactly when the count reaches 0, and is then forgotten.
- A child is counted at all of its parents, and is forgotten when it has arrived on all of its lanes.
- Arrivals of unknown children (replays of children whose parents were acked earlier) change nothing.

Pure bookkeeping: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Custody(Generic[K]):
    """The items of one node replica. Each method returns the items whose acks are due now."""

    def __init__(self) -> None:
        self._counts: dict[K, int] = {}
        self._parents: dict[K, Sequence[K]] = {}
        self._lanes: dict[K, int] = {}

    def __len__(self) -> int:
        """Number of items taken and not yet due."""
        return len(self._counts)

    def begin(self, item: K) -> None:
        """The node took `item`: its invocation is open."""
        assert item not in self._counts, "an item is taken in once; receivers drop repetitions"
        self._counts[item] = 1

    def child(self, parents: Sequence[K], child: K, num_lanes: int = 1) -> None:
        """`child` is made from `parents` and will be sent on `num_lanes` more lanes.

        Call this before the send. Calls for several edges add up. All parents must still be open here.
        """
        if num_lanes == 0:
            return
        known = self._parents.get(child)
        if known is None:
            self._parents[child] = parents
            if num_lanes > 1:
                self._lanes[child] = num_lanes
            for parent in parents:
                self._counts[parent] += 1
        else:
            assert tuple(known) == tuple(parents), "a child has one set of parents"
            self._lanes[child] = self._lanes.get(child, 1) + num_lanes

    def arrived(self, child: K) -> Sequence[K]:
        """The next process took `child` on one of its lanes."""
        lanes = self._lanes.pop(child, 1)
        if lanes > 1:
            self._lanes[child] = lanes - 1
            return ()
        parents = self._parents.pop(child, ())
        return [parent for parent in parents if self._less(parent)]

    def end(self, item: K) -> Sequence[K]:
        """The invocation of `item` has ended."""
        return (item,) if self._less(item) else ()

    def _less(self, item: K) -> bool:
        count = self._counts[item] - 1
        if count:
            self._counts[item] = count
            return False
        del self._counts[item]
        return True
