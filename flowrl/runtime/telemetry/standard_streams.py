"""Text for people, and the standard streams of a command, whose readers may go away: a closed pipe, a full disk.

Nothing in a text reaches a terminal as a command, and every charset can show it. Texts come from models, rows, file
names and other programs. `print_text` prints them, and where rich does, it is a `SafeConsole` (`view`): both write
`shown` text, and only the colours that flowrl itself chooses. What a stream's charset lacks is replaced, once
`replace_unwritable` has told the stream so.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""


def escape_controls(text: str) -> str:
    """`text` with escapes instead of the characters that would move the cursor, change colours or reorder the text."""
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t" and (unicodedata.category(character) in ("Cc", "Cs") or character in REORDERING)
        else character
        for character in text
    )


PLAIN = {"→": "->", "←": "<-", "×": "x", "…": "...", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "·": "-", "’": "'"}
"""Characters of flowrl's own texts -> what stands for them in a charset that lacks them."""
REPLACED = "flowrl-readable"
"""The name of the error handler that replaces."""


def _replace_characters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    found = (PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode() for character in part)
    return "".join(found), error.end


codecs.register_error(REPLACED, _replace_characters)


def replace_unwritable() -> None:
    """From now on, standard streams of this process, and of those that it starts, replace what their charset lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=REPLACED)
    charset = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{charset}:backslashreplace"  # an empty one is that of the locale


def print_text(
    *parts: object, stream: TextIO | None = None, sep: str = " ", end: str = "\n", flush: bool = False
) -> None:
    """Print like `print`; the only way in which texts for people get to a stream without rich."""
    text = sep.join(map(str, parts))
    print(escape_controls(text), file=stream, end=end, flush=flush)


def open_closed() -> None:
    """Give a process that was started without a standard stream (`>&-`) an empty one.

    Python has None in place of it, and the next file that is opened would get its number.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:  # occupy the number, also for processes that are started later
                nowhere = os.open(os.devnull, os.O_RDWR)
                if nowhere != number:
                    os.dup2(nowhere, number)
                    os.close(nowhere)
                os.set_inheritable(number, True)
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def flush_stream(stream: TextIO) -> None:
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


def print_line(text: str, stream: TextIO) -> None:
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
