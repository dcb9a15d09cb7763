"""The hash chain of a ledger: one link per commit, which binds every row of every table as that commit left it.

Rows change in place, so a link binds contents, not writes. For each table the chain stores the number of its rows and
the sum of their hashes modulo 2^256. A commit subtracts the hash of a changed row's old content and adds the hash of
its new content; a reader recomputes the sums in one pass, in any order. Triggers of the writing connection report all
changes, whatever statement makes them. A commit's digest is the hash of all numbers and sums; its head hashes the head
before it, its own number, time and digest. A commit that changes nothing makes no link.

`contents` and `commits` are written in the commit's own transaction: a crash leaves them as they were before it, and a
ledger rewound to a checkpoint has that checkpoint's chain. There is no key: the chain reveals changes by anything but
flowrl, unless the chain was recomputed after them. To detect that, keep a head elsewhere: every metrics line contains
one.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import msgpack

SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (
    name TEXT PRIMARY KEY,              -- of a table
    num_rows INTEGER NOT NULL,
    row_hashes TEXT NOT NULL            -- their sum modulo 2^256, in hex
);
CREATE TABLE IF NOT EXISTS commits (
    number INTEGER PRIMARY KEY,         -- from 0
    committed_s REAL NOT NULL,
    digest TEXT NOT NULL,               -- of `contents` after this commit
    head TEXT NOT NULL                  -- of the head before it, number, committed_s and digest
);
"""

TABLES = ("contents", "commits")
MODULUS = 1 << 256
HEAD_BYTES = 16
ROWS_AT_ONCE = 1000
"""Number of rows that are written, or hashed, in one piece, which takes some 20 ms."""

ChainRow = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """The content of a table as a row count and a sum of row hashes."""

    num_rows: int = 0
    row_hashes: int = 0

    def replace_row(self, was: ChainRow | None, now: ChainRow | None) -> Sum:
        """The sum with the row `was` replaced by `now`; None means no row."""
        num_rows = self.num_rows + (now is not None) - (was is not None)
        change = (0 if now is None else row_hash(now)) - (0 if was is None else row_hash(was))
        return Sum(num_rows, (self.row_hashes + change) % MODULUS)

    def as_row(self, table: str) -> ChainRow:
        """The row of `contents` for this table."""
        return table, self.num_rows, f"{self.row_hashes:064x}"

    @classmethod
    def of(cls, rows: Iterable[ChainRow]) -> Sum:
        """The sum of a whole table, computed row by row."""
        return sum_rows(rows)[0]


@dataclass(frozen=True, slots=True)
class Commit:
    """One link of the chain."""

    number: int
    committed_s: float
    digest: str
    head: str

    @classmethod
    def after(cls, before: Commit | None, committed_s: float, digest: str) -> Commit:
        """The link that follows `before`; `before` is None for the first link."""
        number, head = (0, "") if before is None else (before.number + 1, before.head)
        return cls(number, committed_s, digest, hash_content((head, number, committed_s, digest)))


@dataclass(frozen=True)
class State:
    """The state of the chain: the contents of the tables, and the newest commit."""

    sums: Mapping[str, Sum] = field(default_factory=dict)
    newest: Commit | None = None


def sum_rows(rows: Iterable[ChainRow]) -> tuple[Sum, int]:
    """The sum of these rows, and the size in bytes of the longest."""
    num_rows, row_hashes, longest = 0, 0, 0
    pack, blake2b, from_bytes = msgpack.Packer().pack, hashlib.blake2b, int.from_bytes
    rest = iter(rows)
    while some := list(itertools.islice(rest, ROWS_AT_ONCE)):
        packed = list(map(pack, some))
        num_rows += len(some)
        longest = max(longest, *map(len, packed))
        row_hashes += sum([from_bytes(blake2b(row, digest_size=32).digest()) for row in packed])  # `row_hash`, inlined
    return Sum(num_rows, row_hashes % MODULUS), longest


def row_hash(row: ChainRow) -> int:
    """The hash of the values as SQLite returns them: 1, 1.0, "1" and b"1" are four different values."""
    return int.from_bytes(hashlib.blake2b(msgpack.packb(row), digest_size=32).digest())


def hash_content(content: Any) -> str:
    """One hash over a value that msgpack can hold, such as the rows of `contents`, ordered by name."""
    return hashlib.blake2b(msgpack.packb(content), digest_size=HEAD_BYTES).hexdigest()


def read_contents(db: sqlite3.Connection) -> list[ChainRow]:
    """The contents of the tables according to the newest commit."""
    return db.execute("SELECT name, num_rows, row_hashes FROM contents ORDER BY name").fetchall()


def read_commits(db: sqlite3.Connection) -> Iterator[Commit]:
    """All links, ordered by number."""
    return (Commit(*row) for row in db.execute("SELECT number, committed_s, digest, head FROM commits ORDER BY number"))


def read_newest(db: sqlite3.Connection) -> Commit | None:
    """The last link, None before the first commit."""
    row = db.execute("SELECT number, committed_s, digest, head FROM commits ORDER BY number DESC LIMIT 1").fetchone()
    return None if row is None else Commit(*row)


class Chain:
    """Links the commits of one connection, the only one that writes the ledger.

    Call `extend` as the last step of each transaction, and `settle` after its end.
    """

    def __init__(self, db: sqlite3.Connection, tables: Sequence[str]) -> None:
        self._db = db
        self._changes: dict[tuple[str, int], list[ChainRow | None]] = {}
        """(table, rowid) -> [row before this transaction, row now]."""
        self.rows: Mapping[str, int] = {}
        """Table -> the largest rowid in the newest checkpoint. Later rows are new, so they are not in `rewritten`."""
        self.rewritten: dict[tuple[str, int], int] = {}
        """(table, rowid) of a row of the newest checkpoint that has changed -> the last commit that changed it."""
        known = {name: Sum(num_rows, int(row_hashes, 16)) for name, num_rows, row_hashes in read_contents(db)}
        self.state = State(dict.fromkeys(tables, Sum()) | known, read_newest(db))

        def note_row_before(table: str, rowid: int, *row: Any) -> None:
            # Only the first change of a row in a transaction reports its content before the transaction.
            self._changes.setdefault((table, rowid), [row, None])[1] = None

        def note_row_now(table: str, rowid: int, *row: Any) -> None:
            self._changes.setdefault((table, rowid), [None, None])[1] = row

        db.create_function("row_was", -1, note_row_before)
        db.create_function("row_is", -1, note_row_now)
        for table in tables:  # triggers, for this connection only, that report everything that it writes
            columns = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
            was, now = (
                f"SELECT {function}('{table}', {row}.rowid, {', '.join(f'{row}.{name}' for name in columns)});"
                for function, row in (("row_was", "OLD"), ("row_is", "NEW"))
            )
            for event, report in (("INSERT", now), ("UPDATE", f"{was} {now}"), ("DELETE", was)):
                name = f"{table}_{event.lower()}"
                db.execute(f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{table} BEGIN {report} END")

    @property
    def head(self) -> str:
        """The head of the last commit, "" before the first."""
        return self.state.newest.head if self.state.newest else ""

    def extend_chain(self, committed_s: float) -> State:
        """Write the link of this transaction; returns the state for `settle`."""
        pieces = self.extend_in_pieces(committed_s)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                state: State = end.value
                return state

    def extend_in_pieces(self, committed_s: float) -> Generator[None, None, State]:
        """`extend` in pieces: it yields after each ROWS_AT_ONCE rows, and nothing may be written meanwhile."""
        before, sums = self.state, dict(self.state.sums)
        for number, ((table, _), (was, now)) in enumerate(self._changes.items(), 1):
            sums[table] = sums[table].replace_row(was, now)
            if number % ROWS_AT_ONCE == 0:
                yield
        first = before.newest is None
        if sums == before.sums and not first:
            return before
        contents = [sums[name].as_row(name) for name in sorted(sums)]
        commit = Commit.after(before.newest, committed_s, hash_content(contents))
        self._db.executemany("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", contents)
        self._db.execute("INSERT INTO commits VALUES (?, ?, ?, ?)", astuple(commit))
        return State(sums, commit)

    def end_transaction(self, state: State | None) -> None:
        """End the transaction: committed with the state that `extend` returned, or rolled back (None)."""
        if state is not None and state.newest is not None and self.rows:
            old, number = self.rows, state.newest.number
            self.rewritten.update((row, number) for row in self._changes if row[1] <= old.get(row[0], -1))
        self._changes.clear()
        self.state = state or self.state
