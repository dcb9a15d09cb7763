"""The ledger file: what became of every admitted sample and of every policy token.

Storage only; `Books` decides. Rows are buffered and written in one transaction by `commit`. WAL mode
with synchronous=NORMAL: what is committed survives the death of any process, and a reader (`flowrl
audit`, the sqlite3 shell) never blocks the run.

All `*_s` columns are seconds since the Unix epoch.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import FlowrlError

SCHEMA = """
CREATE TABLE IF NOT EXISTS samples (
    sample_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL,
    prompt_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    member INTEGER NOT NULL,
    state TEXT NOT NULL,                -- in_flight, trained, filtered, failed, dropped
    reason TEXT,                        -- why it was filtered, failed or dropped
    prompt_tokens INTEGER NOT NULL,
    response_tokens INTEGER NOT NULL,   -- policy tokens
    trained_tokens INTEGER NOT NULL,
    stale_tokens INTEGER NOT NULL,      -- masked out of the loss for their age
    redone_tokens INTEGER NOT NULL,     -- generated again after a crash, not in response_tokens
    reward REAL,
    born_version INTEGER NOT NULL,      -- smallest version held by any generator at admission
    oldest_version INTEGER,             -- of its policy tokens
    newest_version INTEGER,
    oldest_trained_version INTEGER,
    trained_version INTEGER,            -- the version being updated: step - 1
    step INTEGER,
    generator TEXT,
    admitted_s REAL NOT NULL,
    generated_s REAL,
    scored_s REAL,
    trained_s REAL,
    masked_tokens INTEGER NOT NULL      -- kept out of the loss by a node's loss_mask
);
CREATE INDEX IF NOT EXISTS samples_by_group ON samples (group_id);
CREATE TABLE IF NOT EXISTS uses (
    sample_id TEXT NOT NULL,
    trainer TEXT NOT NULL,
    version INTEGER NOT NULL,
    step INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    stale_tokens INTEGER NOT NULL,
    masked_tokens INTEGER NOT NULL,
    oldest_version INTEGER              -- what its age is counted from, in versions of the trainer
);
CREATE INDEX IF NOT EXISTS uses_by_sample ON uses (sample_id);
CREATE TABLE IF NOT EXISTS losses (     -- of graphs with several trainers: who will not use it
    sample_id TEXT NOT NULL,
    trainer TEXT NOT NULL,
    state TEXT NOT NULL,                -- filtered, failed, dropped
    reason TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS losses_by_sample ON losses (sample_id);
CREATE TABLE IF NOT EXISTS tickets (
    ticket INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,                -- open, trained, dropped
    step INTEGER,
    held TEXT NOT NULL                  -- JSON, trainer: version of its weights held everywhere at admission
);
CREATE TABLE IF NOT EXISTS evaluations (
    phase TEXT NOT NULL,                -- before, during, after
    step INTEGER NOT NULL,
    prompt_id TEXT NOT NULL,
    member INTEGER NOT NULL,
    score REAL NOT NULL,
    correct INTEGER NOT NULL,
    response_tokens INTEGER NOT NULL,
    oldest_version INTEGER,             -- of its tokens
    newest_version INTEGER,
    task TEXT NOT NULL,
    evaluated_s REAL NOT NULL
);
"""


@dataclass(frozen=True)
class Fate:
    """What became of a sample at one trainer."""

    step: int | None = None
    """The version that its batch made; None: it came into no batch."""
    tokens: int = 0
    stale_tokens: int = 0
    masked_tokens: int = 0
    oldest_version: int | None = None
    state: str = "trained"
    """trained, or why nothing of it entered the loss: filtered, failed, dropped."""
    reason: str | None = None

    @property
    def trained(self) -> bool:
        return self.state == "trained"


STATES = ("in_flight", "trained", "filtered", "failed", "dropped")

# A transaction runs these in this order, each one's rows in order of their events: a sample's later events never
# meet a missing row. That is not the order in which the events came, and need not be; of one row of `samples`
# - `partial` and `generated` both write response_tokens, but a finished rollout's stand in any order: `generated`
#   replaces what `partial` wrote, and `partial` leaves a generated row alone;
# - `generated` and `redone` both write redone_tokens, but only add to them;
# - `trained` and `unused` write state and tokens, but `Books` adds one of the two at most.
# The first `settled` of a ticket stands. No other two statements write the same column of a row.
# A second generation of one sample (a crash came between) counts as redone: the first one where the second replaces
# it, and the second ("redone") where a checkpoint kept the first.
STATEMENTS = {
    "ticket": "INSERT INTO tickets VALUES (?, ?, 'open', NULL, ?)",
    "admitted": "INSERT INTO samples VALUES (?, ?, ?, ?, ?, 'in_flight', NULL, ?, 0, 0, 0, 0, NULL, ?,"
    " NULL, NULL, NULL, NULL, NULL, NULL, ?, NULL, NULL, NULL, 0)",
    "partial": "UPDATE samples SET response_tokens = ? WHERE sample_id = ? AND generated_s IS NULL",
    "generated": "UPDATE samples SET"
    " redone_tokens = redone_tokens + (CASE WHEN generated_s IS NULL THEN 0 ELSE response_tokens END),"
    " generator = ?, response_tokens = ?, oldest_version = ?, newest_version = ?, generated_s = ?"
    " WHERE sample_id = ?",
    "redone": "UPDATE samples SET redone_tokens = redone_tokens + ? WHERE sample_id = ?",
    "scored": "UPDATE samples SET reward = ?, scored_s = ? WHERE sample_id = ?",
    "trained": "UPDATE samples SET state = 'trained', trained_tokens = ?, stale_tokens = ?, masked_tokens = ?,"
    " oldest_trained_version = ?, trained_version = ?, step = ?, trained_s = ? WHERE sample_id = ?",
    "unused": "UPDATE samples SET state = ?, reason = ?, stale_tokens = ?, masked_tokens = ? WHERE sample_id = ?",
    "used": "INSERT INTO uses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "left_out": "INSERT INTO losses VALUES (?, ?, ?, ?)",
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
    """Buffered writes to one ledger file, and the few reads that the books need."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(SCHEMA)
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in STATEMENTS}

    def add(self, statement: str, *row: Any) -> None:
        """Buffer one row for the statement of that name."""
        self._rows[statement].append(row)

    @property
    def dirty(self) -> bool:
        """Something is buffered."""
        return any(self._rows.values())

    def commit(self) -> None:
        """Write all that is buffered, in one transaction.

        Raises FlowrlError where that fails; then nothing of it is written, and everything is still buffered.
        """
        try:
            with self._db:  # ends in COMMIT, or in ROLLBACK
                self._db.execute("BEGIN")
                for name, rows in self._rows.items():
                    self._db.executemany(STATEMENTS[name], rows)
        except (sqlite3.Error, OverflowError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the primary one
            mend = "make room there" if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) else "mend that"
            raise FlowrlError(
                f"the ledger {self.path} cannot be written ({error}); the run cannot go on unbooked, {mend} and go on "
                "with --resume"
            ) from error
        for rows in self._rows.values():
            rows.clear()

    def group_of(self, sample_id: str) -> str | None:
        """The group of a committed sample, None if there is no such sample."""
        row = self._db.execute("SELECT group_id FROM samples WHERE sample_id = ?", (sample_id,)).fetchone()
        return None if row is None else str(row[0])

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

    def fates(self) -> list[tuple[str, str, str, Fate]]:
        """(group_id, sample_id, trainer, fate): what is known of the groups with a sample in flight."""
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

    def next_ticket(self) -> int:
        """The number after the last ticket taken."""
        return int(self._db.execute("SELECT COALESCE(MAX(ticket) + 1, 0) FROM tickets").fetchone()[0])

    def counts(self) -> dict[str, int]:
        """Samples by state; states without samples are absent."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state"))

    def frozen(self) -> Frozen:
        """Commit; the ledger as it is then."""
        self.commit()
        return Frozen(self.path)

    def close(self) -> None:
        """Commit, fold the WAL into the file, and close it."""
        self.commit()
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()


class Frozen:
    """A ledger as it is committed now, however the run writes on; for `copy`, once, in any thread.

    That is a reader's transaction on a connection of its own: WAL mode lets it see nothing newer, and holds nobody up.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("BEGIN")
        self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # it begins with the first read

    def copy(self, path: Path) -> None:
        """Write all of it to a new file at `path`."""
        with closing(self._db), closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)


def restore(backup: Path, path: Path) -> None:
    """Rewind the ledger at `path` to `backup`. No process may have it open.

    A WAL left by a killed run belongs to the file that is replaced, so it goes too.
    """
    source = sqlite3.connect(backup)
    fresh: Sequence[Path] = [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]
    for file in fresh:
        file.unlink(missing_ok=True)
    target = sqlite3.connect(path)
    source.backup(target)
    target.close()
    source.close()
