"""Output of a process, in bounded memory: its beginning and its end."""

from __future__ import annotations

import os
from contextlib import suppress

READ_BYTES = 1 << 16
READS = 64
"""Number of reads at the end of a call; together they take more than a pipe holds."""


class BoundedOutput:
    """Reads a pipe, and keeps `most_bytes` of what has arrived since the last `taken`."""

    def __init__(self, source: int, *, most_bytes: int) -> None:
        self._source, self._most = source, most_bytes // 2
        os.set_blocking(source, False)
        self._head = self._tail = b""
        self._length = 0

    def read(self) -> bool:
        """Read what has arrived; False if there is nothing more for now, or the pipe has ended."""
        try:
            found = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return False
        room = self._most - len(self._head)
        self._head += found[:room]
        self._tail = (self._tail + found[room:])[-self._most :]
        self._length += len(found)
        return bool(found)

    def taken(self) -> str:
        """What has arrived since the last call, including what is in the pipe now."""
        for _ in range(READS):
            if not self.read():
                break
        left_out = self._length - len(self._head) - len(self._tail)
        mark = f"\n[{left_out} bytes left out]\n" if left_out else ""
        parts = (self._head, mark.encode(), self._tail) if mark else (self._head + self._tail,)
        self._head, self._tail, self._length = b"", b"", 0
        return "".join(part.decode(errors="replace") for part in parts)

    def close(self) -> None:
        """Close the pipe's end."""
        with suppress(OSError):
            os.close(self._source)
