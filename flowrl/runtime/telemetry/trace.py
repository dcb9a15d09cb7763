"""What a host records for the trace of a run; the driver writes it (`trace_file`).

Every node replica is a track (a "process" of the format). Items on which a replica works concurrently occupy
different rows of the track (its "threads"), so slices within one row always nest. An arrow leads from the slice that
sent a message to the slice that received it. Times come from `time.time_ns`.

Lineage decides what is recorded. Every group has a depth, the same in every host: half of the groups have depth 0, a
quarter 1, an eighth 2. At level n a trace contains the groups of depth n and more, from prompt to gradient and with all
their arrows, and nothing of the other groups. A batch has the depth of its deepest group. A message outside of groups
gets its depth from its id, and a span that belongs to no message gets it from its number on its track. The driver
raises the level when the file is full.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from contextvars import ContextVar
from heapq import heappop, heappush
from typing import Any

from flowrl.channel.encoding.envelope import Envelope

BACKGROUND_ROW = 1000
"""Rows from this number on hold spans that belong to no item: weight updates, evaluation, checkpoints."""
DEEPEST = 32
OFF = DEEPEST + 1
"""The level at which nothing is recorded."""

Event = tuple[Any, ...]
"""(kind, track, row, name, start in µs, duration in µs or the arrow's id, depth).

A kind item, work or wait is a slice; s is where an arrow starts, f where it finishes, as in Chrome's trace format.
"""


def depth_of(envelope: Envelope) -> int:
    """The highest level at which a trace contains this message."""
    if envelope.group_id:
        return _depth(zlib.crc32(envelope.group_id.encode()))
    groups: Iterable[str] = {sample.group_id for sample in getattr(envelope.body, "samples", ())}
    return max((_depth(zlib.crc32(group.encode())) for group in groups), default=_depth(_number(envelope.id)))


def _depth(number: int) -> int:
    """The number of times that 2 divides `number`."""
    return min((number & -number).bit_length() - 1, DEEPEST) if number else DEEPEST


class _Rows:
    """The rows of one track; the lowest free row is taken first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0
        self._background: list[int] = []
        self._num_spans = 0

    def take(self) -> int:
        """Take a row for an invocation, until `give`."""
        if self._free:
            return heappop(self._free)
        self._num += 1
        return self._num - 1

    def give(self, row: int) -> None:
        heappush(self._free, row)

    def next_depth(self) -> int:
        """The depth of the next span that belongs to no message."""
        self._num_spans += 1
        return _depth(self._num_spans - 1)

    def background(self, start_us: int, end_us: int) -> int:
        """Reserve a background row that is free from `start_us` on."""
        for index, busy_until in enumerate(self._background):
            if busy_until <= start_us:
                self._background[index] = end_us
                return BACKGROUND_ROW + index
        self._background.append(end_us)
        return BACKGROUND_ROW + len(self._background) - 1


class TraceBuffer:
    """Events of one host, until `drain` returns them. Only the host's event loop may use it."""

    def __init__(self) -> None:
        self.level = 0
        """Events of smaller depth are not recorded."""
        self._events: list[Event] = []
        self._rows: dict[str, _Rows] = {}
        self._open: dict[tuple[str, bytes], tuple[int, int, int]] = {}
        """(track, message id) -> (row, start in µs, depth) of the recorded invocations that have not ended."""
        self._invocation: ContextVar[tuple[str, int, int] | None] = ContextVar("flowrl_trace_invocation", default=None)
        """Track, row and depth of the item that the running task works on; row -1 if it is not recorded."""

    def item(self, track: str, envelope: Envelope, *, begins: bool) -> None:
        """Record that an invocation with `envelope` begins or ends in the calling task."""
        key = (track, envelope.id)
        if begins:
            self._begin(key, envelope)
        else:
            self._end(key, envelope)

    def sent(self, track: str, envelope: Envelope) -> None:
        """Record a sent message: the arrow to its receiver starts in the current invocation, else in a slice of 1 µs.

        The arrow cannot start in an invocation of smaller depth than the message: that slice is removed before the
        message when the level rises.
        """
        depth = depth_of(envelope)
        if depth < self.level:
            return
        now = time.time_ns() // 1000
        invocation = self._invocation.get()
        if invocation is not None and invocation[0] == track and invocation[1] >= 0 and invocation[2] >= depth:
            row = invocation[1]
        else:
            row = self._track(track).background(now, now + 1)
            self._events.append(("item", track, row, f"send {type(envelope.body).__name__}", now, 1, depth))
        self._events.append(("s", track, row, "", now, _number(envelope.id), depth))

    def slice(self, track: str, name: str, start_ns: int, end_ns: int, *, kind: str = "work") -> None:
        """Record a finished span of `track`: inside its current invocation, else in a background row.

        `kind` is "work", or "wait" for a wait for credit, a ticket or a lock.
        """
        start, end = start_ns // 1000, end_ns // 1000
        invocation = self._invocation.get()
        if invocation is not None and invocation[0] == track:
            _, row, depth = invocation
        else:
            depth = self._track(track).next_depth()
            row = self._track(track).background(start, end) if depth >= self.level else -1
        if row >= 0:  # else the invocation is not recorded, or the span is below the level
            self._events.append((kind, track, row, name, start, max(end - start, 1), depth))

    def drain(self) -> list[Event]:
        """All events since the last call, for the driver."""
        events, self._events = self._events, []
        return events

    def _track(self, track: str) -> _Rows:
        return self._rows.setdefault(track, _Rows())

    def _begin(self, key: tuple[str, bytes], envelope: Envelope) -> None:
        """Take a row for the invocation, and end the arrow of its message there. The slice is written by `_end`."""
        track, depth = key[0], depth_of(envelope)
        if depth < self.level:
            self._invocation.set((track, -1, depth))
            return
        row, now = self._track(track).take(), time.time_ns() // 1000
        self._open[key] = (row, now, depth)
        self._invocation.set((track, row, depth))
        self._events.append(("f", track, row, "", now, _number(envelope.id), depth))

    def _end(self, key: tuple[str, bytes], envelope: Envelope) -> None:
        """Write the invocation's slice and free its row, if `_begin` took one."""
        self._invocation.set(None)
        opened = self._open.pop(key, None)
        if opened is None:
            return
        row, start, depth = opened
        self._rows[key[0]].give(row)
        name = type(envelope.body).__name__ + (f" {envelope.ticket}" if envelope.ticket >= 0 else "")
        self._events.append(("item", key[0], row, name, start, max(time.time_ns() // 1000 - start, 1), depth))


def _number(message_id: bytes) -> int:
    """The id of a message's arrow."""
    return int.from_bytes(message_id[:6], "big")
