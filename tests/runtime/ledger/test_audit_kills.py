"""A run that is killed before or after any write leaves records that audit well, and so does what goes on from them.

A kill leaves the files as they are at that moment: a copy of the directory, made where the kill would come.
"""

from __future__ import annotations

import functools
import shutil
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.runs import stages
from flowrl.errors import ConfigError
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.checkpoints import checkpoint, resume
from flowrl.runtime.driver.driver import Driver
from flowrl.runtime.ledger import chain, ledger, ledger_file
from flowrl.runtime.telemetry import metrics
from flowrl.testing import GraphRun, run_graph
from tests.rigs.in_process import seeing_the_driver
from tests.rigs.ticks import ticks

STAGES = Path(stages.__file__)
FAST = {"generate_s": 0.0, "train_s": 0.0, "groups_per_step": 2, "group_size": 2}
LATE = 400
"""Ticks of the event loop by which the hosts' reports, and so the lines, come late."""


class Kills:
    """Copies of a run's directory, named by the writes that they stand before or after."""

    def __init__(self, directory: Path, copies: Path) -> None:
        self.directory = directory
        self.copies = copies
        self.made: list[tuple[str, Path]] = []
        self._alone = threading.RLock()
        """Threads publish checkpoints and rewind: with commits meanwhile a copy would be of no one moment."""

    def here(self, name: str) -> None:
        to = self.copies / f"{len(self.made):03d}"
        shutil.copytree(self.directory, to, ignore=shutil.ignore_patterns(".step_*"))  # no checkpoint yet
        self.made.append((f"{len(self.made)}: {name}", to))

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._alone:
                self.here(f"before {name}")
                result = function(*args, **kwargs)
                self.here(f"after {name}")
            return result

        return wrapped

    def between(self, pieces: Callable[..., Generator[None, None, Any]], name: str) -> Callable[..., Any]:
        """Of what is written in pieces, between these too."""

        @functools.wraps(pieces)
        def wrapped(*args: Any, **kwargs: Any) -> Generator[None, None, Any]:
            with self._alone:
                self.here(f"before {name}")
                work = pieces(*args, **kwargs)
                while True:
                    try:
                        next(work)
                    except StopIteration as end:
                        result = end.value
                        break
                    self.here(f"within {name}")
                    yield
                self.here(f"after {name}")
            return result

        return wrapped

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Before and after everything that a run writes to its records."""
        with ExitStack() as stack:
            for owner, attribute in (
                (metrics.Metrics, "write_line"),
                (checkpoint, "publish_checkpoint"),
                (checkpoint, "prune_checkpoints"),
                (ledger_file, "create_ledger"),
                (ledger_file, "_begin_incarnation"),
                (ledger_file, "_replace_ledger"),
                (resume, "rewind_metrics"),
            ):
                name = f"{owner.__name__.rpartition('.')[2]}.{attribute}"
                wrapped = self.around(getattr(owner, attribute), name)
                stack.enter_context(mock.patch.object(owner, attribute, wrapped))
            for owner, attribute in ((ledger.Ledger, "write_in_pieces"), (chain.Chain, "extend_in_pieces")):
                name = f"{owner.__name__}.{attribute}"
                stack.enter_context(mock.patch.object(owner, attribute, self.between(getattr(owner, attribute), name)))
            yield


def late_lines(driver: Driver) -> None:
    """Steps are booked while the lines of earlier ones still wait."""
    ask_all = driver.orders.ask_all

    async def late(kind: str, *args: Any) -> list[Any]:
        await ticks(LATE if kind == "report" else 0)
        return await ask_all(kind, *args)

    driver.orders.ask_all = late  # type: ignore[method-assign]


def go(directory: Path, **options: Any) -> GraphRun:
    with seeing_the_driver(late_lines):
        return run_graph(STAGES, directory, FAST, save_every=2, **options)


def alarms(kills: Kills) -> list[str]:
    """Where the audit of a killed run finds something that is wrong, or nothing to look at."""
    found = []
    for name, copy in kills.made:
        try:
            report = audit(copy)
        except ConfigError as error:
            found.append(f"{name}: {error}")
        else:
            found += [f"{name}: {violation}" for violation in report.violations]
    return found


def test_a_run_may_be_killed_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(chain, "ROWS_AT_ONCE", 3)
    kills = Kills(tmp_path / "run", tmp_path)
    with kills.everywhere():
        go(tmp_path / "run", steps=5)
    before_the_ledger = [name for name, copy in kills.made if not (copy / "ledger.sqlite").exists()]
    assert [name.partition(": ")[2] for name in before_the_ledger] == [
        "before ledger_file.create_ledger",
        "before ledger_file._begin_incarnation",
        "before Chain.extend_in_pieces",
        "after Chain.extend_in_pieces",
        "after ledger_file._begin_incarnation",
    ]
    told = alarms(kills)
    assert len(told) == len(before_the_ledger), told
    assert all("ended before it could admit anything; start it again" in text for text in told)
    assert len(kills.made) > 100 and any("within Ledger.write_in_pieces" in name for name, _ in kills.made)
    assert audit(tmp_path / "run").ok
    waiting = [
        audit(copy).figures["steps"] - len(metrics.read_lines(copy / "metrics.jsonl")) for _, copy in kills.made[5:]
    ]
    assert max(waiting) >= 2, "no kill met lines that waited"


def test_a_checkpoint_comes_after_the_lines_of_its_steps(tmp_path: Path) -> None:
    """Nobody would write them: a run that goes on from it begins with the next step."""
    go(tmp_path / "run", steps=5)
    for step in (4, 5):
        ledger_file.restore_ledger(tmp_path / "run" / "checkpoints" / f"step_{step:06d}", tmp_path / f"{step}.sqlite")
        with closing(sqlite3.connect(tmp_path / f"{step}.sqlite")) as db:
            lines = db.execute("SELECT step, line IS NOT NULL FROM steps ORDER BY step").fetchall()
        assert lines == [(number, True) for number in range(1, step + 1)]


def test_a_resume_may_be_killed_at_any_write(tmp_path: Path) -> None:
    """Out of a run that was killed beyond its newest checkpoint: what is undone was booked, and had its lines."""
    first = Kills(tmp_path / "run", tmp_path / "first")
    with first.everywhere():
        go(tmp_path / "run", steps=4)
    killed = [copy for name, copy in first.made if name.endswith("after Metrics.write_line")][2]  # of step 3
    kills = Kills(killed, tmp_path / "second")
    with kills.everywhere():
        go(killed, steps=6, resume=True)
    assert [name for name, _ in kills.made if "rewind" in name or "_replace" in name] != []
    assert alarms(kills) == []
    assert audit(killed).ok


@pytest.mark.parametrize("nth", [0.3, 0.5, 0.7, 0.9])
def test_what_goes_on_after_a_kill_audits_well(tmp_path: Path, nth: float) -> None:
    kills = Kills(tmp_path / "run", tmp_path)
    with kills.everywhere():
        go(tmp_path / "run", steps=6)
    resumable = [copy for _, copy in kills.made if any(copy.glob("checkpoints/step_*"))]
    copy = resumable[int(nth * len(resumable))]
    assert go(copy, steps=8, resume=True).steps[-1] == 8
    report = audit(copy)
    assert report.ok, str(report)
    assert report.figures["steps"] == 8
