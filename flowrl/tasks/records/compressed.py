"""Opens text files that may be compressed (gzip, bzip2, xz, zstandard), and says why a file cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flowrl.errors import ConfigError

DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a damaged file raises."""


def _zstandard(path: Path) -> IO[bytes]:
    import pyarrow

    opened: IO[bytes] = pyarrow.input_stream(path, compression="zstd")
    return opened


def _bzip2(path: Path) -> IO[bytes]:
    return bz2.open(path, "rb")


def _gzip(path: Path) -> IO[bytes]:
    return io.BufferedReader(gzip.open(path, "rb"))


def _xz(path: Path) -> IO[bytes]:
    return lzma.open(path, "rb")


SUFFIXES: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": _gzip,
    ".bz2": _bzip2,
    ".xz": _xz,
    ".zst": _zstandard,
}


@contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Turn an error raised within because the file is damaged or cannot be opened into a ConfigError that names
    `path`."""
    try:
        yield
    except DAMAGED as problem:
        raise ConfigError(f"{path} cannot be read: {problem}; write it again") from None


def open_text(path: Path, *, newline: str | None) -> IO[str]:
    """The text of a file, decompressed if its name says so. Bytes that are not UTF-8 become lone surrogates."""
    raw = SUFFIXES[path.suffix](path) if path.suffix in SUFFIXES else path.open("rb")
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
