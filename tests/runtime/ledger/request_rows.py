"""What tests read in a ledger about requests and episodes."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from flowrl.messages import Scored
from flowrl.runtime.audit.audit import audit
from tests.runtime.ledger.small_run import SmallRun

REQUESTS = "SELECT request_id, attempt, turn, tokens, abandoned FROM requests ORDER BY number"
TOKENS = "SELECT prompt_tokens, response_tokens, redone_tokens FROM samples WHERE sample_id = 'g0/0'"
EPISODES = "SELECT sample_id, environment, attempts, turns, truncated, cause, seconds, incarnation FROM episodes"
ATTEMPTS = "SELECT sample_id, attempt, cause, incarnation FROM attempts"


def rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        return db.execute(query).fetchall()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def commit(small: SmallRun) -> None:
    small.client.flush()
    small.accounting.bookings.commit_all()


def trained(small: SmallRun, members: Sequence[Scored]) -> None:
    """Train the members, close the books, and find them right."""
    small.step(members)
    small.close()
    report = audit(small.directory)
    assert report.ok, str(report)
    assert report.figures["policy spans proven"] == report.figures["policy spans"]
