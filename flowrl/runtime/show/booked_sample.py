"""What the ledger says about one sample, and about the states of many."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.runtime.ledger.ledger_file import DAMAGE, LEDGER, open_to_read, unreadable

AT_ONCE = 500
"""Number of samples in one query."""


@dataclass(frozen=True)
class BookedSample:
    """Rows of the ledger, by their columns. `episode` is None for a sample that is no episode, or has not ended."""

    sample: Mapping[str, Any]
    episode: Mapping[str, Any] | None
    void: Sequence[Mapping[str, Any]]
    """Attempts that failed or were given up."""

    @property
    def state(self) -> str:
        """The state and its reason, for example "failed: env_raised"."""
        return state_text(self.sample["state"], self.sample["reason"])


def booked_sample(run_dir: Path, sample_id: str) -> BookedSample | None:
    """What is booked for a sample; None if the run has none with that id. Raises ConfigError without a ledger."""
    with _reading(run_dir) as db:
        row = _one(db, "SELECT * FROM samples WHERE sample_id = ?", sample_id)
        if row is None:
            return None
        episode = _one(db, "SELECT * FROM episodes WHERE sample_id = ?", sample_id)
        void = db.execute("SELECT * FROM attempts WHERE sample_id = ? ORDER BY rowid", (sample_id,)).fetchall()
    return BookedSample(row, episode, [dict(found) for found in void])


def booked_states(run_dir: Path, sample_ids: Sequence[str]) -> dict[str, str]:
    """Sample -> its state with the reason, for those that the ledger has. Raises ConfigError without a ledger."""
    found: dict[str, str] = {}
    with _reading(run_dir) as db:
        for start in range(0, len(sample_ids), AT_ONCE):
            part = sample_ids[start : start + AT_ONCE]
            marks = ", ".join("?" * len(part))
            rows = db.execute(f"SELECT sample_id, state, reason FROM samples WHERE sample_id IN ({marks})", part)
            found |= {row["sample_id"]: state_text(row["state"], row["reason"]) for row in rows}
    return found


def state_text(state: str, reason: str | None) -> str:
    """The state, with its reason if it has one."""
    return state if reason is None else f"{state}: {reason}"


def _one(db: sqlite3.Connection, query: str, sample_id: str) -> Mapping[str, Any] | None:
    row = db.execute(query, (sample_id,)).fetchone()
    return None if row is None else dict(row)


@contextmanager
def _reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a run's ledger whose rows have names; what SQLite cannot read becomes a ConfigError."""
    path = run_dir / LEDGER
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {LEDGER}; name the directory of a run that has begun")
    with closing(open_to_read(path)) as db:
        db.row_factory = sqlite3.Row
        try:
            yield db
        except DAMAGE as problem:
            raise ConfigError(unreadable(path, problem)) from None
