"""The elements of a JSON array of any length, found one after another without holding the array in memory.

The bytes are scanned as Latin-1, so that each byte is one character and positions are offsets. This is safe: the syntax
of JSON is ASCII, and no byte of a longer UTF-8 character is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flowrl.errors import ConfigError

CHUNK_BYTES = 1 << 20
BLANK = re.compile(r"[ \t\n\r]*")
MARK = "\xef\xbb\xbf"
"""The byte order mark of UTF-8."""
EXPONENT = len("e+1")
"""Number of characters that have to follow a number before it is certain that the number ends there."""
NEAR = 32
"""An error within this many characters of the end of what has been read may only mean that the element continues."""


def elements(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each element of the array in `file`. Raises ConfigError, which names `path`."""
    scan = ArrayScan(path, file)
    scan.pass_over(MARK)
    scan.require("[")
    if scan.pass_over("]"):
        scan.require_end()
        return
    while True:
        yield scan.element()
        if not scan.pass_over(","):
            break
    if not scan.pass_over("]"):
        raise scan.wrong("Expecting ',' delimiter")
    scan.require_end()


class ArrayScan:
    """The text that has been read from the file and not yet passed."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._text, self._at = "", 0
        self._offset, self._line = 0, 1
        """Where `_text` begins in the file: offset and line."""
        self._decoder = json.JSONDecoder()

    def pass_over(self, wanted: str) -> bool:
        """Skip blanks, and `wanted` if it follows them; returns whether it did."""
        self._skip_blanks()
        found = self._text.startswith(wanted, self._at)
        self._at += len(wanted) if found else 0
        return found

    def require(self, wanted: str) -> None:
        """Pass over `wanted`. Raises ConfigError if something else follows."""
        if not self.pass_over(wanted):
            raise self.wrong(f"Expecting {wanted!r}")

    def require_end(self) -> None:
        """Raise ConfigError unless the file ends here."""
        self._skip_blanks()
        if self._at < len(self._text):
            raise self.wrong("Extra data")

    def element(self) -> tuple[int, bytes]:
        """(offset, bytes) of the next element."""
        self._skip_blanks()
        end = self._end()  # called first, because it may read more of the file, which moves the scan
        begin, self._at = self._at, end
        return self._offset + begin, self._text[begin:end].encode("latin-1")

    def wrong(self, what: str, position: int | None = None) -> ConfigError:
        """An error at this position of the text that has been read; None: where the scan is."""
        line = self._line + self._text.count("\n", 0, self._at if position is None else position)
        return ConfigError(f"{self._path}:{line}: invalid JSON ({what}); write the array again")

    def _skip_blanks(self) -> None:
        while True:
            blank = BLANK.match(self._text, self._at)
            assert blank is not None, "the pattern matches nothing, too"
            self._at = blank.end()
            if len(self._text) - self._at >= len(MARK) or not self._more():
                return

    def _end(self) -> int:
        """Where the element that begins here ends; reads more of the file until the end is found."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as problem:
                goes_on = "Unterminated" in problem.msg or problem.pos > len(self._text) - NEAR
                if not (goes_on and self._more()):
                    raise self.wrong(problem.msg, problem.pos) from None
            except (ValueError, RecursionError) as problem:
                raise ConfigError(f"{self._path}: {str(problem).partition(';')[0]}; write it as a string") from None
            else:
                if end + EXPONENT <= len(self._text) or not self._more():  # a number may continue
                    return int(end)

    def _more(self) -> bool:
        """Read more of the file, and drop what has been passed; False at the end of the file.

        At least as much is read as is left of the text, so that a long element is parsed only a few times.
        """
        found = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        if found:
            self._line += self._text.count("\n", 0, self._at)
            self._offset += self._at
            self._text, self._at = self._text[self._at :] + found.decode("latin-1"), 0
        return bool(found)
