"""Reads what a process prints as it arrives, and keeps the end of it for error texts."""

from __future__ import annotations

import asyncio
import os

KEPT_BYTES = 8192
READ_BYTES = 1 << 16


class Output:
    """A pipe for a process's standard output and error. Only one event loop may use it. Owns both ends."""

    def __init__(self) -> None:
        self._end = b""
        self._source, self.target = os.pipe()
        """`target` is for the process; call `handed_over` when the process has it."""
        os.set_blocking(self._source, False)
        asyncio.get_running_loop().add_reader(self._source, self._read)

    def handed_over(self) -> None:
        """Close this process's copy of the target."""
        if self.target >= 0:
            os.close(self.target)
            self.target = -1

    def _read(self) -> bool:
        """Read what has arrived; False if there is nothing more for now."""
        try:
            found = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return False
        if not found:
            asyncio.get_running_loop().remove_reader(self._source)
        self._end = (self._end + found)[-KEPT_BYTES:]
        return bool(found)

    def tail(self, lines: int = 20) -> str:
        """The last lines; "" if nothing was printed. They are complete if the process has ended."""
        if self._source >= 0:
            for _ in range(KEPT_BYTES):  # bounded, because the process may keep printing
                if not self._read():
                    break
        return "\n".join(self._end.decode(errors="replace").rstrip().splitlines()[-lines:])

    def forget(self) -> None:
        """Leave out of `tail` what was printed until now."""
        self.tail()
        self._end = b""

    def close(self) -> None:
        """Stop reading."""
        self.handed_over()
        if self._source >= 0:
            asyncio.get_running_loop().remove_reader(self._source)
            os.close(self._source)
            self._source = -1


def with_tail(text: str, tail: str) -> str:
    """A text, followed by what was printed last."""
    return f"{text}; its last output:\n{tail}" if tail else text
