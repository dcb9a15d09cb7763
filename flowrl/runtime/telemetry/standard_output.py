"""The standard streams of a command whose readers may go away: a closed pipe, a full disk, a terminal that is gone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from flowrl.runtime.telemetry.safe_text import REPLACED, print_text


def open_closed() -> None:
    """Give a process that was started without a standard stream (`>&-`) an empty one.

    Python has None in place of it, and the next file that is opened would get its number.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            _occupy(number)
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _occupy(number: int) -> None:
    """Open the file descriptor on nothing, for processes that are started later, unless it is open."""
    try:
        os.fstat(number)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)


def flush(stream: TextIO) -> None:
    """Write what `stream` holds back; if that fails, let go of it."""
    try:
        stream.flush()
    except OSError:
        let_go(stream)


def let_go(stream: TextIO) -> None:
    """Send what `stream` still holds, and all that follows, nowhere. Python's exit would try to write it once more."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file holds nothing back
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str, stream: TextIO) -> None:
    """Print a line to `stream`, which may have no reader any longer."""
    try:
        print_text(text, stream=stream, flush=True)
    except OSError:
        let_go(stream)


class LastingOutput:
    """A text stream for what goes on without a reader: from the first failed write on, it writes and raises nothing.

    `lost` is called once, with the error.
    """

    def __init__(self, stream: TextIO, lost: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._lost = lost
        self._is_lost = False

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if not self._is_lost:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # of a stream that is not this command's own
                self._stream.write(text.encode(self.encoding, REPLACED).decode(self.encoding))
            except OSError as error:
                self._let_go(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_lost:
            try:
                self._stream.flush()
            except OSError as error:
                self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        self._is_lost = True
        let_go(self._stream)
        self._lost(error)
