"""A ledger of millions of samples, made up: what a checkpoint, a resume and an audit of it take.

The rows are those of `benchmarks.runs.ledger`, inserted by SQL, and end in one commit; so a million samples take a
minute, and ten million (`--samples 10000000`) 12 GB of disk. A checkpoint is the ledger's part of it: what trainers
wait for.
"""

from __future__ import annotations

import json
import resource
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import tyro

from benchmarks.runs.ledger import GROUPS, MEMBERS, TERMS, admit, generate, train
from flowrl.runtime.audit.audit import continue_audit
from flowrl.runtime.checkpoints import checkpoint
from flowrl.runtime.ledger import chain, ledger_file
from flowrl.runtime.ledger.chain import Commit, Sum
from flowrl.runtime.ledger.ledger import Ledger
from flowrl.runtime.ledger.ledger_segments import segments_of
from flowrl.runtime.telemetry.metrics import line_hash

PER_STEP = MEMBERS * GROUPS
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT {} UNION ALL SELECT i + 1 FROM n WHERE i < {} - 1) "
GROUP, VERSION, TOKENS = f"printf('group%08d', i / {MEMBERS})", f"max(i / {PER_STEP} - 1, 0)", f"100 + i % {MEMBERS}"
SAMPLE, STEP = f"{GROUP} || '/' || (i % {MEMBERS})", f"i / {PER_STEP} + 1"
ROWS = {
    "tickets": "SELECT i, printf('group%08d', i), 'trained', i / {groups} + 1, "
    "json_object('trainer', max(i / {groups} - 1, 0)) FROM n",
    "samples": f"SELECT {SAMPLE}, {GROUP}, printf('prompt%08d', i / {MEMBERS}), 0, i % {MEMBERS}, 'trained', NULL, 60,"
    f" {TOKENS}, {TOKENS}, 0, 0, 0.5, {VERSION}, {VERSION}, {VERSION}, {VERSION}, {STEP} - 1, {STEP}, 'generator/0',"
    " 1e9 + i, 1e9 + i, 1e9 + i, 1e9 + i, 0 FROM n",
    "requests": f"SELECT i, {SAMPLE}, {SAMPLE}, 0, 0, printf('%032x', i), {TOKENS}, 60, NULL, {VERSION}, {VERSION},"
    " 'generator/0', 'stop', NULL, 0, 1e9 + i FROM n",
    "uses": f"SELECT {SAMPLE}, 'trainer', {STEP} - 1, {STEP}, {TOKENS}, 0, 0, {VERSION} FROM n",
    "spans": f"SELECT {SAMPLE}, 'trainer', {STEP}, 60, {TOKENS}, printf('%032x', i) FROM n",
}


@dataclass(frozen=True)
class Options:
    samples: int = 147_200
    directory: Path | None = None
    """Where the ledger is made, and stays. Without it, in a temporary directory."""
    audit: bool = True


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the seconds, and those of the processor."""
    began_s, process_s = time.monotonic(), time.process_time()
    yield
    print(
        f"{what}: {time.monotonic() - began_s:.2f} s ({time.process_time() - process_s:.2f} s of processor)", flush=True
    )


def make_ledger(run_dir: Path, samples: int) -> Path:
    """A run's records."""
    path = run_dir / "ledger.sqlite"
    run_dir.mkdir(parents=True, exist_ok=True)
    Ledger(path, TERMS).close()
    add_samples(run_dir, 0, samples)
    return path


def add_samples(run_dir: Path, begin: int, end: int) -> None:
    """Add the samples with the numbers `begin` to `end` - 1, which end with a step, in one commit."""
    with (
        closing(ledger_file.open_to_write(run_dir / "ledger.sqlite")) as db,
        open(run_dir / "metrics.jsonl", "a") as lines,
    ):
        db.execute("PRAGMA synchronous = OFF")
        newest = chain.read_newest(db)
        assert newest is not None
        db.execute("BEGIN")
        last = {table: db.execute(f"SELECT COALESCE(MAX(rowid), -1) FROM {table}").fetchone()[0] for table in ROWS}
        for table, query in ROWS.items():
            numbers = (begin // MEMBERS, end // MEMBERS) if table == "tickets" else (begin, end)
            db.execute(f"INSERT INTO {table} {NUMBERS.format(*numbers)}{query.format(groups=GROUPS)}")
        for step in range(begin // PER_STEP + 1, end // PER_STEP + 1):
            tokens = GROUPS * sum(100 + member for member in range(MEMBERS))
            figures = {"step": step, "tokens_trained": tokens, "staleness_max": min(step - 1, 1)}
            line = json.dumps(figures | {"ledger_head": newest.head})
            lines.write(line + "\n")
            db.execute("INSERT INTO steps VALUES ('trainer', ?, 0, 1e9, ?)", (step, line_hash(line)))
        sums = {name: Sum(num_rows, int(row_hashes, 16)) for name, num_rows, row_hashes in chain.read_contents(db)}
        for table, before in last.items():
            added = Sum.of(db.execute(f"SELECT * FROM {table} WHERE rowid > ?", (before,)))
            old = sums[table]
            sums[table] = Sum(old.num_rows + added.num_rows, (old.row_hashes + added.row_hashes) % chain.MODULUS)
        sums["steps"] = Sum.of(db.execute("SELECT * FROM steps"))
        contents = [sums[table].as_row(table) for table in sorted(sums)]
        commit = Commit.after(newest, time.time(), chain.hash_content(contents))
        db.executemany("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", contents)
        db.execute("INSERT INTO commits VALUES (?, ?, ?, ?)", astuple(commit))
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def write_checkpoint(ledger: Ledger, directory: Path) -> None:
    """The ledger's part of a checkpoint, as a run writes it."""
    with ledger.as_of_now() as snapshot:
        (directory / "checkpoints" / ".new").mkdir(parents=True)
        temporary = directory / "checkpoints" / ".new"
        snapshot.write(temporary)
        checkpoint.write_manifest(temporary, {"ledger_head": ledger.head}, threading.Event())
        for path in temporary.rglob("*"):
            ledger_file.sync_file(path)
    final = directory / "checkpoints" / f"step_{len(list((directory / 'checkpoints').glob('step_*'))):06d}"
    temporary.rename(final)
    ledger.note_published(final)


def measure_audits(directory: Path, samples: int) -> int:
    """Audits of everything, of nothing new, and of a further hundredth. Returns how many samples that is."""
    further = max(samples // 100 // PER_STEP, 1) * PER_STEP
    for what in ("a whole audit", "a second one, of nothing new", f"one after {further} further samples"):
        if "further" in what:
            add_samples(directory, samples, samples + further)
        with timed(what):
            report = continue_audit(directory, whole="whole" in what)
        assert report.ok and bool(report.notes) == ("whole" not in what), str(report)
    return further


def measure(directory: Path, options: Options) -> None:
    path, samples = directory / "ledger.sqlite", options.samples // PER_STEP * PER_STEP
    if not path.exists():
        with timed(f"making {samples} samples"):
            make_ledger(directory, samples)
    print(f"{samples} samples: {path.stat().st_size >> 20} MiB")
    if options.audit:
        samples += measure_audits(directory, samples)
    ledger = Ledger(path)
    with timed("the first checkpoint"):
        write_checkpoint(ledger, directory)
    for number in range(3):
        group = samples // MEMBERS + number * GROUPS
        step = samples // PER_STEP + number + 1
        for one in range(group, group + GROUPS):
            admit(ledger, one, step - 1)
            generate(ledger, one, step - 1)
        train(ledger, step, step - 1)
        with timed(f"a checkpoint after {PER_STEP} further samples"):
            write_checkpoint(ledger, directory)
    newest = sorted((directory / "checkpoints").glob("step_*"))[-1]
    files = segments_of(newest)
    sizes = [file.stat().st_size >> 20 for file in files]
    print(f"the newest checkpoint has {len(files)} segments of {sum(sizes)} MiB, the largest of {max(sizes)} MiB")
    with timed("what was there until now, a copy of the whole ledger"):
        copy = directory / "copy" / "ledger.sqlite"
        copy.parent.mkdir()
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        checkpoint.write_manifest(copy.parent, {}, threading.Event())
        ledger_file.sync_file(copy)
    shutil.rmtree(copy.parent)
    ledger.close()
    with timed("a resume: the ledger from the checkpoint alone"):
        checkpoint.verify_files(newest)
        ledger_file.restore_ledger(newest, path, TERMS)
    with timed("opening it"):
        Ledger(path, restored_from=newest).close()
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB of memory")


def main() -> int:
    options = tyro.cli(Options)
    if options.directory is not None:
        shutil.rmtree(options.directory / "checkpoints", ignore_errors=True)
        measure(options.directory, options)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
