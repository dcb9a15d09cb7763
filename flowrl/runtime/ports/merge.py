"""Merge: branches that meet again in one In port of a node that counts samples.

Each branch delivers one arrival for each sample: the message, or a tombstone if the sample took another branch or was
lost.

Invariants
- A message passes at once. A tombstone waits for the arrivals of all branches: it ends here if one of them was a
  message; otherwise one tombstone of the sample passes and represents all of them.
- Waiting tombstones are unfinished, so a crash or a checkpoint repeats them. If the message of their sample was
  finished before that, they wait until the end of the stream.

Pure bookkeeping: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrl.errors import FlowrlError
from flowrl.messages import Tombstone
from flowrl.runtime.ports.items import NOT_ROUTED, Item


@dataclass(slots=True)
class _Sample:
    num_came: int = 0
    message_came: bool = False
    tombstones: list[Item] = field(default_factory=list)


class Merge:
    """Counts what has arrived for each sample at one port, out of `arrivals`."""

    def __init__(self, port: str, arrivals: int) -> None:
        self._port = port
        self._arrivals = arrivals
        self._samples: dict[tuple[str, int], _Sample] = {}

    def add(self, item: Item) -> tuple[Item | None, Sequence[Item]]:
        """(item that passes now, if any; items that end now)."""
        envelope = item.envelope
        if not envelope.group_id:
            return item, ()
        key = envelope.group_id, envelope.member
        sample = self._samples.setdefault(key, _Sample())
        sample.num_came += 1
        lost = isinstance(item.body, Tombstone)
        if lost:
            sample.tombstones.append(item)
        elif sample.message_came:
            raise FlowrlError(
                f"{self._port} received member {key[1]} of group {key[0]!r} over two paths; a node whose Out ports "
                "lead to one In port has to send each sample on only one of them, or the paths have to be joined "
                "(`join`, with an In port for each)"
            )
        else:
            sample.message_came = True
        return self._went_on(key, sample, None if lost else item)

    def _went_on(
        self, key: tuple[str, int], sample: _Sample, message: Item | None
    ) -> tuple[Item | None, Sequence[Item]]:
        if sample.num_came < self._arrivals:
            return message, ()
        del self._samples[key]
        if sample.message_came:
            return message, sample.tombstones
        return _together(sample.tombstones), ()

    def rest(self) -> list[Item]:
        """The tombstones that still wait at the end of the stream; the caller ends them."""
        waiting = [item for sample in self._samples.values() for item in sample.tombstones]
        self._samples.clear()
        return waiting


def _together(tombstones: list[Item]) -> Item:
    """One tombstone that represents all: one for a real loss, if there is any, rather than for a branch not taken."""
    first = next((item for item in tombstones if getattr(item.body, "reason", "") != NOT_ROUTED), tombstones[0])
    first.others = tuple(item for item in tombstones if item is not first)
    return first
