"""`flowrl tune`: from runs to a chosen run file, what is kept and gone on with, and what is refused before a run.

The runs of most tests are made up: their stages take times that follow from the options.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.cli import main
from flowrl.commands.prepare import prepare_graph
from flowrl.commands.run_graph import RunFileOptions
from flowrl.commands.tune import measuring_run, tune
from flowrl.commands.tune.calibration import Calibration
from flowrl.commands.tune.cost_model import StageWork, StepRest, predict_step
from flowrl.commands.tune.measured_step import (
    MeasuredStep,
    busy_spans,
    measured_step,
    middle_of,
    robust_spread,
    time_beside,
)
from flowrl.commands.tune.measurements import Measurements, measurement_key
from flowrl.commands.tune.measuring_run import RunTimedOut
from flowrl.commands.tune.stage_times import StageSize
from flowrl.commands.tune.tune import TuneOptions
from flowrl.commands.tune.tune_report import TunedRow, choose_row
from flowrl.commands.tune.tuned_placement import PlacedStage, TunedPlacement
from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.load import load_file
from flowrl.graph.machine import Cluster
from flowrl.graph.run_file import RunFile
from flowrl.machine.orphans import ending_in_order
from flowrl.runtime.checkpoints.rundir import lock_directory
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.process import context
from flowrl.runtime.telemetry import metrics, trace
from flowrl.testing import run_graph
from flowrl.testing.clock import VirtualClock
from flowrl.testing.graph_run import GraphRun

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
STEPS = 12


class MadeUpRuns:
    """In place of `run_graph`: writes the metrics and the trace of a run of grpo on two cores.

    Generation takes 1.0 s on one core and 0.6 s on two, training 2.0 s and 1.2 s; beside each other both take 1.25
    times as long, and on a shared core twice as long. The rest of a step is 0.1 s.
    """

    def __init__(self) -> None:
        self.configs: list[str] = []
        self.fails = ""

    def __call__(self, config: Path, run_dir: Path, *, steps: int, limit_s: float | None = None) -> float:
        if self.fails:
            (run_dir / "checkpoints").mkdir(parents=True)
            raise RunTimedOut("over") if self.fails == "time" else KeyboardInterrupt
        given = RunFile.read(config).values(prepare_graph("run", (), ["grpo"]).file.config_type)
        self.configs.append(config.read_text())
        step_s, busy = self.step(given)
        replicas = {node: given[f"{node}.replicas"] for node in busy}
        self.write(run_dir, steps, step_s, busy, replicas)
        return 30.0

    def step(self, given: dict[str, Any]) -> tuple[float, dict[str, tuple[float, float]]]:
        """(seconds, stage -> the part of the step in which it is busy, as start and end)."""
        shares = (given["generator.cpus"], given["trainer.cpus"])
        if given["staleness"] == 0 and shares == (None, None):
            shares = (2.0, 2.0)  # in turns, each has all cores
        one, other = (1.0 if count in (None, 0.5, 1.0) else 0.6 for count in shares)
        generate_s, train_s = one * 1.0, other * 2.0
        generate_s *= 0.7 if given["generator.replicas"] == 2 else 1.0
        train_s *= 0.9 if given["trainer.replicas"] == 2 else 1.0
        if given["staleness"] == 0 or given["time_share"]:
            step_s = generate_s + train_s + 0.1
            return step_s, {"generator": (0.0, generate_s), "trainer": (generate_s, generate_s + train_s)}
        slow = 2.25 if shares == (0.5, 1.5) else 1.25
        beside_s = generate_s * slow
        step_s = beside_s + train_s - beside_s / slow + 0.1
        return step_s, {"generator": (0.0, beside_s), "trainer": (0.0, step_s - 0.1)}

    def write(
        self,
        run_dir: Path,
        steps: int,
        step_s: float,
        busy: dict[str, tuple[float, float]],
        replicas: dict[str, int],
    ) -> None:
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        tracks = dict(zip(busy, (1, 2), strict=True))
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{node}/0"}}
            for node, pid in tracks.items()
        ]
        lines = []
        for step in range(1, steps + 1):
            for node, (start, end) in busy.items():
                ts, dur = 1e6 * (step_s * step + start), 1e6 * (end - start)
                events.append({"ph": "X", "cat": "work", "name": "work", "pid": tracks[node], "ts": ts, "dur": dur})
                if node == "trainer":
                    events.append({"ph": "X", "cat": "item", "name": "Batch", "pid": 2, "ts": ts, "dur": dur})
            lines.append(
                {
                    "step": step,
                    "time_s": step_s * step,
                    **{f"{n}_busy_s": (e - s) * replicas[n] for n, (s, e) in busy.items()},
                }
            )
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run_dir / "trace.json").write_text(json.dumps(events))
        (run_dir / "checkpoints").mkdir()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUpRuns:
    made_up = MadeUpRuns()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tune, "run_graph", made_up)
    monkeypatch.setattr(tune.Tuning, "_run_preflight", lambda self: None)
    monkeypatch.setattr(Cluster, "here", staticmethod(lambda: Cluster.parse("1x cpus=2 memory=24")))
    return made_up


def tuned(*args: str) -> int:
    return main(["tune", "grpo", "--steps", str(STEPS), *args])


ON_ONE_CORE = ("--generator.cpus", "1", "--trainer.cpus", "1", "--trainer.replicas", "1", "--evaluate", "0")
"""Two placements are left, which are measured in two runs."""


def rows_of(printed: str) -> list[dict[str, Any]]:
    found = json.loads(printed)["rows"]
    assert isinstance(found, list)
    return found


def test_the_fastest_is_chosen_and_its_run_file_reproduces_it(runs: MadeUpRuns, capsys: Capture) -> None:
    assert tuned("--lr", "3e-5", "--json", "--verify", "8") == 0
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 8 and all(abs(row["error"]) < 0.03 for row in rows)
    best = min(rows, key=lambda row: row["measured_s"])
    assert [row for row in rows if row["chosen"]] == [best] and rows[0] is best
    assert best["placement"] == "generator 1 x 2 cores, trainer 1 x 2 cores, in turns, staleness 0"
    assert best["options"] == {"staleness": 0}, "a synchronous step has all cores in both halves by itself"
    again = prepare_graph("run", (RunOptions, RunFileOptions), ["--config", "runs/tune-grpo/chosen.yaml"])
    assert (again.cfg.trainer.lr, again.cfg.steps.staleness, again.cfg.evaluation.evaluate) == (3e-5, 0, 512)
    assert again.graph.time_shared == [("generator", "trainer")]


def test_stages_alone_and_together_are_measured_without_evaluation(runs: MadeUpRuns, capsys: Capture) -> None:
    assert tuned() == 0
    assert len(runs.configs) == 5 + 2 and all("evaluate: 0\n" in config for config in runs.configs)
    printed = capsys.readouterr()
    assert "calibrate 5 of 5: generator 2 x 1 core, trainer 2 x 1 core, in turns, staleness 0: measuring" in printed.err
    assert len(re.findall(r"[+-][0-9.]+%  generator", printed.out)) == 2, "two rows have an error"
    assert "flowrl run --config runs/tune-grpo/chosen.yaml" in printed.out


def test_what_is_measured_is_not_measured_again(runs: MadeUpRuns, capsys: Capture) -> None:
    assert tuned("--json", "--verify", "1", *ON_ONE_CORE) == 0 and len(runs.configs) == 3
    first = capsys.readouterr().out
    assert tuned("--json", "--verify", "1", *ON_ONE_CORE) == 0 and len(runs.configs) == 3
    assert capsys.readouterr().out == first
    assert tuned("--verify", "2", *ON_ONE_CORE) == 0 and len(runs.configs) == 4
    assert tuned("--lr", "1e-5", *ON_ONE_CORE) == 0 and len(runs.configs) == 8, "another job"
    assert tuned("--again", *ON_ONE_CORE) == 0 and len(runs.configs) == 12
    assert not list(Path("runs").glob("*/*/trace.json")) and not list(Path("runs").glob("*/*/checkpoints"))


def test_an_interrupted_command_goes_on_where_it_stopped(runs: MadeUpRuns, capsys: Capture) -> None:
    assert tuned("--verify", "0", *ON_ONE_CORE) == 0 and len(runs.configs) == 2
    runs.fails = "interrupt"
    assert tuned("--verify", "1", *ON_ONE_CORE) == 130
    assert not list(Path("runs").glob("*/*/checkpoints"))
    runs.fails = ""
    assert tuned("--verify", "1", *ON_ONE_CORE) == 0 and len(runs.configs) == 3


def test_a_directory_belongs_to_one_tune(runs: MadeUpRuns, capsys: Capture) -> None:
    """A second one emptied the directories of the first one's runs."""
    with lock_directory(Path("runs/tune-grpo"), option="--run-dir", holder="flowrl tune"):
        assert tuned(*ON_ONE_CORE) == 2 and not runs.configs
    assert f"is in use by flowrl tune of process {os.getpid()}; wait for it to end" in capsys.readouterr().err
    assert tuned(*ON_ONE_CORE) == 0


def test_without_time_what_was_not_measured_is_left_out(runs: MadeUpRuns, capsys: Capture) -> None:
    runs.fails = "time"
    assert tuned("--budget", "1") == 2
    assert "--budget 1: the time was up before a step could be predicted" in capsys.readouterr().err
    runs.fails = ""
    assert tuned("--budget", "0.4", "--json") == 0, "24 s are enough for one run that takes no time"
    printed = capsys.readouterr()
    assert len(runs.configs) == 1 and "left out, --budget 0.4 is over" in printed.err
    known = [row["placement"] for row in rows_of(printed.out) if row["predicted_s"] is not None]
    assert known == ["generator 1 x 1 core, trainer 1 x 1 core, staleness 0"]


def test_a_run_file_is_taken_and_its_run_options_stay(runs: MadeUpRuns, capsys: Capture) -> None:
    of_run = "steps: 200\nstop.metric: reward_mean\nstop.above: 0.9\nrun_dir: runs/mine\n"
    Path("mine.yaml").write_text(f"graph: grpo\n{of_run}staleness: 0\nlr: 2e-5\n")
    assert main(["tune", "--config", "mine.yaml", "--steps", str(STEPS), "--json", "--save-config", "best.yaml"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert all("staleness 0" in row["placement"] for row in rows), "what is given stays"
    again = prepare_graph("run", (RunOptions, RunFileOptions), ["--config", "best.yaml"])
    assert again.own[0].run_dir == Path("runs/mine") and not Path("runs/mine").exists()
    assert again.own[0].steps == 200 and again.own[0].stop.metric == "reward_mean" and again.cfg.trainer.lr == 2e-5


def test_one_placement_that_is_left_is_told(runs: MadeUpRuns, capsys: Capture) -> None:
    assert tuned("--staleness", "0", "--generator.replicas", "1", *ON_ONE_CORE) == 0
    told = "the given options leave one placement, generator 1 x 1 core, trainer 1 x 1 core, staleness 0"
    assert told in capsys.readouterr().err


def test_a_dry_run_measures_nothing(runs: MadeUpRuns, capsys: Capture) -> None:
    assert tuned("--dry-run", "--cluster", "1 x 2 x H100") == 0
    printed = capsys.readouterr().out
    assert "placements fit:" in printed and "generator 1 x 1 GPU, trainer 1 x 1 GPU, staleness 1" in printed
    assert tuned("--dry-run", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 5
    assert not runs.configs and not Path("runs").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--steps", "7"), "--steps is 7; it has to be 8 or more"),
        (("--steps", "8"), "with staleness 1 a measurement needs 9 or more"),
        (("--verify", "-1"), "--verify is -1"),
        (("--budget", "0"), "--budget is 0.0; it has to be above 0"),
        (("--cluster", "2 x 8 x H100"), "add --dry-run"),
        (("--stepz", "9"), "did you mean --steps"),
        (("--save-config", "there.yaml"), "is not replaced"),
        (("--run-dir", "there.yaml"), "is a file; name a directory"),
        (("--group-size", "0"), "--group-size is 0"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    args: tuple[str, ...], told: str, runs: MadeUpRuns, capsys: Capture
) -> None:
    Path("there.yaml").write_text("")
    assert main(["tune", "grpo", *args]) == 2
    assert told in capsys.readouterr().err and not runs.configs


def test_graphs_that_do_not_train_and_clusters_without_a_description(
    runs: MadeUpRuns, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tune", "evaluate"]) == 2 and "evaluate trains nothing" in capsys.readouterr().err
    for graph in ("proposer", "planner_executor"):
        assert main(["tune", graph]) == 2
        assert f"at staleness 0, and {graph} has no such placement" in capsys.readouterr().err and not runs.configs
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert tuned() == 2 and "name the machines of that cluster with --cluster" in capsys.readouterr().err


def test_a_directory_with_other_measurements_is_told(runs: MadeUpRuns, capsys: Capture) -> None:
    Path("runs/tune-grpo").mkdir(parents=True)
    Path("runs/tune-grpo/measurements.json").write_text("[]")
    assert tuned() == 2 and "is no file of measurements" in capsys.readouterr().err


@pytest.mark.parametrize(("generate_s", "train_s"), [(0.5, 0.8), (1.0, 0.3)])
def test_predictions_hold_on_the_engine(
    generate_s: float, train_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Tickets, channels, leases and ledger are the real ones; the stages sleep, and all of it in virtual time."""
    graph, two, clock = (
        str(ROOT / "benchmarks" / "runs" / "stages.py"),
        Cluster.parse("1x cpus=2 memory=24"),
        VirtualClock(),
    )
    of_clock = {"monotonic": lambda: clock.now_s, "time_ns": lambda: int(1e9 * clock.now_s)}
    for module in (context, metrics, trace):
        monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **of_clock}))

    def run_here(config: Path, run_dir: Path, *, steps: int, limit_s: float | None = None) -> float:
        values = RunFile.read(config).values(load_file(graph).config_type)
        run_graph(graph, run_dir, values, steps=steps, cluster=two, clock=clock, timeout_s=1e6, trace="full")
        return 1.0

    monkeypatch.setattr(tune, "run_graph", run_here)
    monkeypatch.setattr(Cluster, "here", staticmethod(lambda: two))
    asked = ("--generate-s", str(generate_s), "--train-s", str(train_s), "--steps", "12", "--verify", "4")
    assert main(["tune", graph, *asked, "--most-staleness", "2", "--run-dir", str(tmp_path), "--json"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 4 and all(abs(row["error"]) < 0.02 for row in rows), rows
    assert [row["placement"][-11:] for row in rows if row["chosen"]] == ["staleness 1"], "2 is not faster"
    assert rows[0]["measured_s"] == pytest.approx(max(generate_s, train_s), rel=0.05)
    assert rows[-1]["measured_s"] == pytest.approx(generate_s + train_s, rel=0.05)


# Measurements


def test_a_measurement_is_of_one_graph_its_options_and_steps(tmp_path: Path) -> None:
    file = tmp_path / "graph.py"
    file.write_text("one")
    key = measurement_key("verify", file, {"lr": 1.0}, steps=20)
    assert key == measurement_key("verify", file, {"lr": 1.0}, steps=20)
    others = {
        measurement_key("calibrate", file, {"lr": 1.0}, steps=20),
        measurement_key("verify", file, {"lr": 2.0}, steps=20),
        measurement_key("verify", file, {"lr": 1.0}, steps=21),
    }
    file.write_text("other")
    others.add(measurement_key("verify", file, {"lr": 1.0}, steps=20))
    assert len(others - {key}) == 4
    kept = Measurements(tmp_path)
    kept.add_result(key, step := MeasuredStep(1.5, 12, {"trainer": 1.0}, {"trainer": 0.1}, {"trainer": 0.5}, 2.0, 60.0))
    assert Measurements(tmp_path).find_result(key) == step
    assert Measurements(tmp_path, again=True).find_result(key) is None


def test_the_middle_of_the_steps() -> None:
    assert sorted(middle_of({1: 1.0, 2: 9.0, 3: 1.1, 4: 1.2, 5: 0.1})) == [1, 3, 4]
    assert robust_spread([1.0, 1.0, 1.0, 50.0]) < 10 and robust_spread([1.0]) == 0.0
    assert robust_spread([0.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx(2 / 1.349)


def test_work_beside_others() -> None:
    spans = {"g/0": [(0.0, 2.0)], "g/1": [(1.0, 3.0)], "t/0": [(2.5, 4.5)], "light/0": [(0.0, 9.0)]}
    assert time_beside(spans, ["g", "t"]) == {"g": pytest.approx(0.5 / 4), "t": pytest.approx(0.25)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> GraphRun:
    directory = tmp_path_factory.mktemp("tune") / "run"
    config = {"generate_s": 0.02, "train_s": 0.04}
    return run_graph(ROOT / "benchmarks" / "runs" / "stages.py", directory, config, steps=14, trace="full")


def test_the_records_of_a_run_tell_its_stages(ran: GraphRun) -> None:
    stages = {"generator": ("generator", 1), "trainer": ("trainer", 1)}
    found = measured_step(ran.directory, stages, trainer="trainer", tail=1, load=0.5, wall_s=3.0)
    assert found.num_steps == 14 - 3 - 1 and (found.load, found.wall_s) == (0.5, 3.0)
    assert 0.035 < found.step_s < 0.3, "the trainer sleeps 0.04 s, by a clock that rounds"
    assert 0.015 < found.busy["generator"] < 0.2 and 0.035 < found.busy["trainer"] < 0.2
    assert found.beside["generator"] > 0.5, "the trainer always works"
    replicas = {**stages, "trainer": ("trainer", 2)}
    halved = measured_step(ran.directory, replicas, trainer="trainer", tail=1)
    assert halved.busy["trainer"] == pytest.approx(found.busy["trainer"] / 2)


def test_only_the_measured_steps_count(ran: GraphRun) -> None:
    spans = busy_spans(ran.directory / "trace.json", trainer="trainer", tail=1)
    whole = busy_spans(ran.directory / "trace.json", trainer="trainer", tail=0)
    assert len(spans["trainer/0"]) < len(whole["trainer/0"])
    with pytest.raises(FlowrlError, match="14 steps; to measure it, 15 are needed"):
        measured_step(ran.directory, {"trainer": ("trainer", 1)}, trainer="trainer", tail=7)


# Calibration

G, T = PlacedStage("g", StageSize(), generates=True), PlacedStage("t", StageSize())
SYNC, ASYNC = TunedPlacement({}, (G, T)), TunedPlacement({"s": 1}, (G, T), ahead=1, staleness=1)


def test_contention_and_rest_are_what_the_measured_runs_say() -> None:
    """Alone 1 s and 3 s; beside each other 1.5 times as long; 0.2 s of rest."""
    alone = MeasuredStep(4.2, 10, {"g": 1.0, "t": 3.0}, {"g": 0.0, "t": 0.0})
    together = MeasuredStep(3.7, 10, {"g": 1.5, "t": 3.5}, {}, {"g": 1.0, "t": 1.5 / 3.5})
    found = Calibration(((SYNC, alone), (ASYNC, together)))
    assert found.core_contention == {"g": pytest.approx(1.5), "t": pytest.approx(1.5)}
    assert found.rest_times == {"sync": pytest.approx(0.2), "async": pytest.approx(0.2)}
    works = [StageWork("g", 1.0, contention=1.5), StageWork("t", 3.0, contention=1.5)]
    by_hand = predict_step(works, ahead=1, rest=StepRest(sync_s=0.2, async_s=0.2))
    assert found.predict_placement(ASYNC) == by_hand and by_hand.step_s == pytest.approx(3.7)


def test_nothing_is_predicted_from_what_was_not_measured() -> None:
    alone = MeasuredStep(4.2, 10, {"g": 1.0, "t": 3.0}, {"g": 0.0, "t": 0.0})
    found = Calibration(((SYNC, alone),))
    alternating = TunedPlacement({}, tuple(PlacedStage(s.node, s.size, lease="g+t") for s in (G, T)))
    larger = TunedPlacement({}, (G, PlacedStage("t", StageSize(units=2))))
    predicted = found.predict_placement(SYNC)
    assert predicted is not None and predicted.step_s == pytest.approx(4.2)
    assert [found.predict_placement(one) for one in (ASYNC, alternating, larger)] == [None, None, None]


def test_the_fastest_measured_one_wins_over_the_fastest_predicted() -> None:
    def row(predicted_s: float, measured_s: float | None) -> TunedRow:
        works = [StageWork("t", predicted_s)]
        step = None if measured_s is None else MeasuredStep(measured_s, 10)
        return TunedRow(SYNC, predict_step(works, ahead=0, rest=StepRest()), step)

    stale = TunedRow(ASYNC, predict_step([StageWork("t", 1.0)], ahead=0, rest=StepRest()), MeasuredStep(2.49, 10))
    rows = [row(1.0, 3.0), row(2.0, 2.5), row(2.2, None), stale]
    assert choose_row(rows) is rows[1] and rows[1].prediction_error == pytest.approx(-0.2)
    assert choose_row([rows[0], stale]) is stale
    assert choose_row([row(2.0, None), fast := row(1.0, None)]) is fast
    assert choose_row([TunedRow(SYNC, None)]) is None


# The process of a run

SLEEPS = (
    "import signal, sys, time\nsignal.signal(signal.SIGINT, {handler})\nprint('begun', flush=True)\n"
    "time.sleep(60)"  # until a signal ends it
)


def child(handler: str) -> list[str]:
    return [sys.executable, "-c", SLEEPS.format(handler=handler)]


def test_a_run_is_ended_in_order_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_run, "run_command", lambda *_: child("lambda *_: sys.exit(0)"))
    began_s = time.monotonic()
    with pytest.raises(RunTimedOut, match=r"run had not ended after 0\.5 s"):
        measuring_run.run_graph(tmp_path / "c", tmp_path / "run", steps=1, limit_s=0.5)
    assert time.monotonic() - began_s < 20 and (tmp_path / "run.log").exists()


def test_a_run_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_run, "ORDERLY_S", 0.1)
    monkeypatch.setattr(measuring_run, "ENDED_WITHIN_S", 0.1)
    process = subprocess.Popen(child("signal.SIG_IGN"), stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    measuring_run.end_process(process)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


def test_a_run_that_fails_tells_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [sys.executable, "-c", "import sys; print('out of memory'); sys.exit(2)"]
    monkeypatch.setattr(measuring_run, "run_command", lambda *_: told)
    with pytest.raises(FlowrlError, match=r"status 2; the end of .*run\.log:\nout of memory"):
        measuring_run.run_graph(tmp_path / "c", tmp_path / "run", steps=1)


def test_sigterm_ends_the_run_under_way() -> None:
    with pytest.raises(SystemExit) as ended, ending_in_order():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # the signal ends it
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_command_of_a_run_is_one_that_flowrl_takes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("graph: grpo\n")
    _, _, _, name, *args = measuring_run.run_command(tmp_path / "c.yaml", tmp_path / "run", 12)
    (options, _) = prepare_graph(name, (RunOptions, tune.TuneOptions), args).own
    assert (options.steps, options.trace, options.keep_samples, options.save_minutes) == (12, "full", "off", 0.0)


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="--most-staleness is -1"):
        TuneOptions(most_staleness=-1)
