"""Admitted ids: no group and no sample is admitted twice; only a resumed source admits the groups in flight again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.runtime.ledger.ledger import Ledger

LedgerRow = Sequence[Any]


class AdmittedIds:
    """The ids of everything that was admitted, or is being admitted: in memory, and in the ledger.

    `in_flight` has the groups in flight as keys.
    """

    def __init__(self, ledger: Ledger, in_flight: Mapping[str, object]) -> None:
        self._ledger = ledger
        self._in_flight = in_flight
        self._reserved: dict[str, str] = {}
        """Sample whose admission has not ended yet -> its group."""
        self.taken_up: dict[str, int] = {}
        """Group that a resume found in flight -> its ticket, until its source admits it again."""

    def take_again(self, node: str, group_id: str, rows: Sequence[LedgerRow]) -> int | None:
        """The ticket of a group that a resume found in flight, once; None for any other group."""
        if group_id not in self.taken_up:
            return None
        if strange := {row[0] for row in rows} - self._ledger.samples_of(group_id):
            raise FlowrlError(
                f"node {node!r} admitted group {group_id!r} again after --resume, with samples that it did not have "
                f"before ({', '.join(sorted(strange))}); resume with the options that the run was started with"
            )
        return self.taken_up.pop(group_id)

    @contextmanager
    def reserved(self, node: str, group_id: str, rows: Sequence[LedgerRow]) -> Iterator[None]:
        """Reserve the ids while the admission waits. Raises FlowrlError if one of them is known already."""
        sample_ids = [row[0] for row in rows]
        if repeated := self._repeated(group_id, sample_ids, [row[3] for row in rows]):
            raise FlowrlError(
                f"node {node!r} admitted {repeated}; a source has to give every group of every epoch its own "
                "group_id, and every member of a group its own sample_id and number"
            )
        self._reserved |= dict.fromkeys(sample_ids, group_id)
        try:
            yield
        finally:
            for sample_id in sample_ids:
                del self._reserved[sample_id]

    def _repeated(self, group_id: str, sample_ids: Sequence[str], members: Sequence[int]) -> str:
        """A text that names what of the group was admitted before; "" if nothing was."""
        known = group_id in self._in_flight or group_id in self._reserved.values()
        if known or self._ledger.samples_of(group_id):
            return f"group {group_id!r} a second time"
        if (number := Counter(members).most_common(1)[0])[1] > 1:
            return f"group {group_id!r} with {number[1]} members that have the number {number[0]}"
        for sample_id, times in Counter(sample_ids).items():
            if times > 1:
                return f"group {group_id!r} with {times} samples of the same id, {sample_id!r}"
            if (other := self._reserved.get(sample_id) or self._ledger.group_of(sample_id)) is not None:
                return f"sample {sample_id!r} a second time, in group {group_id!r} after group {other!r}"
        return ""
