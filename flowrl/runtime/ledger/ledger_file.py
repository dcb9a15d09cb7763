"""The ledger file: its tables, and how it is created, opened and rewound.

WAL mode with synchronous=NORMAL: committed data survives the death of any process, and a reader (`flowrl audit`,
the sqlite3 shell) never blocks the run.

A file with this name is complete at any time. A new or rewound ledger is written to another file next to it, with its
first commit, which starts an incarnation. Then that file replaces the old one in one step.

All `*_s` columns are seconds since the Unix epoch.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.runtime.ledger import chain, ledger_segments
from flowrl.runtime.ledger.chain import Chain

LISTS = ("trainers", "own_clock", "holders")
NUMBERS = ("max_staleness", "tickets", "window", "groups_per_batch", "group_size", "max_uses", "max_reused_age")
COLUMNS = (*LISTS, *NUMBERS, "derives")


@dataclass(frozen=True)
class Terms:
    """The numbers of its graph that the ledger stores for the audit, once per incarnation.

    None means that the graph does not declare the number: nothing is required. A resume may change some of them, so the
    bound for a step is that of the incarnation that trained it.
    """

    trainers: tuple[str, ...] | None = None
    """Names of the trainer nodes, the main one first."""
    own_clock: tuple[str, ...] | None = None
    """Trainers for which the age of tokens is counted in their own versions."""
    holders: tuple[str, ...] | None = None
    """Nodes that hold weights. Tokens of other nodes are data and have no version."""
    max_staleness: int | None = None
    tickets: int | None = None
    window: int | None = None
    """0: tokens beyond the bound are masked out of the loss."""
    groups_per_batch: int | None = None
    group_size: int | None = None
    max_uses: int | None = None
    """None: no sample is trained twice."""
    max_reused_age: int | None = None
    derives: Mapping[str, int] | None = None
    """Label -> the most samples that are derived under it from one."""

    @classmethod
    def of(cls, graph: Mapping[str, Any]) -> Terms:
        """The terms from the content of graph.json."""
        latest = [edge for edge in graph.get("edges", ()) if edge["kind"] == "latest"]
        holders = sorted({edge["into"].partition(".")[0] for edge in latest}) if "edges" in graph else None
        lists = {"trainers": graph.get("trainers"), "own_clock": graph.get("own_clock"), "holders": holders}
        nodes: dict[str, Any] = {name: None if found is None else tuple(found) for name, found in lists.items()}
        return cls(**nodes, **{name: graph.get(name) for name in (*NUMBERS, "derives")})

    @classmethod
    def read(cls, run_dir: Path) -> Terms:
        """The terms of the run in `run_dir`; all None if it has no graph.json."""
        path = run_dir / "graph.json"
        return cls.of(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else cls()

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> Terms:
        """The terms from the columns COLUMNS of the table `incarnations`. Raises ValueError for malformed JSON."""
        columns: list[Any] = []
        for text in row[: len(LISTS)]:
            names = None if text is None else json.loads(text)
            if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
                raise ValueError(f"{text} is no list of names")
            columns.append(None if names is None else tuple(names))
        *numbers, text = row[len(LISTS) :]
        derives = None if text is None else json.loads(text)
        if not isinstance(derives, dict | None):
            raise ValueError(f"{text} does not map labels to numbers")
        return cls(*[*columns, *numbers, derives])

    def row(self) -> tuple[Any, ...]:
        """The values of the columns COLUMNS of the table `incarnations`."""
        lists = (getattr(self, name) for name in LISTS)
        numbers = (getattr(self, name) for name in NUMBERS)
        derives = None if self.derives is None else json.dumps(dict(self.derives))
        return (*(None if nodes is None else json.dumps(nodes) for nodes in lists), *numbers, derives)


LEDGER = "ledger.sqlite"
FORMAT = 4
"""The file's `user_version`; files with 0 have no chain."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS incarnations (
    number INTEGER PRIMARY KEY,         -- from 0; those that a resume has undone are not counted
    started_s REAL NOT NULL,
    ended_s REAL,                       -- in order; NULL while it goes on, and after a failure
    first_commit INTEGER NOT NULL,      -- the one that began it
    first_ticket INTEGER NOT NULL,      -- the first that it takes
    trainers TEXT,                      -- JSON list of node names, the main trainer first
    own_clock TEXT,                     -- JSON list of the trainers that count age in their own versions
    holders TEXT,                       -- JSON list of the nodes that hold weights
    max_staleness INTEGER,
    tickets INTEGER,
    window INTEGER,                     -- 0: stale tokens are masked
    groups_per_batch INTEGER,
    group_size INTEGER,
    max_uses INTEGER,                   -- of a sample by a trainer; NULL: 1
    max_reused_age INTEGER,             -- of a token that is trained again
    derives TEXT                        -- JSON, label: the most samples derived under it from one
);
CREATE TABLE IF NOT EXISTS steps (
    trainer TEXT NOT NULL,
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,       -- that finished it
    finished_s REAL NOT NULL,
    line TEXT,                          -- hash of its line in metrics.jsonl, once written
    PRIMARY KEY (trainer, step)
);
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
CREATE TABLE IF NOT EXISTS derived (    -- the samples that were not admitted, but made from another
    sample_id TEXT PRIMARY KEY,         -- parent_id/label.ordinal
    parent_id TEXT NOT NULL,
    label TEXT NOT NULL,
    ordinal INTEGER NOT NULL            -- from 0, among those of this parent and label
);
CREATE INDEX IF NOT EXISTS derived_by_parent ON derived (parent_id);
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
CREATE TABLE IF NOT EXISTS reuses (     -- of samples in `uses`, by the same trainer at later steps
    sample_id TEXT NOT NULL,
    trainer TEXT NOT NULL,
    version INTEGER NOT NULL,
    step INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- how often the trainer had used it before: from 1
    tokens INTEGER NOT NULL,            -- in the loss again; not in the sample's trained_tokens
    masked_tokens INTEGER NOT NULL,
    oldest_version INTEGER
);
CREATE INDEX IF NOT EXISTS reuses_by_sample ON reuses (sample_id);
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY,         -- from 0, in the order of their reports
    request_id TEXT NOT NULL,           -- of its turn; the sample's id where nobody asked turn by turn
    sample_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,           -- from 0; after a resume on from the checkpoint's record, or from 0 again
    turn INTEGER NOT NULL,              -- from 0, in each attempt
    digest TEXT NOT NULL,               -- of context, sampled ids, logprobs and versions (token_digest)
    tokens INTEGER NOT NULL,            -- sampled
    context_tokens INTEGER NOT NULL,    -- before them
    cached_tokens INTEGER,              -- of the context, found in the prefix cache; NULL: unknown
    oldest_version INTEGER,             -- of the sampled tokens
    newest_version INTEGER,
    generator TEXT NOT NULL,
    finish_reason TEXT NOT NULL,        -- stop, length
    abandoned TEXT,                     -- why nobody uses it; its tokens are redone
    incarnation INTEGER NOT NULL,
    finished_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS requests_by_sample ON requests (sample_id);
CREATE TABLE IF NOT EXISTS spans (      -- runs of policy tokens in the rows that trainers were fed
    sample_id TEXT NOT NULL,
    trainer TEXT NOT NULL,
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,             -- number of tokens before it
    tokens INTEGER NOT NULL,            -- in the loss or not
    digest TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS spans_by_sample ON spans (sample_id);
CREATE TABLE IF NOT EXISTS attempts (   -- those of episodes that are void
    sample_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    cause TEXT NOT NULL,
    incarnation INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS attempts_by_sample ON attempts (sample_id);
CREATE TABLE IF NOT EXISTS episodes (
    sample_id TEXT PRIMARY KEY,
    environment TEXT NOT NULL,
    attempts INTEGER NOT NULL,          -- the last one included
    turns INTEGER NOT NULL,             -- of the last attempt
    truncated TEXT,                     -- what cut it off
    cause TEXT,                         -- why it failed
    seconds REAL NOT NULL,
    ended_s REAL NOT NULL,
    incarnation INTEGER NOT NULL
);
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
    held TEXT NOT NULL,                 -- JSON, trainer: version of its weights held everywhere at admission
    asks INTEGER NOT NULL,              -- how many groups may be admitted because of each of its samples
    asked_by TEXT                       -- the sample because of which it was admitted
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

TABLES = (
    *("incarnations", "steps", "samples", "uses", "reuses", "requests", "spans", "attempts", "episodes", "losses"),
    *("tickets", "evaluations", "derived"),
)
BEGIN_INCARNATION = (
    "INSERT INTO incarnations VALUES ((SELECT COUNT(*) FROM incarnations), ?, NULL,"
    " (SELECT COALESCE(MAX(number) + 1, 0) FROM commits), (SELECT COALESCE(MAX(ticket) + 1, 0) FROM tickets),"
    " ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def restore_ledger(checkpoint: Path, path: Path, terms: Terms | None = None) -> None:
    """Rewind the ledger at `path` to that of a checkpoint and start another incarnation; no process may be writing it.

    The ledger is built from the checkpoint alone; what is at `path` may be lost or damaged. The replacement is one
    step: until then the old ledger is unchanged. Raises ConfigError if the checkpoint has no ledger.
    """
    fresh = _clear_file_beside(path)
    try:
        if ledger_segments.segments_of(checkpoint):
            ledger_segments.rebuild_ledger(checkpoint, fresh, f"{SCHEMA}{chain.SCHEMA}")
        else:  # of an earlier flowrl
            with closing(open_to_read(checkpoint / LEDGER)) as source, closing(sqlite3.connect(fresh)) as target:
                source.backup(target)
    except (sqlite3.Error, UnicodeError) as error:
        raise ConfigError(describe_unreadable(checkpoint, error)) from None
    _begin_incarnation(fresh, terms or Terms())
    _replace_ledger(path, fresh)


def open_to_write(path: Path) -> sqlite3.Connection:
    """The connection of the only process that writes the ledger. Raises ConfigError if the file is no ledger."""
    db = _connect_writer(path)
    try:
        _require_format(db, path)
    except BaseException:  # no other code would close the connection
        db.close()
        raise
    return db


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing and leaves no files. Raises ConfigError if the file is no ledger."""
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, isolation_level=None)
    try:
        db.execute("PRAGMA query_only = ON")  # mode=ro would leave a WAL file behind
        _require_format(db, path)
    except BaseException:  # no other code would close the connection
        db.close()
        raise
    return db


def read_terms(db: sqlite3.Connection) -> Terms:
    """The terms of the newest incarnation."""
    query = f"SELECT {', '.join(COLUMNS)} FROM incarnations ORDER BY number DESC LIMIT 1"
    row = db.execute(query).fetchone()
    return Terms() if row is None else Terms.of_row(row)


NOT_OPENED = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
)
"""Primary codes of errors that say nothing about the file's content."""


DAMAGE = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""What a read of a damaged file raises: SQLite's errors, and those of a text or a size that it was given."""


def describe_unreadable(path: Path, error: BaseException) -> str:
    """The message about a file that SQLite cannot read."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_NOTADB:
        return f"{path} is no ledger of flowrl: {error}"
    if code is not None and code & 0xFF in NOT_OPENED:
        return (
            f"{path} cannot be opened ({error}); SQLite needs a directory that its reader may write to, so copy the "
            "run to one"
        )
    return (
        f"{path} is damaged ({' '.join(str(error).split()) or type(error).__name__}), so nothing can be proven; each "
        "checkpoint has its rows, and flowrl run --resume continues from the newest"
    )


def _require_format(db: sqlite3.Connection, path: Path) -> None:
    try:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except DAMAGE as error:
        raise ConfigError(describe_unreadable(path, error)) from None
    if found != FORMAT and "samples" in there:
        raise ConfigError(
            f"{path} is a ledger of format {found}, and this flowrl reads format {FORMAT}; audit and resume that run "
            "with the flowrl that wrote it"
        )
    if missing := sorted({*TABLES, *chain.TABLES} - there):
        raise ConfigError(f"{path} is no ledger of flowrl: it has no table {', '.join(missing)}")


def create_ledger(path: Path, terms: Terms) -> None:
    """Create a ledger with its first commit. No file may exist at `path`."""
    fresh = _clear_file_beside(path)
    _begin_incarnation(fresh, terms)
    for file in _list_side_files(path):  # of a ledger that was deleted: SQLite would replay them into the new one
        file.unlink(missing_ok=True)
    fresh.rename(path)


def _clear_file_beside(path: Path) -> Path:
    """The file in which a ledger is written before it replaces `path`. Removes what a killed run left there."""
    fresh = path.with_name(f".{path.name}.new")
    for file in (fresh, *_list_side_files(fresh)):
        file.unlink(missing_ok=True)
    return fresh


def _list_side_files(path: Path) -> tuple[Path, ...]:
    """The files that SQLite keeps next to an open file in WAL mode."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")


def _connect_writer(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def _begin_incarnation(path: Path, terms: Terms) -> None:
    """Write the first commit of an incarnation, in a new ledger or in one from a checkpoint."""
    with closing(_connect_writer(path)) as db, db:
        db.execute("BEGIN")
        for statement in (SCHEMA + chain.SCHEMA).split(";\n"):
            db.execute(statement)
        links, now = Chain(db, TABLES), time.time()
        db.execute(BEGIN_INCARNATION, (now, *terms.row()))
        links.extend_chain(now)
        db.execute(f"PRAGMA user_version = {FORMAT}")


def _replace_ledger(path: Path, fresh: Path) -> None:
    """Replace `path` by `fresh`, durably: at any time one of the two is at `path`.

    The WAL that a killed run has left would be taken for that of the new file, so it is first folded into the old one.
    If that is not a readable database, its WAL is removed. While another program reads the old ledger, its WAL stays,
    and SQLite overwrites the old ledger in one transaction.
    """
    sync_file(fresh)
    if path.exists():
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as old:
                if old.execute("PRAGMA journal_mode = DELETE").fetchone()[0] != "delete":
                    raise sqlite3.OperationalError
        except sqlite3.OperationalError:
            with closing(sqlite3.connect(fresh)) as source, closing(sqlite3.connect(path)) as target:
                source.backup(target)
            fresh.unlink()
            return
        except sqlite3.DatabaseError:
            pass  # damaged beyond reading
    for file in _list_side_files(path):
        file.unlink(missing_ok=True)
    fresh.replace(path)
    sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Returns when the file, or a directory's list of files, is on the disk; at once if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
