"""What a run does when something goes wrong, seen from outside: one message, an exit status, closed books
that can be resumed, and nothing left on the machine.

The runs are small graphs in `graphs_failing/`. Those that leave Ray in peace join the `ray` of all tests, as a
cluster is joined; those that kill it start their own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flowrl.weights.shm import SHM
from tests.rigs.run_process import GRAPHS, ROOT, Run, audit, states

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FAULTS = GRAPHS / "faults.py"
DIES_WITHIN_S = 10


OPTIONS = ("--steps", "6", "--save-every", "1")
FULL = ("--capacity", "1", "--group-size", "4")
"""The generator waits in its sends at every checkpoint."""


def assert_ended_once(run: Run) -> None:
    """By its node "faulty", with one message, and nothing is left."""
    assert run.wait() == 2, run.stdout
    assert run.stderr.count("failed") == 1, run.stderr
    assert run.stderr.startswith("flowrl: node 'faulty', replica 0, failed"), run.stderr
    assert run.left_after(DIES_WITHIN_S) == []
    assert not run.socket_dirs


def test_a_node_that_raises_ends_the_run_once_and_it_can_be_resumed(tmp_path: Path, ray: dict[str, str]) -> None:
    faults = {"raise": (), "raise_in_loop": FULL}
    runs = {
        fault: Run(FAULTS, tmp_path / fault, "--fault", fault, *OPTIONS, *more, env=ray)
        for fault, more in faults.items()
    }
    for run in runs.values():
        assert_ended_once(run)
        assert "failed (ticket 6): ZeroDivisionError: the reward divided by zero\n" in run.stderr
        assert run.stderr.count("Traceback") == run.stderr.count(", in treat\n") == 1

    for fault, more in faults.items():
        assert "audit: ok" in audit(tmp_path / fault)
        again = Run(FAULTS, tmp_path / fault, *OPTIONS, *more, "--resume", env=ray)
        again.until("resumed from step_")
        assert again.wait() == 0, again.stdout + again.stderr
        assert states(tmp_path / fault) == {("trained", None): 6 * 2 * (4 if more else 2)}


def test_a_node_that_forgets_an_item_or_cannot_be_set_up_ends_the_run_once(tmp_path: Path, ray: dict[str, str]) -> None:
    forgets, cannot = (
        Run(FAULTS, tmp_path / fault, "--fault", fault, *OPTIONS, env=ray) for fault in ("forget", "setup")
    )
    for run in (forgets, cannot):
        assert_ended_once(run)
    assert "without a send, hold or drop; end it with" in forgets.stderr
    assert "Traceback" not in forgets.stderr
    assert "RuntimeError: no such device" in cannot.stderr


@pytest.mark.parametrize("victim", ["generator-0", "trainer-0", "trainer-1", "faulty-0"])
def test_the_death_of_a_host_is_named_and_nothing_is_left(tmp_path: Path, ray: dict[str, str], victim: str) -> None:
    run = Run(FAULTS, tmp_path / "run", "--processes", "--ranks", "2", "--steps", "100000", env=ray)
    run.until("step 3/")
    pid = int(run.words(victim)[0])
    start_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 2, run.stdout
    assert time.monotonic() - start_s < DIES_WITHIN_S
    assert run.left_after(DIES_WITHIN_S) == []
    node = victim.split("-")[0]
    assert run.stderr.count("failed") == 1 and run.stderr.count("\n") == 1, run.stderr
    assert node in run.stderr.split("failed")[0] and f"(pid {pid}) died" in run.stderr
    assert not run.socket_dirs
    assert not (SHM / run.words("trainer-0")[1]).exists(), "weights that nobody reads any more"


def test_a_node_that_is_slow_to_close_does_not_keep_a_run_that_lost_a_process(
    tmp_path: Path, ray: dict[str, str]
) -> None:
    options = ["--processes", "--ranks", "2", "--close-s", "60", "--steps", "100000"]
    run = Run(FAULTS, tmp_path / "run", *options, env=ray)
    run.until("step 3/")
    start_s = time.monotonic()
    os.kill(int(run.words("trainer-1")[0]), signal.SIGKILL)
    assert run.wait() == 2, run.stdout
    assert time.monotonic() - start_s < DIES_WITHIN_S
    assert run.left_after(DIES_WITHIN_S) == []
    assert run.stderr.count("\n") == 1 and "died" in run.stderr, run.stderr


@pytest.mark.parametrize("victim", ["driver", "raylet"])
def test_nothing_survives_the_driver_or_ray_and_the_run_can_be_resumed(
    tmp_path: Path, ray: dict[str, str], victim: str
) -> None:
    options = ["--processes", "--generators", "2", "--generate-s", "0.1", "--save-every", "1"]
    run = Run(FAULTS, tmp_path / "run", *options, "--steps", "100000")
    run.until("checkpoint step_000004")
    os.kill(run.process.pid if victim == "driver" else run.pid_of("raylet"), signal.SIGKILL)
    run.wait()
    assert run.left_after(DIES_WITHIN_S) == []
    assert "Traceback" not in run.stderr, run.stderr

    steps = 4 + newest_checkpoint(tmp_path / "run")
    again = Run(FAULTS, tmp_path / "run", *options, "--steps", str(steps), "--resume", env=ray)
    again.until("resumed from step_")
    assert again.wait() == 0, again.stderr
    assert "audit: ok" in again.stdout
    assert states(tmp_path / "run") == {("trained", None): steps * 4}
    assert again.left_after(DIES_WITHIN_S) == []
    assert not run.socket_dirs and not list(Path("/dev/shm").glob(f"flowrl-*-{run.process.pid}-*"))


def newest_checkpoint(run_dir: Path) -> int:
    return max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


def test_the_first_interrupt_finishes_what_is_in_flight(tmp_path: Path, ray: dict[str, str]) -> None:
    run = Run(FAULTS, tmp_path / "run", "--steps", "100000", env=ray)
    run.until("step 3/")
    run.signal(signal.SIGINT)
    run.until("interrupted: finishing what is in flight")
    assert run.wait() == 0, run.stderr
    assert "audit: ok" in run.stdout and "--resume" in run.stdout
    assert set(states(tmp_path / "run")) == {("trained", None)}
    assert run.stderr == ""


def test_the_second_interrupt_stops_at_once(tmp_path: Path, ray: dict[str, str]) -> None:
    run = Run(FAULTS, tmp_path / "run", "--steps", "100000", "--generate-s", "20", "--processes", env=ray)
    run.until("training$")
    run.signal(signal.SIGINT)
    run.until("interrupted: finishing what is in flight")
    start_s = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert time.monotonic() - start_s < 5
    assert run.stderr == "flowrl: interrupted\n"
    assert run.left_after(DIES_WITHIN_S) == []


def test_a_deadlock_is_reported_with_its_cycle_and_waits_can_be_asked_for(tmp_path: Path, ray: dict[str, str]) -> None:
    run = Run(GRAPHS / "deadlock.py", tmp_path / "run", env=ray)
    run.until("source/0: its next send has no room")
    start_s = time.monotonic()
    os.kill(run.process.pid, signal.SIGUSR1)
    run.until(r"source/0 waits: credit of source.lefts -> pairs.lefts for \d+ s")
    assert run.wait() == 2
    assert time.monotonic() - start_s < 25
    assert run.stderr.startswith("flowrl: the run is deadlocked")
    assert "pairs waits for item of pairs.rights, held up by source" in run.stderr
    assert "source waits for credit of source.lefts -> pairs.lefts, held up by pairs" in run.stderr


def test_code_that_holds_the_event_loop_is_named_while_it_does(tmp_path: Path, ray: dict[str, str]) -> None:
    run = Run(FAULTS, tmp_path / "run", "--fault", "hang", "--steps", "10", env=ray)
    line = run.until("is blocked at")
    assert "faulty/0: its event loop is blocked at" in line and "parts.py" in line and "in treat" in line
    run.signal(signal.SIGINT)
    run.until("interrupted: finishing")
    run.signal(signal.SIGINT)
    assert run.wait() == 130


def test_a_process_that_answers_nothing_is_named_and_the_others_are_heard(tmp_path: Path, ray: dict[str, str]) -> None:
    stopped = Run(FAULTS, tmp_path / "stopped", "--processes", "--steps", "100000", env=ray)
    held = Run(FAULTS, tmp_path / "held", "--processes", "--fault", "gil", "--steps", "10", env=ray)
    stopped.until("step 3/")
    generator = int(stopped.words("generator-0")[0])
    os.kill(generator, signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        os.kill(stopped.process.pid, signal.SIGUSR1)
        stopped.until("prompts/0 (waits|works): ")
        stopped.until("generator/0 works: its process, host 'generator/0', has not answered for")
        assert time.monotonic() - start_s < 6
        stopped.until(r"host 'generator/0' \(generator/0\) has not answered for \d+ s: it is stopped")
    finally:
        os.kill(generator, signal.SIGCONT)
    stopped.until("host 'generator/0' answers again")
    stopped.signal(signal.SIGINT)
    assert stopped.wait() == 0, stopped.stderr
    assert "audit: ok" in stopped.stdout

    assert "faulty/0" in held.until("has not answered for")
    assert held.wait() == 0, held.stderr
    assert "audit: ok" in held.stdout


@pytest.mark.parametrize("hangs", ["trainer-1", "evaluation-0"])
def test_a_run_whose_process_hangs_ends_after_sigterm_without_a_checkpoint(
    tmp_path: Path, ray: dict[str, str], hangs: str
) -> None:
    """A rank that is stopped in its batch, and an evaluation that is asked and does not answer."""
    limit = ["--steps", "100000", "--term-minutes", "0.2"]
    if hangs == "trainer-1":
        options = ["--processes", "--ranks", "2", "--save-every", "2", *limit]
        run = Run(FAULTS, tmp_path / "run", *options, env=ray, timeout_s=200)
        run.until("checkpoint step_000004")
    else:
        options = ["--apart", "--save-every", "2", *limit]
        run = Run(GRAPHS / "evaluated.py", tmp_path / "run", *options, env=ray, timeout_s=200)
        run.until("evaluation during training, at version 4")
    pid = int(run.words(hangs)[0].split()[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        os.kill(run.process.pid, signal.SIGTERM)
        start_s = time.monotonic()
        assert run.wait() == 2, run.stderr
        assert 12 <= time.monotonic() - start_s < 12 + 8
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert run.stderr.startswith("flowrl: --term-minutes 0.2 are over") and f"continues from {newest}" in run.stderr
    assert f"{hangs.replace('-', '/')} works: its process" in run.stderr and "has not answered for" in run.stderr
    assert run.left_after(5) == []


def test_every_edge_and_every_way_to_lose_a_sample_in_one_run(tmp_path: Path, ray: dict[str, str]) -> None:
    run = Run(GRAPHS / "everything.py", tmp_path / "run", "--steps", "10", env=ray)
    blocked = run.until("the event loop was blocked")
    assert "reward: " in blocked and "everything.py" in blocked and "in score" in blocked
    assert run.wait() == 0, run.stderr

    lost = states(tmp_path / "run")
    samples = sum(lost.values())
    numbers = range(samples // 3)
    filtered = {n for n in numbers if n % 7 == 6}
    short = {n for n in numbers if n % 5 == 4} - filtered
    failed = {n for n in numbers if n % 3 == 2} - filtered
    assert len(numbers) - len(filtered) == 10 * 2
    assert lost[("filtered", "too_short")] == 3 * len(filtered) + len(short)
    assert lost[("failed", "no_answer")] == len(failed)
    assert lost[("trained", None)] == samples - 3 * len(filtered) - len(short) - len(failed)

    sizes = {f"group{n}": 3 - (n in short) - (n in failed) for n in numbers if n not in filtered}
    for tap in ("tap-0", "tap-1"):
        assert dict(group_and_number(run.words(tap))) == sizes
    answers = {reward: group_and_number(run.words(reward)) for reward in ("reward-0", "reward-1")}
    for found in answers.values():
        assert len(set(found)) == len(dict(found)), "a session went to two judges"
    assert {group for found in answers.values() for group, _ in found} == sizes.keys()
    assert sorted(word for judge in ("judge-0", "judge-1") for word in run.words(judge)[1:]) == ["cancelled"]
    assert run.words("filter-0")[0] == run.words("generator-0")[0] != run.words("generator-1")[0]


def group_and_number(words: list[str]) -> list[tuple[str, int]]:
    pairs = [word.split() for word in words[1:]]
    return [(group, int(number)) for group, number in pairs]


def test_nodes_time_shared_never_work_at_the_same_time(tmp_path: Path, ray: dict[str, str]) -> None:
    options = ["--time-share", "generator", "trainer", "--generate-s", "0.1", "--train-s", "0.1", "--steps", "4"]
    run = Run(ROOT / "benchmarks" / "runs" / "stages.py", tmp_path / "run", *options, env=ray)
    run.until("step 4/4")
    start_s = time.monotonic()
    assert run.wait() == 0, run.stderr
    assert time.monotonic() - start_s < 8
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    spans = {name: [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name] for name in STAGES}
    assert len(spans["train"]) == 4 and len(spans["generate"]) >= 4 * 8
    assert not any(a < d and c < b for a, b in spans["train"] for c, d in spans["generate"])


STAGES = ("generate", "train")


def test_a_full_disk_and_an_unwritable_directory_are_one_clear_message(tmp_path: Path, ray: dict[str, str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "trace.json").symlink_to("/dev/full")
    full = Run(FAULTS, tmp_path / "full", "--steps", "4", env=ray)
    nowhere = Run(FAULTS, Path("/dev/null/run"), "--steps", "4")
    assert nowhere.wait() == full.wait() == 2
    assert "No space left on device" in full.stderr and full.stderr.count("\n") == 1, full.stderr
    assert "cannot be written: Not a directory" in nowhere.stderr and nowhere.stderr.count("\n") == 1, nowhere.stderr
