"""The trace of a run, in Chrome's JSON array format: open `trace.json` in https://ui.perfetto.dev.

Every node replica is a track (a "process" of the format). Items that a replica works on side by side
take rows of it (its "threads"), so that slices of one row only ever nest. An arrow leads from the
slice that sent a message to the slice that received it. Times are those of `time.time_ns`.

Hosts buffer and the driver writes. What grows with the number of samples is bounded: when a host has
recorded SLICES_PER_STRIDE items, it goes on with every second ticket, then every fourth, and so on.
Tickets divisible by a high power of two are therefore there from prompt to gradient.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any

from flowrl.channel.envelope import Envelope

SLICES_PER_STRIDE = 8192
BACKGROUND_ROW = 1000
"""Rows from here on hold what belongs to no item: weight updates, evaluation, checkpoints."""

TAIL_BYTES = 65536
END = b"\n]\n"

Event = tuple[Any, ...]
"""(kind, track, row, name, start in µs, duration in µs or flow id); kind is item, work, wait, s or f."""


class _Rows:
    """The rows of one track, lowest free one first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0
        self._background: list[int] = []

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self._num += 1
        return self._num - 1

    def give(self, row: int) -> None:
        heappush(self._free, row)

    def background(self, start_us: int, end_us: int) -> int:
        """A background row that is free from `start_us` on."""
        for index, busy_until in enumerate(self._background):
            if busy_until <= start_us:
                self._background[index] = end_us
                return BACKGROUND_ROW + index
        self._background.append(end_us)
        return BACKGROUND_ROW + len(self._background) - 1


class TraceBuffer:
    """Events of one host, until `drain` takes them. Only its event loop may use it."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._rows: dict[str, _Rows] = {}
        self._open: dict[tuple[str, bytes], tuple[int, int]] = {}
        """(track, message id) -> (row, start in µs)."""
        self._num_items = 0
        self._turn: ContextVar[tuple[str, int] | None] = ContextVar("flowrl_trace_turn", default=None)
        """Track and row of the item that the running task works on; row -1 if it is not recorded."""

    def item(self, track: str, envelope: Envelope, *, begins: bool) -> None:
        """A turn with `envelope` begins, or ends, in the task that calls this."""
        key = (track, envelope.id)
        if begins:
            self._begin(key, envelope)
        else:
            self._end(key, envelope)

    def sent(self, track: str, envelope: Envelope) -> None:
        """A message leaves: the arrow to its receiver starts in the turn at hand."""
        if not self._records(envelope.ticket):
            return
        now = time.time_ns() // 1000
        turn = self._turn.get()
        if turn is not None and turn[0] == track and turn[1] >= 0:
            row = turn[1]
        else:
            row = self._track(track).background(now, now + 1)
            self._events.append(("item", track, row, f"send {type(envelope.body).__name__}", now, 1))
        self._events.append(("s", track, row, "", now, _flow_id(envelope.id)))

    def slice(self, track: str, name: str, start_ns: int, end_ns: int, *, kind: str = "work") -> None:
        """A span that is over: inside the turn at hand, else in a background row.

        `kind="wait"` is for waits: for credit, a ticket, a turn.
        """
        start, end = start_ns // 1000, end_ns // 1000
        turn = self._turn.get()
        if turn is None or turn[0] != track:
            row = self._track(track).background(start, end)
        elif turn[1] < 0:
            return
        else:
            row = turn[1]
        self._events.append((kind, track, row, name, start, max(end - start, 1)))

    def drain(self) -> list[Event]:
        """All events since the last call, for the driver."""
        events, self._events = self._events, []
        return events

    def _track(self, track: str) -> _Rows:
        return self._rows.setdefault(track, _Rows())

    def _records(self, ticket: int) -> bool:
        """With every doubling of the recorded items every other ticket is left out from now on."""
        return ticket < 0 or ticket % (1 << self._num_items // SLICES_PER_STRIDE) == 0

    def _begin(self, key: tuple[str, bytes], envelope: Envelope) -> None:
        track = key[0]
        if not self._records(envelope.ticket):
            self._turn.set((track, -1))
            return
        self._num_items += 1
        row, now = self._track(track).take(), time.time_ns() // 1000
        self._open[key] = (row, now)
        self._turn.set((track, row))
        self._events.append(("f", track, row, "", now, _flow_id(envelope.id)))

    def _end(self, key: tuple[str, bytes], envelope: Envelope) -> None:
        self._turn.set(None)
        opened = self._open.pop(key, None)
        if opened is None:
            return
        row, start = opened
        self._rows[key[0]].give(row)
        name = type(envelope.body).__name__ + (f" {envelope.ticket}" if envelope.ticket >= 0 else "")
        self._events.append(("item", key[0], row, name, start, max(time.time_ns() // 1000 - start, 1)))


def _flow_id(message_id: bytes) -> int:
    return int.from_bytes(message_id[:6], "big")


class TraceWriter:
    """Writes `trace.json` as events come. A run that is killed leaves a file that still loads.

    An existing file is continued, as a resumed run continues its directory.
    """

    def __init__(self, path: Path) -> None:
        self._tracks: dict[str, int] = {}
        self._rows: set[tuple[int, int]] = set()
        self._names: dict[str, str] = {}
        self._file = self._open(path)

    @staticmethod
    def _open(path: Path) -> IO[str]:
        """At the end of the last whole event: a killed run may have left half of one."""
        if not path.exists() or path.stat().st_size < 2:
            file = path.open("w")
            file.write("[\n" + '{"ph":"M","name":"flowrl","pid":0,"args":{}}')
            return file
        with path.open("rb+") as old:
            start = old.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            tail = old.read()
            clean = tail.endswith(END)
            old.truncate(start + (len(tail) - len(END) if clean else tail.rindex(b",\n")))
        return path.open("a")

    def write(self, events: Iterable[Sequence[Any]]) -> None:
        """Append what a host has drained."""
        out: list[str] = []
        for kind, track, row, name, start, extra in events:
            pid = self._tracks.get(track) or self._name_track(track, out)
            if (pid, row) not in self._rows:
                self._name_row(pid, row, out)
            place = f'"pid":{pid},"tid":{row},"ts":{start}'
            if kind == "s":
                out.append(f'{{"ph":"s","cat":"lineage","name":"message","id":{extra},{place}}}')
            elif kind == "f":
                out.append(f'{{"ph":"f","bp":"e","cat":"lineage","name":"message","id":{extra},{place}}}')
            else:
                out.append(f'{{"ph":"X","cat":"{kind}","name":{self._quoted(name)},{place},"dur":{extra}}}')
        if out:
            self._file.write(",\n" + ",\n".join(out))

    def close(self) -> None:
        """Finish the array and the file."""
        self._file.write(END.decode())
        self._file.close()

    def _quoted(self, name: str) -> str:
        quoted = self._names.get(name)
        if quoted is None:
            quoted = json.dumps(name)
            if len(self._names) < 4096:
                self._names[name] = quoted
        return quoted

    def _name_track(self, track: str, out: list[str]) -> int:
        """The id depends on the name alone, so that a resumed run goes on in the same tracks."""
        pid = self._tracks[track] = zlib.crc32(track.encode()) % 1_000_000 + 1
        order = {"sort_index": len(self._tracks)}
        for kind, args in (("process_name", {"name": track}), ("process_sort_index", order)):
            out.append(json.dumps({"ph": "M", "name": kind, "pid": pid, "args": args}))
        return pid

    def _name_row(self, pid: int, row: int, out: list[str]) -> None:
        self._rows.add((pid, row))
        name = f"background {row - BACKGROUND_ROW}" if row >= BACKGROUND_ROW else f"item {row}"
        args = {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": name}}
        out.append(json.dumps(args))
