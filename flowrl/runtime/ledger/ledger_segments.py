"""The ledger in a checkpoint: segments, which are files that never change, so that a checkpoint writes what is new.

A segment `ledger/FIRST-LAST.sqlite` has the rows that the commits FIRST to LAST left new or changed: a table for each
table of the ledger, with the same columns and the row's `rowid` as `row`. The rows of a later segment replace those of
an earlier one. A checkpoint has every segment from commit 0 to its own as a file of its own: hard links to those of the
checkpoint before, or copies where the file system has no links, and one new segment. So it can be restored alone, after
any other checkpoint is removed, and as a copy on another machine.

Invariants
- The segments of a checkpoint leave out no commit: each begins with the commit after the last one of the one before.
- A new segment takes in those before it while they have at most GROWTH times its size, and at most MOST_BYTES
  together. So there are about log2(MOST_BYTES / bytes per checkpoint) small segments, and one of about MOST_BYTES for
  each MOST_BYTES of rows. A row is written as often as there are small segments, and a checkpoint writes at most about
  MOST_BYTES besides what is new.
- Rows are found by number: rows that are new since the checkpoint before have larger ones, and the chain has noted
  which earlier rows have changed (`Chain.rewritten`). The table `contents` is small, and whole in each segment.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flowrl.errors import ConfigError

SEGMENTS = "ledger"
"""The directory of the segments in a checkpoint."""
OF_EARLIER = "ledger.sqlite"
"""The whole ledger, in a checkpoint of an earlier flowrl."""
NAME = re.compile(r"(\d{8,})-(\d{8,})\.sqlite")
MOST_BYTES = 64 << 20
GROWTH = 2
WHOLE = "contents"
"""The table of which a later segment replaces all rows."""


@dataclass(frozen=True)
class Base:
    """A checkpoint to whose segments the next one adds."""

    checkpoint: Path
    number: int
    """The number of its last commit."""
    rows: Mapping[str, int]
    """Table -> the largest number of a row."""

    @classmethod
    def of(cls, checkpoint: Path, tables: Collection[str]) -> Self | None:
        """The checkpoint as a base; None if it has no segments."""
        parts = segments_of(checkpoint)
        if not parts:
            return None
        rows = dict.fromkeys(tables, -1)
        for part in parts:
            with _open_segment(part) as db:
                for table in tables:
                    rows[table] = max(
                        rows[table], db.execute(f"SELECT COALESCE(MAX(row), -1) FROM {table}").fetchone()[0]
                    )
        return cls(checkpoint, _commit_range(parts[-1])[1], rows)


def segments_of(checkpoint: Path) -> list[Path]:
    """The segments of a checkpoint, oldest first. Raises ConfigError if one is missing between two others."""
    found = sorted(path for path in (checkpoint / SEGMENTS).glob("*.sqlite") if NAME.fullmatch(path.name))
    begin = 0
    for path in found:
        first, last = _commit_range(path)
        if first != begin:
            raise ConfigError(f"{checkpoint.name} has no segment of its ledger with commit {begin}")
        begin = last + 1
    return found


def write_segments(
    db: sqlite3.Connection,
    attached: Path,
    checkpoint: Path,
    number: int,
    base: Base | None,
    rewritten: Mapping[str, list[int]],
) -> None:
    """Write the ledger that `db` reads, as of commit `number`, to the new directory `checkpoint`.

    `attached` is the empty database that `db` has attached as `part`: the new segment, which is moved. `rewritten` has
    the rows up to `base.rows` that have changed since the base.
    """
    directory = checkpoint / SEGMENTS
    directory.mkdir()
    linked = _link_segments(base, directory) if base is not None else None
    begin = 0 if linked is None or base is None else base.number + 1
    tables = _tables_of(db)
    for table, columns in tables.items():
        described = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        db.execute(f"CREATE TABLE part.{table} (row INTEGER PRIMARY KEY, {described})")
        after = base.rows.get(table, -1) if base is not None and linked is not None and table != WHOLE else -1
        db.execute(
            f"INSERT INTO part.{table} SELECT rowid, * FROM main.{table} WHERE rowid > ? ORDER BY rowid", (after,)
        )
        if after >= 0:
            again = [(row,) for row in sorted(rewritten.get(table, ()))]
            db.executemany(
                f"INSERT OR REPLACE INTO part.{table} SELECT rowid, * FROM main.{table} WHERE rowid = ?", again
            )
    db.execute("COMMIT")
    db.execute("DETACH part")
    new = directory / _segment_name(begin, number)
    if linked and begin > number:  # nothing was committed since: the rows are those of the base
        attached.unlink()
        return
    attached.rename(new)
    _merge_segments(new, linked or [], tables)


def _merge_segments(new: Path, before: Sequence[Path], tables: Collection[str]) -> None:
    """Take the segments before the new one into it, as the invariant says."""
    chosen: list[Path] = []
    total = new.stat().st_size
    for path in reversed(before):
        size = path.stat().st_size
        if size > GROWTH * total or size + total > MOST_BYTES:
            break
        chosen.insert(0, path)
        total += size
    if not chosen:
        return
    merged = new.with_name(_segment_name(_commit_range(chosen[0])[0], _commit_range(new)[1]))
    temporary = merged.with_name(f".{merged.name}")
    shutil.copyfile(chosen[0], temporary)
    with closing(_connect_unsafe(temporary)) as db:
        for later in (*chosen[1:], new):
            db.execute("ATTACH ? AS part", (f"{later}",))
            db.execute("BEGIN")
            db.execute(f"DELETE FROM {WHOLE}")
            for table in tables:
                db.execute(f"INSERT OR REPLACE INTO main.{table} SELECT * FROM part.{table} ORDER BY row")
            db.execute("COMMIT")
            db.execute("DETACH part")
    for path in (*chosen, new):
        path.unlink()
    temporary.rename(merged)


def _link_segments(base: Base, directory: Path) -> list[Path] | None:
    """Hard links to the base's segments, or copies of them; None, and nothing, if they are no longer all there."""
    made: list[Path] = []
    try:
        found = segments_of(base.checkpoint)
        if not found or _commit_range(found[-1])[1] != base.number:
            raise FileNotFoundError
        for path in found:
            target = directory / path.name
            try:
                os.link(path, target)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(path, target)
            made.append(target)
    except (FileNotFoundError, ConfigError):
        for target in made:
            target.unlink(missing_ok=True)
        return None
    return made


def rebuild_ledger(checkpoint: Path, path: Path, schema: str) -> None:
    """Write the ledger that the checkpoint's segments hold to a new file, whose tables `schema` creates.

    Raises ConfigError if the segments are not those of a whole ledger.
    """
    statements = [text for text in schema.split(";\n") if text.strip()]
    indexes = [text for text in statements if "CREATE INDEX" in text]
    with closing(_connect_unsafe(path)) as db:
        db.execute("PRAGMA cache_size = -262144")
        for text in statements:
            if text not in indexes:
                db.execute(text)
        tables = _tables_of(db)
        numbered = {
            table
            for table in tables
            for _, _, kind, _, _, key in db.execute(f"PRAGMA main.table_info({table})")
            if kind == "INTEGER" and key == 1
        }
        """The tables of which a column is the row number."""
        for part in segments_of(checkpoint):
            with _open_segment(part) as segment:  # raises if it is none
                segment.execute(f"SELECT COUNT(*) FROM {WHOLE}").fetchone()
            db.execute("ATTACH ? AS part", (f"{part.resolve().as_uri()}?mode=ro",))
            db.execute("BEGIN")
            db.execute(f"DELETE FROM {WHOLE}")
            for table, columns in tables.items():  # with their numbers, in place of earlier rows with these numbers
                names = ", ".join(columns)
                to, source = ("", "") if table in numbered else ("rowid, ", "row, ")
                rows = f"SELECT {source}{names} FROM part.{table} ORDER BY row"
                db.execute(f"INSERT OR REPLACE INTO main.{table} ({to}{names}) {rows}")
            db.execute("COMMIT")
            db.execute("DETACH part")
        for text in indexes:  # sorted once instead of row by row
            db.execute(text)
        for table, num_rows in db.execute(f"SELECT name, num_rows FROM {WHOLE}").fetchall():
            found = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            if found != num_rows:
                raise ConfigError(
                    f"{checkpoint.name} has {found} rows of the ledger's table {table}, and {num_rows} were committed"
                )


def _list_parts(checkpoint: Path) -> list[Path]:
    """The segments of a checkpoint; of one of an earlier flowrl, its whole ledger."""
    return segments_of(checkpoint) or [checkpoint / OF_EARLIER]


def has_commit(checkpoint: Path, head: str) -> bool:
    """Whether the ledger in the checkpoint has the commit with this head. Raises ConfigError if it cannot be read."""
    for part in reversed(_list_parts(checkpoint)):
        with _open_segment(part) as db:
            if db.execute("SELECT 1 FROM commits WHERE head = ?", (head,)).fetchone():
                return True
    return False


def last_commit_s(checkpoint: Path) -> float:
    """When the last commit of the ledger in the checkpoint was made."""
    with _open_segment(_list_parts(checkpoint)[-1]) as db:
        return float(db.execute("SELECT MAX(committed_s) FROM commits").fetchone()[0])


def phases_evaluated(checkpoint: Path, step: int) -> set[str]:
    """The phases (before, during, after) of the evaluations of version `step` in the checkpoint."""
    phases: set[str] = set()
    for part in _list_parts(checkpoint):
        with _open_segment(part) as db:
            phases |= {
                phase for (phase,) in db.execute("SELECT DISTINCT phase FROM evaluations WHERE step = ?", (step,))
            }
    return phases


def any_in_flight(checkpoint: Path) -> bool:
    """Whether the ledger in the checkpoint has samples whose fate is not known yet."""
    left: set[int] = set()
    for part in _list_parts(checkpoint):
        with _open_segment(part) as db:
            left = {row for row in left if not db.execute("SELECT 1 FROM samples WHERE rowid = ?", (row,)).fetchone()}
            left |= {row for (row,) in db.execute("SELECT rowid FROM samples WHERE state = 'in_flight'")}
    return bool(left)


@contextmanager
def _open_segment(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads a segment. What SQLite cannot read becomes a ConfigError."""
    with closing(
        sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    ) as db:
        try:
            yield db
        except (sqlite3.Error, UnicodeError) as problem:
            raise ConfigError(f"{path} is no segment of a ledger, or damaged: {problem}") from None


def attach_new(db: sqlite3.Connection, path: Path) -> None:
    """Attach a new, empty database as `part`. It is not synced: whoever publishes a checkpoint does that."""
    for file in (path, path.with_name(f"{path.name}-journal")):
        file.unlink(missing_ok=True)
    db.execute("ATTACH ? AS part", (str(path),))
    db.execute("PRAGMA part.journal_mode = OFF")
    db.execute("PRAGMA part.synchronous = OFF")


def _connect_unsafe(path: Path) -> sqlite3.Connection:
    """A connection to a file that nobody needs after a crash."""
    db = sqlite3.connect(path.resolve().as_uri(), uri=True, isolation_level=None)
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")
    return db


def _tables_of(db: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """Table of the ledger -> its columns with their types."""
    tables = [name for (name,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table' ORDER BY rowid")]
    return {
        table: {name: kind for _, name, kind, *_ in db.execute(f"PRAGMA main.table_info({table})")} for table in tables
    }


def _segment_name(first: int, last: int) -> str:
    return f"{first:08d}-{last:08d}.sqlite"


def _commit_range(path: Path) -> tuple[int, int]:
    """The first and the last commit of a segment."""
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2])
