"""The ledger: the outcome of every admitted sample and of every policy token.

Storage only; `Accounting` decides. Rows are buffered. `commit` writes them in one transaction, together with the link
that binds the contents of all tables after it (`chain`). `ledger_file` defines the file and its tables.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from flowrl.errors import FlowrlError
from flowrl.runtime.ledger import chain, ledger_file
from flowrl.runtime.ledger.chain import ROWS_AT_ONCE, Chain
from flowrl.runtime.ledger.ledger_file import Terms
from flowrl.runtime.ledger.ledger_segments import Base, attach_new, write_segments

ALL_TABLES = (*ledger_file.TABLES, *chain.TABLES)
FOLDED_WITHIN_MS = 500
"""How long the end of a run waits for other readers of its ledger."""


@dataclass(frozen=True)
class Fate:
    """The outcome of a sample at one trainer."""

    step: int | None = None
    """The version that its batch made; None if it was in no batch."""
    tokens: int = 0
    stale_tokens: int = 0
    masked_tokens: int = 0
    oldest_version: int | None = None
    state: str = "trained"
    """trained; or filtered, failed or dropped, if nothing of it entered the loss."""
    reason: str | None = None

    @property
    def trained(self) -> bool:
        return self.state == "trained"


# A transaction runs the statements in this order, and the rows of each in order of their events, so the row of a
# sample exists before its later events change it. This is not the order in which the events arrived, and it need not
# be. In one row of `samples`
# - `partial` and `generated` both write response_tokens, but the tokens of a finished rollout win in either order:
#   `generated` replaces the value from `partial`, and `partial` does not change a generated row;
# - `generated` and `redone` both write redone_tokens, but only add to them;
# - `redone` comes from copies of a sample and from abandoned requests, each counted once;
# - `trained` and `unused` write state and tokens, but `Accounting` adds at most one of the two.
# A request is abandoned once, in the transaction that inserts it or in a later one.
# The first `settled` of a ticket is final. No other two statements write the same column of a row.
# When a sample is generated twice (after a crash), one generation counts as redone: the first if the second replaces
# it, the second ("redone") if a checkpoint holds the first.
INCARNATION = "(SELECT MAX(number) FROM incarnations)"
STATEMENTS = {
    "ticket": "INSERT INTO tickets VALUES (?, ?, 'open', NULL, ?, 0, NULL)",
    "asking": "UPDATE tickets SET asks = ?, asked_by = ? WHERE ticket = ?",
    "admitted": "INSERT INTO samples VALUES (?, ?, ?, ?, ?, 'in_flight', NULL, ?, 0, 0, 0, 0, NULL, ?,"
    " NULL, NULL, NULL, NULL, NULL, NULL, ?, NULL, NULL, NULL, 0)",
    "derived": "INSERT INTO derived VALUES (?, ?, ?, ?)",
    "partial": "UPDATE samples SET response_tokens = ? WHERE sample_id = ? AND generated_s IS NULL",
    "generated": "UPDATE samples SET"
    " redone_tokens = redone_tokens + (CASE WHEN generated_s IS NULL THEN 0 ELSE response_tokens END),"
    " generator = ?, response_tokens = ?, oldest_version = ?, newest_version = ?, generated_s = ?"
    " WHERE sample_id = ?",
    "prompt": "UPDATE samples SET prompt_tokens = ? WHERE sample_id = ?",
    "redone": "UPDATE samples SET redone_tokens = redone_tokens + ? WHERE sample_id = ?",
    "scored": "UPDATE samples SET reward = ?, scored_s = ? WHERE sample_id = ?",
    "trained": "UPDATE samples SET state = 'trained', trained_tokens = ?, stale_tokens = ?, masked_tokens = ?,"
    " oldest_trained_version = ?, trained_version = ?, step = ?, trained_s = ? WHERE sample_id = ?",
    "unused": "UPDATE samples SET state = ?, reason = ?, stale_tokens = ?, masked_tokens = ? WHERE sample_id = ?",
    "used": "INSERT INTO uses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "reused": "INSERT INTO reuses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "request": f"INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, {INCARNATION}, ?)",
    "abandon": "UPDATE requests SET abandoned = ? WHERE number = ?",
    "void": f"INSERT INTO attempts VALUES (?, ?, ?, {INCARNATION})",
    "episode": f"INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, {INCARNATION})"
    " ON CONFLICT (sample_id) DO UPDATE SET attempts = excluded.attempts, turns = excluded.turns,"
    " truncated = excluded.truncated, cause = excluded.cause, seconds = excluded.seconds,"
    " ended_s = excluded.ended_s, incarnation = excluded.incarnation",
    "span": "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)",
    "left_out": "INSERT INTO losses VALUES (?, ?, ?, ?)",
    "step": f"INSERT INTO steps VALUES (?, ?, {INCARNATION}, ?, NULL)",
    "line": "UPDATE steps SET line = ? WHERE trainer = ? AND step = ?",
    "ended in order": f"UPDATE incarnations SET ended_s = ? WHERE number = {INCARNATION}",
    "settled": "UPDATE tickets SET state = ?, step = ? WHERE ticket = ? AND state = 'open'",
    "evaluated": "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
}


@dataclass(frozen=True)
class OpenSample:
    """A sample in flight, as a resumed run finds it."""

    ticket: int
    group_id: str
    sample_id: str
    member: int
    held: Mapping[str, int]


class Ledger:
    """Buffered writes to one ledger file, and the few reads that accounting needs.

    If the file does not exist, it is created, with `terms` for its first incarnation. If it was just restored from a
    checkpoint, `restored_from` is that.
    """

    def __init__(self, path: Path, terms: Terms | None = None, *, restored_from: Path | None = None) -> None:
        self.path = path
        if not path.exists():
            ledger_file.create_ledger(path, terms or Terms())
        self._db = ledger_file.open_to_write(path)
        self._chain = Chain(self._db, ledger_file.TABLES)
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in STATEMENTS}
        self._base = None if restored_from is None else Base.of(restored_from, ALL_TABLES)
        """The newest checkpoint, to whose segments the next one adds; None: it writes everything."""
        self._asked: Base | None = None
        """The checkpoint that is being written."""
        self._chain.rows = {} if self._base is None else self._base.rows

    def add_row(self, statement: str, *row: Any) -> None:
        """Buffer one row for the statement of that name."""
        self._rows[statement].append(row)

    @property
    def dirty(self) -> bool:
        """Whether any row is buffered."""
        return any(self._rows.values())

    @property
    def head(self) -> str:
        """The head of the last commit; it binds everything committed."""
        return self._chain.head

    def commit_rows(self) -> None:
        """Write all buffered rows in one transaction.

        Raises FlowrlError if that fails; then nothing is written, and all rows stay buffered.
        """
        for _ in self.write_in_pieces():
            pass

    def write_in_pieces(self) -> Iterator[None]:
        """`commit` in pieces, for the rows that are buffered when it starts. Run one at a time, and each to its end."""
        rows, self._rows = self._rows, {name: [] for name in STATEMENTS}
        linked = None
        try:
            self._db.execute("BEGIN")
            room = ROWS_AT_ONCE
            for name, of_name in rows.items():
                start = 0
                while start < len(of_name):
                    part = of_name[start : start + room]
                    self._db.executemany(STATEMENTS[name], part)
                    start, room = start + len(part), room - len(part)
                    if not room:
                        room = ROWS_AT_ONCE
                        yield
            state = yield from self._chain.extend_in_pieces(time.time())
            self._db.execute("COMMIT")
            linked = state
        except (sqlite3.Error, OverflowError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the primary result code
            remedy = "make room there" if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) else "fix that"
            raise FlowrlError(
                f"the ledger {self.path} cannot be written ({error}); a run cannot continue without its ledger; "
                f"{remedy} and continue with --resume"
            ) from error
        finally:
            if linked is None:
                self._db.rollback()
                self._rows = {name: rows[name] + later for name, later in self._rows.items()}
            self._chain.end_transaction(linked)

    def group_of(self, sample_id: str) -> str | None:
        """The group of a committed sample, None if there is no such sample."""
        row = self._db.execute("SELECT group_id FROM samples WHERE sample_id = ?", (sample_id,)).fetchone()
        return None if row is None else str(row[0])

    def derived_from(self, parent_id: str, label: str) -> set[str]:
        """The samples derived from one under a label, committed or not. Do not call in a commit."""
        buffered = {row[0] for row in self._rows["derived"] if row[1:3] == (parent_id, label)}
        query = "SELECT sample_id FROM derived WHERE (parent_id, label) = (?, ?)"
        return buffered | {sample_id for (sample_id,) in self._db.execute(query, (parent_id, label))}

    def closed_sample(self, sample_id: str) -> tuple[int, dict[str, int], str, str | None]:
        """(ticket, versions held at admission by trainer, state, reason) of a committed sample."""
        query = "SELECT t.ticket, t.held, s.state, s.reason FROM samples s JOIN tickets t USING (group_id)"
        row = self._db.execute(f"{query} WHERE sample_id = ?", (sample_id,)).fetchone()
        return row[0], json.loads(row[1]), row[2], row[3]

    def count_uses(self, sample_id: str, trainer: str) -> int:
        """How often the trainer has used the sample, in committed steps."""
        counts = (
            f"(SELECT COUNT(*) FROM {table} WHERE (sample_id, trainer) = (?1, ?2))" for table in ("uses", "reuses")
        )
        return int(self._db.execute(f"SELECT {' + '.join(counts)}", (sample_id, trainer)).fetchone()[0])

    def samples_of(self, group_id: str) -> set[str]:
        """The committed samples of a group; empty if there is no such group."""
        rows = self._db.execute("SELECT sample_id FROM samples WHERE group_id = ?", (group_id,))
        return {sample_id for (sample_id,) in rows}

    def in_flight(self) -> list[OpenSample]:
        """Every committed sample in flight, in order of admission."""
        rows = self._db.execute(
            "SELECT t.ticket, s.group_id, s.sample_id, s.member, t.held FROM samples s JOIN tickets t USING (group_id)"
            " WHERE s.state = 'in_flight' ORDER BY t.ticket, s.member"
        )
        return [
            OpenSample(ticket, group_id, sample_id, member, json.loads(held))
            for ticket, group_id, sample_id, member, held in rows
        ]

    def known_fates(self) -> list[tuple[str, str, str, Fate]]:
        """(group_id, sample_id, trainer, fate): the known fates in all groups with a sample in flight."""
        open_groups = "(SELECT group_id FROM samples WHERE state = 'in_flight')"
        used = self._db.execute(
            "SELECT s.group_id, sample_id, trainer, u.step, tokens, u.stale_tokens, u.masked_tokens, u.oldest_version"
            f" FROM uses u JOIN samples s USING (sample_id) WHERE s.group_id IN {open_groups}"
        )
        lost = self._db.execute(
            "SELECT s.group_id, sample_id, trainer, l.state, l.reason"
            f" FROM losses l JOIN samples s USING (sample_id) WHERE s.group_id IN {open_groups}"
        )
        found = [(group, sample, trainer, Fate(step, *rest)) for group, sample, trainer, step, *rest in used]
        return found + [(group, sample, t, Fate(state=state, reason=why)) for group, sample, t, state, why in lost]

    def kept_tickets(self) -> dict[str, int]:
        """Sample without a reward -> how many groups may still be admitted because of it."""
        admitted = "m.sample_id NOT IN (SELECT sample_id FROM derived)"
        size = f"(SELECT COUNT(*) FROM samples m WHERE m.group_id = a.group_id AND {admitted})"
        asked = f"(SELECT TOTAL(1 + a.asks * {size}) FROM tickets a WHERE a.asked_by = s.sample_id)"
        rows = self._db.execute(
            f"SELECT sample_id, CAST(t.asks - {asked} AS INTEGER) FROM samples s JOIN tickets t USING (group_id)"
            " WHERE t.asks > 0 AND s.state = 'in_flight' AND scored_s IS NULL"
            " AND sample_id NOT IN (SELECT sample_id FROM derived)"
        )
        return dict(rows.fetchall())

    def live_requests(self) -> list[tuple[Any, ...]]:
        """The requests of samples in flight that are not abandoned, in order of their numbers.

        Each row: sample, whether it is generated, and the request's number, id, attempt, turn and tokens.
        """
        return self._db.execute(
            "SELECT sample_id, generated_s IS NOT NULL, number, request_id, attempt, turn, tokens"
            " FROM requests JOIN samples USING (sample_id)"
            " WHERE state = 'in_flight' AND abandoned IS NULL ORDER BY number"
        ).fetchall()

    def has_request(self, request_id: str, sample_id: str, digest: str) -> bool:
        """Whether this incarnation has booked this answer to a request, committed or not. Do not call in a commit."""
        buffered = any((row[1], row[5]) == (request_id, digest) for row in self._rows["request"])
        query = (
            f"SELECT 1 FROM requests WHERE (sample_id, request_id, digest) = (?, ?, ?) AND incarnation = {INCARNATION}"
        )
        return buffered or self._db.execute(query, (sample_id, request_id, digest)).fetchone() is not None

    def next_number(self, table: str) -> int:
        """The number after the last one booked in `tickets` or `requests`."""
        column = {"tickets": "ticket", "requests": "number"}[table]
        return int(self._db.execute(f"SELECT COALESCE(MAX({column}) + 1, 0) FROM {table}").fetchone()[0])

    def as_of_now(self) -> LedgerSnapshot:
        """Commit, and return a snapshot of the ledger after that."""
        self.commit_rows()
        assert self._chain.state.newest is not None
        largest = "SELECT COALESCE(MAX(rowid), -1) FROM {}"
        rows = {name: self._db.execute(largest.format(name)).fetchone()[0] for name in ALL_TABLES}
        self._chain.rows = rows
        self._asked = Base(Path(), self._chain.state.newest.number, rows)
        return LedgerSnapshot(self.path, self._asked.number, self._base, self._chain.rewritten)

    def note_published(self, checkpoint: Path) -> None:
        """The snapshot that was taken last is complete in this checkpoint, and the next one adds to it."""
        assert self._asked is not None
        self._base = replace(self._asked, checkpoint=checkpoint)
        number = self._base.number
        self._chain.rewritten = {row: last for row, last in self._chain.rewritten.items() if last > number}

    def close(self) -> None:
        """Commit, fold the WAL into the file, and close the file. If another process reads it, the WAL file stays."""
        self.commit_rows()
        self._db.execute(f"PRAGMA busy_timeout = {FOLDED_WITHIN_MS}")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()


class LedgerSnapshot:
    """A ledger as committed now, unaffected by later writes; a context manager. Call `write` once, in any thread.

    It is a read transaction on its own connection. In WAL mode it sees nothing newer, and only the folding of the WAL
    into the file waits for it. So a checkpoint that fails has to close it.
    """

    def __init__(
        self,
        path: Path,
        number: int,
        base: Base | None,
        rewritten: Mapping[tuple[str, int], int],
    ) -> None:
        self._path, self._number, self._base = path, number, base
        self._again: dict[str, list[int]] = {}
        """Table -> rows of the base that have changed since."""
        if base is not None:
            for (table, row), last in rewritten.items():
                if last > base.number and row <= base.rows[table]:
                    self._again.setdefault(table, []).append(row)
        self._part = path.with_name(f".{path.name}.part")
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        attach_new(self._db, self._part)  # impossible in a transaction
        self._db.execute("BEGIN")
        self._db.execute("SELECT COUNT(*) FROM main.sqlite_master").fetchone()  # the transaction begins with a read

    def write(self, checkpoint: Path) -> None:
        """Write the ledger to the directory of a new checkpoint.

        What the ledger has until now is on the disk then: a loss of power leaves no checkpoint ahead of its ledger.
        """
        with self:
            ledger_file.sync_file(self._path.with_name(f"{self._path.name}-wal"))
            write_segments(self._db, self._part, checkpoint, self._number, self._base, self._again)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._db.close()
        self._part.unlink(missing_ok=True)
