"""The bytes of a ledger's tables, read from its file without SQLite: equal bytes are equal rows.

A table is a B-tree of pages, whose leaves hold the rows in the order of their numbers
(https://www.sqlite.org/fileformat2.html). The walk down reads the inner pages alone, about one page in 300. A page may
be newer in the write-ahead log (https://www.sqlite.org/walformat.html): its last frame up to the one that the reader's
transaction sees. While the transaction lasts, neither the log's frames up to there nor the pages that the file has
instead change. `Pages.begin_transaction` learns that frame from the log's index, which must be the same before and
after the transaction begins.

Invariant: no file is closed before the connection that reads the ledger. A process that closes a file gives up all its
locks on it (POSIX), and SQLite's with them, so no other connection of the process may have the ledger open either.

A row that does not fit on its page continues on others, which no leaf shows; see `audit_seal`.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Self

INNER, LEAF = 0x05, 0x0D
INDEX_BYTES = 48
"""Size of the header of the log's index, of which there are two copies."""
LOG_HEADER, FRAME_HEADER = 32, 24
DIGEST_BYTES = 16
MOST_LEVELS = 20
ATTEMPTS = 100
"""How often a transaction is begun, until no commit comes between. A run commits twice a second."""


class Leaves:
    """The leaves of one table, in order."""

    def __init__(self, pages: Pages, root: int) -> None:
        self._pages = pages
        level: list[tuple[int, float]] = [(root, float("inf"))]
        for _ in range(MOST_LEVELS):
            if pages.page_kind(level[0][0]) == LEAF:
                break
            level = [child for number, last in level for child in pages.page_children(number, last)]
        else:
            raise IndexError
        self._numbers = [number for number, _ in level]
        self._last = [last for _, last in level]
        """The largest row that each leaf may have."""

    def digest_rows(self, first: int, last: int) -> str:
        """The digest of all leaves that can have rows with the numbers `first` to `last`."""
        found = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for number in self._numbers[bisect_left(self._last, first) : bisect_left(self._last, last) + 1]:
            found.update(self._pages.read_page(number))
        return found.hexdigest()


class Pages:
    """The pages of a ledger as one transaction sees them; a context manager, to be left after the connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, int] = {}
        """What follows the ledger's name -> descriptor."""
        self._frames: dict[int, int] = {}
        """Page -> where the log has it."""
        self.page_bytes = 0

    def begin_transaction(self, db: sqlite3.Connection) -> bool:
        """Begin a transaction of `db`, whose pages are meant from now on.

        False, and no transaction, if they cannot be told: commits follow each other without a pause, or the log has no
        index in a file.
        """
        (self.page_bytes,) = db.execute("PRAGMA page_size").fetchone()
        has_log = db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        for _ in range(ATTEMPTS):
            before = self._read_index() if has_log else bytes(INDEX_BYTES)
            db.execute("BEGIN")
            db.execute("SELECT COUNT(*) FROM main.sqlite_master").fetchone()  # the first read fixes the snapshot
            if before is not None and (not has_log or before == self._read_index()):
                break
            db.execute("ROLLBACK")
        else:
            return False
        (num_frames,) = struct.unpack_from("=I", before, 16)
        for frame in range(num_frames):
            start = LOG_HEADER + frame * (FRAME_HEADER + self.page_bytes)
            self._frames[int.from_bytes(self._read_bytes("-wal", 4, start), "big")] = start + FRAME_HEADER
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        for file in self._files.values():
            os.close(file)

    def _read_bytes(self, name: str, size: int, start: int) -> bytes:
        """Bytes of a file; what the system says of a disk is raised as SQLite does."""
        try:
            if name not in self._files:
                self._files[name] = os.open(f"{self._path}{name}", os.O_RDONLY)
            return os.pread(self._files[name], size, start)
        except OSError as error:
            raise sqlite3.OperationalError(f"{self._path.name}{name}: {error}") from None

    def _read_index(self) -> bytes | None:
        """The header of the log's index; None while it is being written, or if there is none."""
        if not Path(f"{self._path}-shm").exists():
            return None
        header = self._read_bytes("-shm", 2 * INDEX_BYTES, 0)
        one, other = header[:INDEX_BYTES], header[INDEX_BYTES:]
        return one if one == other else None

    def find_leaves(self, db: sqlite3.Connection, table: str) -> Leaves | None:
        """The leaves of a table; None if its pages are damaged, which SQLite will tell."""
        query = "SELECT rootpage FROM main.sqlite_master WHERE type = 'table' AND name = ?"
        try:
            return Leaves(self, db.execute(query, (table,)).fetchone()[0])
        except (struct.error, IndexError, OverflowError):
            return None

    def read_page(self, number: int) -> bytes:
        """The bytes of a page; they are counted from 1."""
        start = self._frames.get(number)
        if start is not None:
            return self._read_bytes("-wal", self.page_bytes, start)
        return self._read_bytes("", self.page_bytes, (number - 1) * self.page_bytes)

    def page_kind(self, number: int) -> int:
        """What kind of page it is."""
        return self.read_page(number)[_page_header(number)]

    def page_children(self, number: int, last: float) -> Iterator[tuple[int, float]]:
        """The pages below an inner page, with the largest row that each may have; `last` is that of the page itself."""
        page, header = self.read_page(number), _page_header(number)
        kind, num_cells, rightmost = struct.unpack_from(">BxxHxxxI", page, header)
        if kind != INNER:
            raise IndexError
        for place in struct.unpack_from(f">{num_cells}H", page, header + 12):
            yield struct.unpack_from(">I", page, place)[0], _read_varint(page, place + 4)
        yield rightmost, last


def _page_header(number: int) -> int:
    """Where the header of a page is: the first page begins with that of the database."""
    return 100 if number == 1 else 0


def _read_varint(page: bytes, start: int) -> int:
    """SQLite's integers of variable length, of 64 bits with a sign."""
    value = 0
    for place in range(start, start + 8):
        value = value << 7 | page[place] & 0x7F
        if page[place] < 0x80:
            return value
    value = value << 8 | page[start + 8]
    return value - (1 << 64) if value >> 63 else value
