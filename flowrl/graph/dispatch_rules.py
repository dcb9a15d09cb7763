"""The five dispatch rules: which replicas of its consumer an edge sends a message to, and what follows from that.

All code that depends on an edge's rule asks the rule's object: the checks, the lanes
(`flowrl.wire.edges`), tombstones, checkpoints. No other code compares the rules' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

Dispatch = Literal["share", "key", "broadcast", "gang"]
"""The rules that a user can choose, by name; `Graph.latest` is the other one."""


@dataclass(frozen=True)
class DispatchRule:
    """A rule without state. A message goes to all of `replicas` or to none, unless the rule says otherwise."""

    name: str
    """As in a graph file and in `graph.json`."""
    any_one: bool = False
    """Whether a message goes to only one of `replicas`: that with the most free credits, round-robin among equals."""
    by_group: bool = False
    """Whether all messages of a group go to the same replica. Messages need a `group_id`."""
    copies: bool = False
    """Whether each replica gets a copy with its own id, which no other replica can take instead. The ids differ so that
    the messages that two replicas make from their copies are not dropped as repetitions."""
    splits: bool = False
    """Whether each replica gets a part of the message, made by the message's `split(n)`, also with its own id. The
    consumer has to be a gang."""
    overwrites: bool = False
    """Whether a message replaces the previous one if that was not taken yet. Then no send waits, and only the newest
    message is kept, for a consumer that is replaced."""

    def replicas(self, group_id: str, count: int) -> Sequence[int]:
        """The indices of those of the `count` replicas that a message of the group can go to.

        For a rule by group, that to which the group's id hashes; the hash is the same in every process.
        """
        return (crc32(group_id.encode()) % count,) if self.by_group else range(count)

    @property
    def to_each(self) -> bool:
        """Whether each replica gets its own message: a copy or a part."""
        return self.copies or self.splits

    @property
    def carries_tombstones(self) -> bool:
        """Whether a tombstone is sent in place of a lost message. A batch for a gang, and weights, are complete without
        the lost messages."""
        return not (self.splits or self.overwrites)


SHARE = DispatchRule("share", any_one=True)
"""The replica with most free credits."""
KEY = DispatchRule("key", by_group=True)
"""The replica of the message's group."""
BROADCAST = DispatchRule("broadcast", copies=True)
"""Every replica, each with its own copy. The slowest one limits the rate."""
GANG = DispatchRule("gang", splits=True)
"""Every rank, each with its own part."""
LATEST = DispatchRule("latest", overwrites=True)
"""Every replica; only the newest message counts."""
RULES: dict[str, DispatchRule] = {rule.name: rule for rule in (SHARE, KEY, BROADCAST, GANG, LATEST)}
