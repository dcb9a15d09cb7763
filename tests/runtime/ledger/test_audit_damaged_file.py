"""The audit of files that a disk, or a loss of power, has damaged: a sentence or violations, never frames or `ok`."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.runtime.audit import audit_chain
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.checkpoints import checkpoint, rundir
from flowrl.runtime.checkpoints.checkpoint import steps_of
from flowrl.runtime.ledger import ledger as ledgers
from flowrl.runtime.ledger import ledger_file
from flowrl.runtime.ledger.ledger import ALL_TABLES
from flowrl.testing import run_graph
from tests.rigs.in_process import seeing_the_driver
from tests.runtime.ledger.small_run import two_trainers

GRAPH = str(Path(__file__).parents[1] / "driver" / "graphs_failing" / "faults.py")
NUM_SEEDS = 250


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    asyncio.run(two_trainers(directory))
    return directory


def content(path: Path) -> Any:
    with closing(sqlite3.connect(path)) as db:
        return [db.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall() for table in sorted(ALL_TABLES)]


def test_whatever_bytes_are_damaged_the_audit_says_so(sound: Path, tmp_path: Path) -> None:
    """Bytes that belong to no row and no index may be anything."""
    copy, rng, seen = Path(shutil.copytree(sound, tmp_path / "run")), random.Random(0), Counter[str]()
    path = copy / "ledger.sqlite"
    whole, rows = path.read_bytes(), content(path)
    for seed in range(NUM_SEEDS):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 8])):
            start = rng.randrange(4096 if seed % 10 == 0 else len(data))
            data[start] = rng.choice([data[start] ^ 1 << rng.randrange(8), 0, 0xEE, rng.randrange(256)])
        path.write_bytes(data[: rng.randrange(len(data))] if seed % 25 == 0 else data)
        for beside in copy.glob("ledger.sqlite-*"):
            beside.unlink()
        try:
            report = audit(copy)
        except ConfigError as problem:
            seen["refused"] += 1
            assert str(path) in str(problem) and "\n" not in str(problem), (seed, problem)
            continue
        seen["ok" if report.ok else "violated"] += 1
        if report.ok:
            assert content(path) == rows, seed
    assert seen["refused"] and seen["violated"], seen


def test_text_that_is_no_utf8_in_the_schema_or_in_a_row_is_one_sentence(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(sound, tmp_path / "run"))
    path = copy / "ledger.sqlite"
    whole = path.read_bytes()
    for place in (*(whole.index(text) for text in (b"samplessamples", b"tickets")), whole.rindex(b"actor")):
        path.write_bytes(whole[:place] + b"\xee" + whole[place + 1 :])
        assert main(["audit", str(copy)]) in (1, 2)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        assert "audit: ok" not in captured.out and (captured.out + captured.err).strip()


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in its middle, with two checkpoints, and a WAL that is not folded into the ledger."""
    tmp = tmp_path_factory.mktemp("power")

    def see(driver: Any) -> None:
        def look() -> None:
            if len(steps_of(tmp / "run" / "checkpoints")) >= 2:
                shutil.copytree(tmp / "run", tmp / "copy")
                return
            asyncio.get_running_loop().call_later(0.003, look)

        asyncio.get_running_loop().call_later(0.003, look)

    with seeing_the_driver(see):
        run_graph(GRAPH, tmp / "run", {}, steps=12, save_every=3, plain=True, preflight=False)
    (tmp / "copy" / "ledger.sqlite-shm").unlink(missing_ok=True)
    return tmp / "copy"


def test_a_log_that_lost_its_tail_is_called_that_and_a_resume_continues(cut_off: Path, tmp_path: Path) -> None:
    size = (cut_off / "ledger.sqlite-wal").stat().st_size
    newest = steps_of(cut_off / "checkpoints")[-1][1].name
    seen = Counter[str]()
    for kept in range(size // 3, size, size // 12):
        copy = tmp_path / str(kept)
        shutil.copytree(cut_off, copy)
        os.truncate(copy / "ledger.sqlite-wal", kept)
        report = audit(copy)
        for violation in report.violations:
            seen[violation.kind] += 1
            if violation.kind in ("checkpoints", "metrics") and "does not have:" in violation.text:
                assert "it has lost its last commits, as when a machine loses its power" in violation.text
                assert f"--resume continues from {newest}" in violation.text
    assert seen["checkpoints"] and seen["metrics"]
    run_graph(GRAPH, copy, {}, steps=12, save_every=3, plain=True, preflight=False, resume=True)
    assert audit(copy).ok


def test_what_a_checkpoint_names_is_on_the_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of the run and the ledger's log first, then the checkpoint's own files, then its name."""
    synced: list[str] = []

    def sync(path: Path) -> None:
        synced.append(str(path.relative_to(tmp_path / "run")))

    for module in (checkpoint, rundir, rundir, ledger_file):
        monkeypatch.setattr(module, "sync_file", sync)
    assert ledgers.ledger_file is ledger_file
    run_graph(GRAPH, tmp_path / "run", {}, steps=3, save_every=3, plain=True, preflight=False)
    last = max(index for index, name in enumerate(synced) if name == "checkpoints/.step_000003.tmp")
    before = synced[:last]
    for name in ("metrics.jsonl", "ledger.sqlite-wal", "config.json", "checkpoints/.step_000003.tmp/state.msgpack"):
        assert name in before or f".{name}.tmp" in before, (name, synced)
    assert any(name.startswith("checkpoints/.step_000003.tmp/ledger/") for name in before)
    assert synced[last + 1] == "checkpoints"


def test_a_ledger_of_another_run_is_still_called_that(cut_off: Path, sound: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cut_off, tmp_path / "run"))
    for file in copy.glob("ledger.sqlite*"):
        file.unlink()
    shutil.copy(sound / "ledger.sqlite", copy)
    texts = [v.text for v in audit(copy).violations if v.kind == "checkpoints"]
    assert texts and all(text.endswith(audit_chain.LOST_COMMITS) for text in texts)
