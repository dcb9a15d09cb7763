"""The ledger in checkpoints: each has the whole ledger, whatever becomes of the others, and writes what is new."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.runs.ledger import GROUPS, MEMBERS, TERMS, admit, generate, train
from flowrl.errors import ConfigError
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.checkpoints import checkpoint
from flowrl.runtime.ledger import ledger_file, ledger_segments
from flowrl.runtime.ledger.ledger import ALL_TABLES, Ledger
from flowrl.runtime.ledger.ledger_segments import any_in_flight, has_commit, last_commit_s, segments_of

Rows = dict[str, list[Any]]


def rows_of(path: Path) -> Rows:
    with closing(sqlite3.connect(path)) as db:
        rows = {table: db.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid").fetchall() for table in ALL_TABLES}
    return rows | {"contents": [row[1:] for row in rows["contents"]]}


@dataclass
class Life:
    """A run's ledger, with checkpoints now and then."""

    directory: Path
    rng: random.Random
    written: dict[int, Rows] = field(default_factory=dict)
    """Step -> the rows at its checkpoint."""
    groups: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        (self.directory / "checkpoints").mkdir(parents=True)
        self.ledger = Ledger(self.directory / "ledger.sqlite", TERMS)

    def at(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"step_{step:06d}"

    def work(self) -> None:
        """A step, with later groups in flight, and late reports about samples of long ago."""
        while self.groups < (self.step + 2) * GROUPS:
            admit(self.ledger, self.groups, 0)
            self.groups += 1
            if self.rng.random() < 0.5:
                generate(self.ledger, self.groups - 1, 0)
        self.step += 1
        train(self.ledger, self.step, 0)
        late = f"group{self.rng.randrange(self.groups):08d}/{self.rng.randrange(MEMBERS)}"
        self.ledger.add_row("redone", 7, late)
        self.ledger.add_row("evaluated", "during", self.step, "q", 0, 1.0, 1, 3, self.step, self.step, "t", 0.5)
        self.ledger.commit_rows()

    def checkpoint(self, *, fails: bool = False) -> None:
        temporary = self.at(self.step).with_name(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        with self.ledger.as_of_now() as snapshot:
            rows, head = rows_of(self.ledger.path), self.ledger.head
            snapshot.write(temporary)
        if not fails:
            checkpoint.publish_checkpoint(temporary, self.at(self.step), {"ledger_head": head}, threading.Event())
            self.ledger.note_published(self.at(self.step))
            self.written[self.step] = rows

    def resume(self) -> None:
        """From the newest checkpoint, after a kill."""
        self.ledger._db.close()
        self.step = max(self.written)
        ledger_file.restore_ledger(self.at(self.step), self.ledger.path, TERMS)
        self.ledger = Ledger(self.ledger.path, restored_from=self.at(self.step))
        self.groups = len(rows_of(self.ledger.path)["tickets"])

    def forget(self, step: int) -> None:
        shutil.rmtree(self.at(step))
        del self.written[step]

    def restored(self, step: int) -> Rows:
        """The rows that the checkpoint alone has, on another machine."""
        alone = self.directory / "alone" / "checkpoints" / "step_000000"
        shutil.rmtree(alone.parent, ignore_errors=True)
        shutil.copytree(self.at(step), alone)
        checkpoint.verify_files(alone)
        fresh = alone.with_name("ledger.sqlite")
        ledger_segments.rebuild_ledger(alone, fresh, f"{ledger_file.SCHEMA}{ledger_file.chain.SCHEMA}")
        return rows_of(fresh)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path / "run", random.Random(0))
    yield life
    life.ledger.close()


@pytest.mark.parametrize("seed", range(6))
def test_each_checkpoint_alone_has_the_whole_ledger(tmp_path: Path, seed: int) -> None:
    """Through failed checkpoints, resumes, removed checkpoints, and file systems with and without links."""
    rng = random.Random(seed)
    life = Life(tmp_path / "run", rng)
    denied = mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, "no links here"))
    with mock.patch.object(ledger_segments, "MOST_BYTES", rng.choice([1 << 17, 1 << 20, 64 << 20])):
        for _ in range(30):
            for _ in range(rng.randrange(3)):
                life.work()
            if not life.step:
                continue
            if rng.random() < 0.2:
                with denied:
                    life.checkpoint()
            else:
                life.checkpoint(fails=bool(life.written) and rng.random() < 0.2)
            for step in rng.sample(sorted(life.written), rng.randrange(len(life.written) + 1)):
                assert life.restored(step) == life.written[step], (seed, step)
                if len(life.written) > 1 and rng.random() < 0.5:
                    life.forget(step)
            if rng.random() < 0.2:
                life.resume()
    for step, rows in life.written.items():
        assert life.restored(step) == rows
    life.resume()
    assert [v for v in audit(life.directory).violations if v.kind == "chain"] == []
    life.ledger.close()


def test_a_checkpoint_writes_what_is_new_in_a_bounded_number_of_files(tmp_path: Path) -> None:
    """Each row is written some log2(50) times instead of 50 times, and files stay few."""
    life, written, copied, most = Life(tmp_path / "run", random.Random(1)), 0, 0, 0
    for _ in range(50):
        for _ in range(5):
            life.work()
        life.checkpoint()
        found = segments_of(life.at(life.step))
        written += sum(path.stat().st_size for path in found if path.stat().st_nlink == 1)
        copied += sum(path.stat().st_size for path in found)
        most = max(most, len(found))
    assert most <= 6 and 4 * written < copied, (most, written, copied)
    life.ledger.close()


def test_segments_of_other_checkpoints_are_linked_and_not_summed_again(life: Life) -> None:
    for _ in range(40):
        life.work()
    life.checkpoint()
    life.work()
    with mock.patch.object(checkpoint, "_sum_piece", wraps=checkpoint._sum_piece) as summed:
        life.checkpoint()
    before, now = segments_of(life.at(40)), segments_of(life.at(41))
    assert os.path.samefile(before[0], now[0]) and len(now) == 2
    assert [call.args[0].name for call in summed.call_args_list] == [now[1].name]
    entries = [checkpoint.read_manifest(life.at(step))["files"][f"ledger/{now[0].name}"] for step in (40, 41)]
    assert entries[0] == entries[1]


def test_trainers_do_not_wait_for_old_rows(life: Life) -> None:
    """A checkpoint after one more step takes a small part of the time of the first."""
    for _ in range(150):
        life.work()
    first_s, began_s = 0.0, time.process_time()
    life.checkpoint()
    first_s, began_s = time.process_time() - began_s, time.process_time()
    life.work()
    new = Path(life.directory / "new")
    new.mkdir()
    with life.ledger.as_of_now() as snapshot:
        began_s = time.process_time()
        snapshot.write(new)
    assert time.process_time() - began_s < first_s


def test_the_facts_of_a_checkpoint_are_read_from_its_segments(life: Life) -> None:
    life.work()
    life.checkpoint()
    head = life.ledger.head
    life.work()
    life.checkpoint()
    first, second = life.at(1), life.at(2)
    assert has_commit(first, head) and has_commit(second, head)
    assert has_commit(second, life.ledger.head) and not has_commit(first, life.ledger.head)
    assert any_in_flight(first) and last_commit_s(first) < last_commit_s(second)
    assert ledger_segments.phases_evaluated(second, 1) == {"during"} == ledger_segments.phases_evaluated(second, 2)
    assert ledger_segments.phases_evaluated(first, 2) == set()


def test_a_segment_that_is_missing_or_damaged_is_named(life: Life) -> None:
    for _ in range(40):
        life.work()
    life.checkpoint()
    life.work()
    life.checkpoint()
    oldest, newest = segments_of(life.at(41))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.unlink()
    newest.write_bytes(data)
    with pytest.raises(ConfigError, match=f"ledger/{newest.name} has changed since it was written"):
        checkpoint.verify_files(life.at(41))
    oldest.unlink()
    with pytest.raises(ConfigError, match="step_000041 has no segment of its ledger with commit 0"):
        ledger_file.restore_ledger(life.at(41), life.directory / "other.sqlite", TERMS)
    checkpoint.verify_files(life.at(40))  # its files are its own names


def test_a_checkpoint_of_an_earlier_flowrl_has_the_whole_ledger_in_one_file(life: Life) -> None:
    life.work()
    life.ledger.commit_rows()
    old = life.at(1)
    old.mkdir()
    with (
        closing(sqlite3.connect(life.ledger.path)) as source,
        closing(sqlite3.connect(old / "ledger.sqlite")) as target,
    ):
        source.backup(target)
    rows = rows_of(life.ledger.path)
    assert any_in_flight(old) and has_commit(old, life.ledger.head) and last_commit_s(old) > 0
    life.written[1] = rows
    life.resume()
    life.work()
    life.checkpoint()
    assert life.restored(life.step) == life.written[life.step]


def test_a_lost_ledger_is_built_from_the_checkpoint(life: Life) -> None:
    life.work()
    life.checkpoint()
    life.work()
    for file in life.directory.glob("ledger.sqlite*"):
        file.unlink()
    life.resume()
    now, then = rows_of(life.ledger.path), life.written[1]
    assert now["samples"] == then["samples"] and now["uses"] == then["uses"]
    assert len(now["incarnations"]) == 2
