"""`trace.json`, in Chrome's JSON array format: open it in https://ui.perfetto.dev.

Invariants
- The file is valid JSON after every write: each write ends with the array's end, and the next write overwrites it.
- The file has every event that is at least as deep as the file's level (see `trace`), and no other event. If a limit is
  set, the file never exceeds it: before that, the level rises, and events of smaller depth are removed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from flowrl.runtime.telemetry.trace import BACKGROUND_ROW, DEEPEST, OFF

TraceMode = Literal["off", "sampled", "full"]

LIMIT_BYTES = 16 << 20
"""Largest size of the file with `--trace sampled`."""
TAIL_BYTES = 65536
END = b"\n]\n"
DEPTH = b'"depth":'

TraceLine = tuple[int, bytes]
"""(depth, event)"""


def open_trace(mode: TraceMode, path: Path, on_level: Callable[[int], None]) -> TraceWriter | NoTrace:
    """The trace writer for the mode of `--trace`."""
    if mode == "off":
        return NoTrace()
    return TraceWriter(path, limit_bytes=LIMIT_BYTES if mode == "sampled" else None, on_level=on_level)


class NoTrace:
    """The writer of a run without a trace; it discards what hosts recorded before they were told the level."""

    level = OFF

    def write(self, events: Iterable[Sequence[Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class TraceWriter:
    """Writes events as they arrive. It continues an existing file, because a resumed run continues its directory.

    `on_level` is called when the level has risen, so that hosts stop sending events that would be dropped.
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
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._temporary.unlink(missing_ok=True)
        self._file = self._open()

    def _open(self) -> BinaryIO:
        """Open the file at the end of the last complete event: a killed run may have left an incomplete one."""
        if not self._path.exists() or self._path.stat().st_size <= len(END):
            self._path.write_bytes(b"[\n" + _head(self.level) + END)
        file = self._path.open("rb+")
        file.readline()
        self.level = _level(file.readline()) if self._limit_bytes is not None else 0
        start = file.seek(max(self._path.stat().st_size - TAIL_BYTES, 0))
        tail = file.read()
        self._size = start + (len(tail) - len(END) if tail.endswith(END) else tail.rindex(b",\n"))
        file.truncate(self._size)
        _write_at(file, self._size, END)
        return file

    def write(self, events: Iterable[Sequence[Any]]) -> None:
        """Append the drained events of a host."""
        before = self.level
        lines = self._deep(line for event in events for line in self._lines(event))
        while self._is_full(lines):
            self._thin()
            lines = self._deep(lines)
        self._append(b",\n" + b",\n".join(text for _, text in lines) if lines else b"")
        if self.level > before:
            self._on_level(self.level)

    def close(self) -> None:
        self._file.close()

    def _deep(self, lines: Iterable[TraceLine]) -> list[TraceLine]:
        return [line for line in lines if line[0] >= self.level]

    def _is_full(self, lines: Sequence[TraceLine]) -> bool:
        size = self._size + sum(len(text) + 2 for _, text in lines) + len(END)
        return self._limit_bytes is not None and size > self._limit_bytes and self.level <= DEEPEST

    def _append(self, text: bytes) -> None:
        if text:
            _write_at(self._file, self._size, text + END)
            self._size += len(text)

    def _thin(self) -> None:
        """Raise the level by one, and remove events of smaller depth, atomically."""
        self.level += 1
        with self._path.open("rb") as old, self._temporary.open("wb") as new:
            old.readline()
            old.readline()
            new.write(b"[\n" + _head(self.level))
            for line in old:
                if len(line) > len(END) and _depth_of(line) >= self.level:
                    new.write(b",\n" + line.removesuffix(b"\n").removesuffix(b","))
            self._size = new.tell()
            new.write(END)
        self._temporary.replace(self._path)
        self._file.close()
        self._file = self._path.open("rb+")

    def _lines(self, event: Sequence[Any]) -> Iterable[TraceLine]:
        kind, track, row, name, start, extra, depth = event
        if depth < self.level:
            return
        pid = self._tracks.get(track)
        if pid is None:
            yield from self._name_track(track)
            pid = self._tracks[track]
        if (pid, row) not in self._rows:
            yield self._name_row(pid, row)
        place = f'"pid":{pid},"tid":{row},"ts":{start}'
        if kind == "s":
            text = f'{{"ph":"s","cat":"lineage","name":"message","id":{extra},{place}'
        elif kind == "f":
            text = f'{{"ph":"f","bp":"e","cat":"lineage","name":"message","id":{extra},{place}'
        else:
            text = f'{{"ph":"X","cat":"{kind}","name":{self._quoted(name)},{place},"dur":{extra}'
        yield depth, f'{text},"args":{{{DEPTH.decode()}{depth}}}}}'.encode()

    def _quoted(self, name: str) -> str:
        quoted = self._names.get(name)
        if quoted is None:
            quoted = json.dumps(name)
            if len(self._names) < 4096:
                self._names[name] = quoted
        return quoted

    def _name_track(self, track: str) -> Iterable[TraceLine]:
        """The track's id depends only on its name, so a resumed run continues the same tracks."""
        pid = self._tracks[track] = zlib.crc32(track.encode()) % 1_000_000 + 1
        order = {"sort_index": len(self._tracks)}
        for kind, args in (("process_name", {"name": track}), ("process_sort_index", order)):
            yield _note(kind, args, pid=pid)

    def _name_row(self, pid: int, row: int) -> TraceLine:
        self._rows.add((pid, row))
        name = f"background {row - BACKGROUND_ROW}" if row >= BACKGROUND_ROW else f"item {row}"
        return _note("thread_name", {"name": name}, pid=pid, tid=row)


def _write_at(file: BinaryIO, place: int, text: bytes) -> None:
    file.seek(place)
    file.write(text)
    file.flush()


def _note(kind: str, args: dict[str, Any], **place: int) -> TraceLine:
    """A name event; it stays in the file at every level."""
    return OFF, json.dumps({"ph": "M", "name": kind, **place, "args": args}).encode()


def _head(level: int) -> bytes:
    return json.dumps({"ph": "M", "name": "flowrl", "pid": 0, "args": {"level": level}}).encode()


def _level(head: bytes) -> int:
    return int(json.loads(head.rstrip(b",\n"))["args"].get("level", 0))


def _depth_of(line: bytes) -> int:
    """The depth of an event in the file; names stay at any level, events without depth only at level 0."""
    if line.startswith(b'{"ph": "M"'):
        return OFF
    _, known, depth = line.rpartition(DEPTH)
    return int(depth[: depth.index(b"}")]) if known else 0
