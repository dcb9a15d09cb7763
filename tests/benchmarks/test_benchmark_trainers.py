"""trainers.py: its order of runs, its resuming, its figures and tables, and how it watches processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import process_memory, trainer_systems, trainers
from benchmarks.peers.job_reward import correct
from benchmarks.peers.process_memory import SHARED, CommandFailed, Watched, watch
from benchmarks.peers.trainer_systems import Found, Setting, StepJob, TrainerRun, flowrl_options, of_trl
from benchmarks.peers.trainer_tables import BEGIN, END, TrainerResult, alone_table, table
from benchmarks.runs.page import put
from flowrl.graph.load import load_file
from flowrl.recipes import grpo

SETTING = Setting(Path("runs"), Path("cache"), steps=2, skip=1, staleness=1, trl_micro_batch=8, flowrl_options=())
JOB = StepJob(8, 8, 24)
CPU = "AMD EPYC without AVX512"
LASTING = "import time; time.sleep(60)"  # longer than its limit


def result(system: trainer_systems.System, repetition: int, step_s: float) -> TrainerResult:
    return TrainerResult(
        TrainerRun(JOB, "bfloat16", system, repetition), Found(step_s, 64 / step_s, 20.0, 3 << 30), 0.5, CPU
    )


def test_every_repetition_runs_all_systems_and_begins_with_another_one() -> None:
    options = trainers._parser().parse_args(["--job", "8x8x24", "8x4x24", "--dtype", "bfloat16"])
    planned = list(trainers.cells(options))
    assert [cell.system for cell in planned if cell.job == JOB and cell.repetition < 2] == [
        "trl",
        "flowrl",
        "flowrl-sync",
        "flowrl",
        "flowrl-sync",
        "trl",
    ]
    assert len(planned) == len(set(planned)) == 3 * (5 + 3)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TrainerRun]]:
    cells: list[TrainerRun] = []

    def run(cell: TrainerRun, setting: Setting, data: Path) -> Found:
        if len(cells) == 2:
            raise CommandFailed("killed")
        cells.append(cell)
        return Found(4.0, 16.0, 20.0, 1 << 30)

    monkeypatch.setattr(trainers, "run", run)
    monkeypatch.setattr(trainers, "write_prompts", lambda path, number: path.parent.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(trainers, "trl_python", lambda cache: Path("python"))
    yield cells


def test_a_repeated_command_runs_what_is_missing(ran: list[TrainerRun], tmp_path: Path) -> None:
    command = ["--job", "8x8x24", "--dtype", "bfloat16", "--repetitions", "1", "--dir", str(tmp_path)]
    assert trainers.main(command) == 2
    first = list(ran)
    ran.clear()
    assert trainers.main(command) == 0
    assert [cell.system for cell in first + ran] == ["trl", "flowrl", "flowrl-sync"]
    ran.clear()
    assert trainers.main(command) == 0
    assert ran == []
    assert trainers.main([*command, "--generator.cpus", "2"]) == 2, "other options of flowrl are another measurement"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--steps", "0"], "--steps is 0; it has to be 1 or more"),
        (["--repetitions", "0"], "--repetitions is 0; it has to be 1 or more"),
        (["--staleness", "0"], "--staleness is 0; it has to be 1 or more"),
        (["--skip", "2"], "--skip is 2; it has to be above --staleness 2, as first batches fill up"),
        (["--trl-micro-batch", "7"], "--trl-micro-batch 7 does not divide the samples of a step of 8x8x24"),
    ],
)
def test_wrong_options_are_refused(options: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainers.main(options) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("text", ["8x8", "8x1x24", "axbxc"])
def test_a_job_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StepJob.parse(text)


def test_steps_of_trl_are_counted_from_the_end_of_the_last_skipped_one() -> None:
    found = of_trl({"ends_s": [100.0, 104.0, 110.0], "response_tokens": [9.0, 20.0, 22.0]}, JOB, SETTING, Watched(1, 7))
    assert found == Found(step_s=5.0, samples_per_s=64 / 5, response_tokens=21.0, peak_bytes=7)


@pytest.mark.parametrize("system", ["flowrl", "flowrl-sync"])
def test_flowrl_takes_the_options_of_a_job(system: trainer_systems.System, tmp_path: Path) -> None:
    file = load_file(Path(grpo.__file__))
    cfg = file.parse(flowrl_options(TrainerRun(JOB, "bfloat16", system, 0), tmp_path / "p.jsonl", 2), prog="test")
    assert (cfg.steps.groups_per_step, cfg.sampling.group_size, cfg.sampling.max_tokens, cfg.trainer.dtype) == (
        8,
        8,
        24,
        "bfloat16",
    )
    assert cfg.generator.engine.dtype == cfg.trainer.dtype, "TRL too samples in what it trains in"
    assert cfg.steps.staleness == (0 if system == "flowrl-sync" else 2)


def test_the_table_compares_runs_of_one_repetition() -> None:
    runs = [result("trl", n, s) for n, s in enumerate((20.0, 30.0, 24.0))]
    runs += [result("flowrl", n, s) for n, s in enumerate((5.0, 5.0, 4.0))]
    lines = table(runs, 2, "python -m benchmarks.peers.trainers").splitlines()
    trl = "| 24.00 (20.00–30.00) | 2.67 (2.13–3.20) | – | 20.0 (20.0–20.0) | 3.0 (3.0–3.0) |"
    assert lines[4] == f"| {CPU} | 8x8x24 | bfloat16 | trl | 3 {trl}"
    assert "| flowrl | 3 | 5.00 (4.00–5.00) | 12.80 (12.80–16.00) | 6.00 (4.00–6.00) |" in lines[5]
    assert "    python -m benchmarks.peers.trainers" in lines


def test_runs_of_two_processors_are_two_rows_and_memory_is_told_by_process() -> None:
    runs = [result("trl", 0, 20.0), replace(result("trl", 0, 10.0), processor="other with AVX512")]
    parts = {"trainer/0": 2 << 30, SHARED: 1 << 29}
    runs += [replace(runs[0], cell=replace(runs[0].cell, system="flowrl"), found=replace(runs[0].found, memory=parts))]
    lines = table(runs, 2, "python -m benchmarks.peers.trainers").splitlines()
    assert [line.split(" | ")[4] for line in lines[4:7]] == ["1", "1", "1"]
    assert lines[6].startswith("| other with AVX512 | 8x8x24 | bfloat16 | trl | 1 | 10.00 |")
    assert "20.00" in lines[4] and "20.00" in lines[5] and CPU in lines[5]
    assert lines[-2:] == ["| bfloat16 | flowrl | trainer/0 | 2.00 |", "| bfloat16 | flowrl | shared memory | 0.50 |"]


def test_the_trainer_alone_is_what_layouts_measured(tmp_path: Path) -> None:
    file = tmp_path / "layouts.jsonl"
    shape = {"samples": 8, "prompt": 40, "response": 24}
    ways = ({"way": "rows", "seconds": [14.0]}, {"way": "auto", "seconds": [7.0]})
    lines = [{"shape": shape, "tokens_computed": 5, "first_grad_norm": 1.0} | way for way in ways]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "| 8 | 40 | 24 | 14.00 (14.00–14.00) | 7.00 (7.00–7.00) | 2.00× |" in alone_table(file)


def test_tables_are_put_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put(page, "new", BEGIN, END)
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert BEGIN in trainers.PAGE.read_text()
    with pytest.raises(ValueError, match="no place"):
        put(page, "new", "<!-- other -->", END)


def test_memory_is_that_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "EVERY_S", 0.02)
    held = 64 << 20
    child = f"import time; kept = b'x' * {held}; print('ready', flush=True); time.sleep(0.3)"  # is seen
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    done = watch([sys.executable, "-c", parent], log=tmp_path / "log", env=os.environ, cwd=tmp_path, limit_s=30)
    assert held < done.peak_bytes == sum(done.parts.values())


def test_shared_memory_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes map the same pages; a segment that nobody maps counts by its name, which has the process."""
    monkeypatch.setattr(process_memory, "EVERY_S", 0.05)
    held = 64 << 20
    code = f"""
import mmap, os, pathlib, sys, time
shared, part = mmap.mmap(-1, {held}), b'x' * (1 << 20)
for _ in range({held} >> 20): shared.write(part)
file = pathlib.Path(f"/dev/shm/flowrl-test-{{os.getpid()}}-weights-x-0")
with file.open("wb") as stream:
    for _ in range(int(sys.argv[1]) * {held} >> 20): stream.write(part)
if os.fork() == 0: sum(shared[::4096]); time.sleep(0.5); os._exit(0)  # both are seen
time.sleep(0.6); file.unlink()  # after the child
"""
    for times in (0, 3):
        done = watch(
            [sys.executable, "-c", code, str(times)], log=tmp_path / "log", env=os.environ, cwd=tmp_path, limit_s=30
        )
        assert done.parts[SHARED] == pytest.approx(max(1, times) * held, rel=0.05)


def test_a_command_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"status 3(.|\n)*the reason"):
        watch(
            [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"],
            log=tmp_path / "log",
            env=os.environ,
            cwd=tmp_path,
            limit_s=30,
        )
    with pytest.raises(CommandFailed, match="took longer than 0 s"):
        watch(
            [sys.executable, "-c", LASTING],
            log=tmp_path / "log",
            env=os.environ,
            cwd=tmp_path,
            limit_s=0.0,
        )


def test_the_reward_reads_texts_and_messages() -> None:
    message = [{"role": "assistant", "content": "3 + 4 = 7"}]
    assert correct(["it is -12.", message, "none"], ["-12", 7, "0"]) == [1.0, 1.0, 0.0]
