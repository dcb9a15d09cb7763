"""The trace of a run: what each process records (`TraceBuffer`), and `trace.json`, which the driver writes.

Every node replica is a track (a "process" of the format). Items on which a replica works concurrently occupy
different rows of the track (its "threads"), so slices within one row always nest. An arrow leads from the slice that
sent a message to the slice that received it. Times come from `time.time_ns`.

Lineage decides what is recorded. Every group has a depth, the same in every process: half of the groups have depth 0, a
quarter 1, an eighth 2. At level n a trace contains the groups of depth n and more, from prompt to gradient and with all
their arrows, and nothing of the other groups. A batch has the depth of its deepest group. A message outside of groups
gets its depth from its id, and a span that belongs to no message gets it from its number on its track. The driver
raises the level when the file is full.

The file has Chrome's JSON array format: open it in https://ui.perfetto.dev. Its invariants:
- The file is valid JSON after every write: each write ends with the array's end, and the next write overwrites it.
- The file has every event that is at least as deep as the file's level, and no other event. If a limit is set, the file
  never exceeds it: before that, the level rises, and events of smaller depth are removed.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

from flowrl.wire.encoding.schema import Envelope

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
        return _count_twos(zlib.crc32(envelope.group_id.encode()))
    groups: Iterable[str] = {sample.group_id for sample in getattr(envelope.body, "samples", ())}
    return max(
        (_count_twos(zlib.crc32(group.encode())) for group in groups), default=_count_twos(_arrow_id(envelope.id))
    )


def _count_twos(number: int) -> int:
    """The number of times that 2 divides `number`."""
    return min((number & -number).bit_length() - 1, DEEPEST) if number else DEEPEST


class _Rows:
    """The rows of one track; the lowest free row is taken first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0
        self._background: list[int] = []
        self.num_spans = 0
        """The number of spans so far that belong to no message; it gives the next one its depth."""

    def take_row(self) -> int:
        """Take a row for an invocation, until `give`."""
        if self._free:
            return heappop(self._free)
        self._num += 1
        return self._num - 1

    def give_row(self, row: int) -> None:
        heappush(self._free, row)

    def take_background_row(self, start_us: int, end_us: int) -> int:
        """Reserve a background row that is free from `start_us` on."""
        for index, busy_until in enumerate(self._background):
            if busy_until <= start_us:
                self._background[index] = end_us
                return BACKGROUND_ROW + index
        self._background.append(end_us)
        return BACKGROUND_ROW + len(self._background) - 1


class TraceBuffer:
    """Events of one process, until `drain` returns them. Only the process's event loop may use it."""

    def __init__(self) -> None:
        self.level = 0
        """Events of smaller depth are not recorded."""
        self._events: list[Event] = []
        self._rows: defaultdict[str, _Rows] = defaultdict(_Rows)
        self._open: dict[tuple[str, bytes], tuple[int, int, int]] = {}
        """(track, message id) -> (row, start in µs, depth) of the recorded invocations that have not ended."""
        self._invocation: ContextVar[tuple[str, int, int] | None] = ContextVar("flowrl_trace_invocation", default=None)
        """Track, row and depth of the item that the running task works on; row -1 if it is not recorded."""

    def record_item(self, track: str, envelope: Envelope, *, begins: bool) -> None:
        """Record that an invocation with `envelope` begins or ends in the calling task."""
        key, now = (track, envelope.id), time.time_ns() // 1000
        if begins:  # take a row, and end the arrow of the message there; the slice is written at the end
            depth = depth_of(envelope)
            if depth < self.level:
                self._invocation.set((track, -1, depth))
                return
            row = self._rows[track].take_row()
            self._open[key] = (row, now, depth)
            self._invocation.set((track, row, depth))
            self._events.append(("f", track, row, "", now, _arrow_id(envelope.id), depth))
            return
        self._invocation.set(None)
        if (opened := self._open.pop(key, None)) is not None:
            row, start, depth = opened
            self._rows[track].give_row(row)
            name = type(envelope.body).__name__ + (f" {envelope.ticket}" if envelope.ticket >= 0 else "")
            self._events.append(("item", track, row, name, start, max(now - start, 1), depth))

    def record_sent(self, track: str, envelope: Envelope) -> None:
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
            row = self._rows[track].take_background_row(now, now + 1)
            self._events.append(("item", track, row, f"send {type(envelope.body).__name__}", now, 1, depth))
        self._events.append(("s", track, row, "", now, _arrow_id(envelope.id), depth))

    def record_slice(self, track: str, name: str, start_ns: int, end_ns: int, *, kind: str = "work") -> None:
        """Record a finished span of `track`: inside its current invocation, else in a background row.

        `kind` is "work", or "wait" for a wait for credit, a ticket or a lock.
        """
        start, end = start_ns // 1000, end_ns // 1000
        invocation = self._invocation.get()
        if invocation is not None and invocation[0] == track:
            _, row, depth = invocation
        else:
            rows = self._rows[track]
            depth, rows.num_spans = _count_twos(rows.num_spans), rows.num_spans + 1
            row = rows.take_background_row(start, end) if depth >= self.level else -1
        if row >= 0:  # else the invocation is not recorded, or the span is below the level
            self._events.append((kind, track, row, name, start, max(end - start, 1), depth))

    def drain_events(self) -> list[Event]:
        """All events since the last call, for the driver."""
        events, self._events = self._events, []
        return events


def _arrow_id(message_id: bytes) -> int:
    """The id of a message's arrow."""
    return int.from_bytes(message_id[:6], "big")


TraceMode = Literal["off", "sampled", "full"]

LIMIT_BYTES = 16 << 20
"""Largest size of the file with `--trace sampled`."""
TAIL_BYTES = 65536
MOST_NAMES = 4096
END = b"\n]\n"
DEPTH = b'"depth":'

TraceLine = tuple[int, bytes]
"""(depth, event)"""


class TraceWriter:
    """Writes events as they arrive. It continues an existing file, because a resumed run continues its directory.

    `on_level` is called when the level has risen, so that processes stop sending events that would be dropped.
    """

    def __init__(
        self, path: Path, *, limit_bytes: int | None = None, on_level: Callable[[int], None] = lambda _: None
    ) -> None:
        self.level = 0
        self._path = path
        self._limit_bytes = limit_bytes
        self._on_level = on_level
        self._tracks: dict[str, int] = {}
        self._rows: set[tuple[int, int]] = set()
        self._names: dict[str, str] = {}
        """Name of a slice -> its JSON string, for the first MOST_NAMES names."""
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._temporary.unlink(missing_ok=True)
        # Open the file at the end of the last complete event: a killed run may have left an incomplete one.
        if not path.exists() or path.stat().st_size <= len(END):
            path.write_bytes(b"[\n" + _name_event("flowrl", {"level": self.level}, pid=0)[1] + END)
        self._file = path.open("rb+")
        self._file.readline()
        if limit_bytes is not None:
            head = json.loads(self._file.readline().rstrip(b",\n"))
            self.level = int(head["args"].get("level", 0))
        start = self._file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        tail = self._file.read()
        self._size = start + (len(tail) - len(END) if tail.endswith(END) else tail.rindex(b",\n"))
        self._file.truncate(self._size)
        self._write_at_end(END)

    def write_events(self, events: Iterable[Sequence[Any]]) -> None:
        """Append the drained events of a process."""
        before = self.level
        lines = [line for event in events for line in self._encode_event(event) if line[0] >= self.level]
        size = sum(len(text) + len(b",\n") for _, text in lines)
        while self._limit_bytes is not None and self._size + size + len(END) > self._limit_bytes:
            if self.level > DEEPEST:
                break
            self._raise_level()
            lines = [line for line in lines if line[0] >= self.level]
            size = sum(len(text) + len(b",\n") for _, text in lines)
        if lines:
            self._write_at_end(b",\n" + b",\n".join(text for _, text in lines) + END)
            self._size += size
        if self.level > before:
            self._on_level(self.level)

    def close(self) -> None:
        self._file.close()

    def _write_at_end(self, text: bytes) -> None:
        self._file.seek(self._size)
        self._file.write(text)
        self._file.flush()

    def _raise_level(self) -> None:
        """Raise the level by one, and remove events of smaller depth, atomically."""
        self.level += 1
        with self._path.open("rb") as old, self._temporary.open("wb") as new:
            old.readline()
            old.readline()
            new.write(b"[\n" + _name_event("flowrl", {"level": self.level}, pid=0)[1])
            for line in old:
                if len(line) <= len(END):
                    continue
                _, known, rest = line.rpartition(DEPTH)
                depth = int(rest[: rest.index(b"}")]) if known else 0  # events without a depth are only of level 0
                if depth >= self.level or line.startswith(b'{"ph": "M"'):  # names stay at any level
                    new.write(b",\n" + line.removesuffix(b"\n").removesuffix(b","))
            self._size = new.tell()
            new.write(END)
        self._temporary.replace(self._path)
        self._file.close()
        self._file = self._path.open("rb+")

    def _encode_event(self, event: Sequence[Any]) -> Iterable[TraceLine]:
        """The event's line; before it the names of its track and row, if they are new."""
        kind, track, row, name, start, extra, depth = event
        if depth < self.level:
            return
        pid = self._tracks.get(track)
        if pid is None:  # the id depends only on the name, so a resumed run continues the same tracks
            pid = self._tracks[track] = zlib.crc32(track.encode()) % 1_000_000 + 1
            yield _name_event("process_name", {"name": track}, pid=pid)
            yield _name_event("process_sort_index", {"sort_index": len(self._tracks)}, pid=pid)
        if (pid, row) not in self._rows:
            self._rows.add((pid, row))
            label = f"background {row - BACKGROUND_ROW}" if row >= BACKGROUND_ROW else f"item {row}"
            yield _name_event("thread_name", {"name": label}, pid=pid, tid=row)
        place = f'"pid":{pid},"tid":{row},"ts":{start}'
        if kind == "s":
            text = f'{{"ph":"s","cat":"lineage","name":"message","id":{extra},{place}'
        elif kind == "f":
            text = f'{{"ph":"f","bp":"e","cat":"lineage","name":"message","id":{extra},{place}'
        else:
            quoted = self._names.get(name)
            if quoted is None:
                quoted = json.dumps(name)
                if len(self._names) < MOST_NAMES:
                    self._names[name] = quoted
            text = f'{{"ph":"X","cat":"{kind}","name":{quoted},{place},"dur":{extra}'
        yield depth, f'{text},"args":{{{DEPTH.decode()}{depth}}}}}'.encode()


def _name_event(kind: str, args: dict[str, Any], **place: int) -> TraceLine:
    """An event that names a track, a row, or the file's level; it stays in the file at every level."""
    return OFF, json.dumps({"ph": "M", "name": kind, **place, "args": args}).encode()
