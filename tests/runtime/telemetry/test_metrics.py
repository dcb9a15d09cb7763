"""Reports of hosts, the lines made from them, and the sinks."""

from __future__ import annotations

import contextvars
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.node import METRIC_NAMES
from flowrl.runtime.driver.job import Job
from flowrl.runtime.driver.run_records import RunRecords
from flowrl.runtime.telemetry import sinks
from flowrl.runtime.telemetry.metrics import (
    ALARMS,
    EVALUATIONS,
    METRICS,
    Metrics,
    flatten_numbers,
    read_lines,
    rewind_lines,
)
from flowrl.runtime.telemetry.sinks import SampleTables, Tracking, Trackio, WandB, format_markdown, open_sinks
from flowrl.runtime.telemetry.statistics import EdgeNow, NodeNow, Statistics, find_bottleneck

LANE = "generator/0.rollouts -> reward/0.rollouts"
OTHER_LANE = "generator/0.rollouts -> reward/1.rollouts"
EDGE = "generator.rollouts -> reward.rollouts"


def node(busy_s: float, counters: Mapping[str, float] | None = None, **observed: list[float]) -> dict[str, Any]:
    summaries = {name: (len(values), sum(values), max(values)) for name, values in observed.items()}
    return {"busy_s": busy_s, "counters": counters or {}, "observed": summaries}


def lane(depth: int, blocked_s: float, sent: int = 10) -> dict[str, Any]:
    return {"depth": depth, "blocked_s": blocked_s, "sent": sent}


def report(statistics: Statistics, now_s: float, **nodes: Any) -> None:
    statistics.add_report({"nodes": {name.replace("_", "/"): body for name, body in nodes.items()}}, now_s)


# Statistics


def test_counters_are_summed_over_replicas_since_the_last_line() -> None:
    statistics = Statistics()
    report(statistics, 1.0, gen_0=node(0.5, {"tokens_generated": 10}), gen_1=node(0.2, {"tokens_generated": 5}))
    report(statistics, 2.0, gen_0=node(1.0, {"tokens_generated": 30}))
    line = statistics.since_line()
    assert (line["tokens_generated"], line["gen_busy_s"]) == (35, pytest.approx(1.2))
    assert statistics.since_line()["tokens_generated"] == 0


def test_a_replica_that_starts_again_counts_on() -> None:
    statistics = Statistics()
    report(statistics, 1.0, gen_0=node(5.0, {"tokens_generated": 100}))
    report(statistics, 2.0, gen_0=node(0.5, {"tokens_generated": 7}))
    line = statistics.since_line()
    assert (line["tokens_generated"], line["gen_busy_s"]) == (107, 5.5)


def test_observations_become_their_mean_and_largest() -> None:
    statistics = Statistics()
    report(statistics, 1.0, gen_0=node(0, None, weight_update_pause_s=[0.1, 0.2]), gen_1=node(0, None))
    report(statistics, 1.0, gen_1=node(0, None, weight_update_pause_s=[0.6]))
    line = statistics.since_line()
    assert line["weight_update_pause_s"] == pytest.approx(0.3)
    assert line["weight_update_pause_s_max"] == 0.6
    assert "weight_update_pause_s" not in statistics.since_line()


def test_fractions_are_those_of_the_last_seconds() -> None:
    statistics = Statistics()
    for second in range(20):
        busy = float(second) if second < 10 else 10 + (second - 10) * 0.25
        report(statistics, second, gen_0=node(busy), gen_1=node(0.0))
    assert statistics.nodes() == [NodeNow("gen", 2, pytest.approx(0.125))]  # type: ignore[arg-type]


def test_an_edge_has_the_depth_of_all_lanes_and_the_blocking_of_the_worst() -> None:
    statistics = Statistics()
    for second in (0, 1, 2):
        statistics.add_report({"lanes": {LANE: lane(3, 0.5 * second), OTHER_LANE: lane(4, 0.25 * second)}}, second)
    assert statistics.edges() == [EdgeNow(EDGE, "generator", "reward", 7, 2, 0.5)]


def test_lanes_that_wait_together_are_blocked_once_and_replicas_add_up() -> None:
    """Four lanes from each of two producers, which are blocked for 1 s and 0.5 s."""
    statistics = Statistics()
    for producer, blocked_s in (("generator/0", 1.0), ("generator/1", 0.5)):
        lanes = {f"{producer}.rollouts -> reward/{n}.rollouts": lane(1, blocked_s) for n in range(4)}
        statistics.add_report({"lanes": lanes}, 1.0)
        statistics.add_report({"lanes": lanes}, 2.0)  # a report holds totals: it adds nothing
    assert statistics.since_line()["edges"] == {EDGE: {"depth": 8, "blocked_s": 1.5}}


def test_a_lane_that_is_used_late_does_not_count_earlier_time_again() -> None:
    statistics = Statistics()
    statistics.add_report({"lanes": {LANE: lane(1, 2.0), OTHER_LANE: lane(0, 2.0, sent=0)}}, 1.0)
    statistics.since_line()
    statistics.add_report({"lanes": {LANE: lane(1, 2.25), OTHER_LANE: lane(1, 2.25, sent=1)}}, 2.0)
    assert statistics.since_line()["edges"] == {EDGE: {"depth": 2, "blocked_s": 0.25}}


def test_the_receiving_end_of_a_lane_says_nothing_about_blocking() -> None:
    statistics = Statistics()
    statistics.add_report({"lanes": {LANE: lane(3, 1.0)}}, 0.0)
    statistics.add_report({"lanes": {LANE: lane(0, 0.0, sent=0)}}, 0.1)
    assert statistics.since_line()["edges"] == {EDGE: {"depth": 3, "blocked_s": 1.0}}


@pytest.mark.parametrize(
    ("busy", "blocked", "slowest", "why"),
    [
        ((0.95, 0.1, 0.4), (0.0, 0.0), "generator", "works 95% of the time"),
        ((0.9, 0.1, 1.0), (0.0, 0.8), "trainer", "works 100% of the time, reward waits for it 80%"),
        ((1.0, 0.9, 0.3), (0.7, 0.0), "reward", "works 90% of the time, generator waits for it 70%"),
        ((0.3, 0.1, 0.4), (0.0, 0.0), "", "no node works more than half of the time"),
    ],
)
def test_the_bottleneck_is_the_busiest_node_that_waits_for_nobody(
    busy: tuple[float, ...], blocked: tuple[float, ...], slowest: str, why: str
) -> None:
    names = ("generator", "reward", "trainer")
    nodes = [NodeNow(name, 1, fraction) for name, fraction in zip(names, busy, strict=True)]
    edges = [
        EdgeNow(EDGE, "generator", "reward", 1, 1, blocked[0]),
        EdgeNow("reward.scored -> trainer.batches", "reward", "trainer", 1, 1, blocked[1]),
    ]
    assert find_bottleneck(nodes, edges) == (slowest, why)


# Lines


def test_a_line_has_every_name_and_null_where_nothing_was_reported(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, Statistics(), roles={})
    metrics.write_line({"step": 1, "loss": 0.5, "kl": None, "entropy": math.nan})
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert list(line)[: len(METRIC_NAMES)] == list(METRIC_NAMES)
    assert line["edges"] == {}
    assert {name for name in METRIC_NAMES if line[name] is not None} == {"step", "loss", "time_s"}


def test_busy_time_stands_under_the_role_and_the_trainers_word_wins(tmp_path: Path) -> None:
    statistics = Statistics()
    metrics = Metrics(tmp_path, statistics, roles={"actor": "generator"})
    report(statistics, 1.0, actor_0=node(0.75, {"tokens_generated": 12, "loss": 9}))
    line = metrics.write_line({"step": 1, "loss": 0.5})
    assert (line["generator_busy_s"], line["tokens_generated"], line["loss"]) == (0.75, 12, 0.5)
    assert "actor_busy_s" not in line


def test_a_resumed_file_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "time_s": 10.0 * step}) + "\n" for step in (1, 2, 3)) + '{"st')
    rewind_lines(path, 2)
    metrics = Metrics(tmp_path, Statistics(), roles={})
    line = metrics.write_line({"step": 3})
    assert [entry["step"] for entry in read_lines(path)] == [1, 2, 3]
    assert 20.0 <= line["time_s"] < 30.0


class Recorder:
    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.written.append((step, dict(scalars)))

    def close(self) -> None:
        self.closed = True


def test_sinks_get_the_numbers_of_the_same_record(tmp_path: Path) -> None:
    statistics, sink = Statistics(), Recorder()
    metrics = Metrics(tmp_path, statistics, roles={}, sinks=[sink])
    statistics.add_report({"lanes": {LANE: lane(3, 0.5)}}, 0.0)
    line = metrics.write_line({"step": 4, "loss": 0.5, "kl": None})
    metrics.write_evaluation("during", 3, {"evaluation/score": 0.25})
    metrics.close()
    scalars = {
        "loss": 0.5,
        "time_s": line["time_s"],
        f"edges/{EDGE}/depth": 3,
        f"edges/{EDGE}/blocked_s": 0.5,
        **{f"alarm/{name}": 0.0 for name in ALARMS},
    }
    assert sink.written == [(4, scalars), (4, {"evaluation/score": 0.25, "evaluation/step": 3})]
    assert sink.closed


def test_an_evaluation_on_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    records = RunRecords.__new__(RunRecords)  # without a run: its files alone
    records._job = cast(Job, SimpleNamespace(run_dir=tmp_path))
    records.metrics = Metrics(tmp_path, Statistics(), roles={})
    (tmp_path / EVALUATIONS).symlink_to("/dev/full")
    with pytest.raises(FlowrlError, match="cannot be written: No space left on device; make room there, then continue"):
        records.write_evaluation("before", 0, {"score": 0.25})
    (tmp_path / EVALUATIONS).unlink()
    records.write_evaluation("before", 0, {"score": 0.25})
    records.metrics.close()
    (line,) = (tmp_path / EVALUATIONS).read_text().splitlines()
    assert json.loads(line)["evaluation/score"] == 0.25


def test_an_evaluation_is_a_line_of_a_file_of_its_own_and_rewinds(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, Statistics(), roles={})
    metrics.write_evaluation("before", 0, {"evaluation/score": 0.25, "evaluation/pass_at_2": float("nan")})
    metrics.write_line({"step": 1})
    metrics.write_evaluation("during", 1, {"evaluation/score": 0.5})
    metrics.write_evaluation("after", 2, {"evaluation/score": 0.75})
    metrics.close()
    file = tmp_path / EVALUATIONS
    lines = [{name: value for name, value in line.items() if name != "time_s"} for line in read_lines(file)]
    assert lines == [
        {"step": 0, "phase": "before", "evaluation/score": 0.25, "evaluation/pass_at_2": None},
        {"step": 1, "phase": "during", "evaluation/score": 0.5},
        {"step": 2, "phase": "after", "evaluation/score": 0.75},
    ]
    assert len(read_lines(tmp_path / METRICS)) == 1
    rewind_lines(file, 1)
    assert [line["phase"] for line in read_lines(file)] == ["before", "during"]


def test_only_numbers_are_scalars() -> None:
    assert flatten_numbers({"a": 1, "b": {"c": 2.5, "d": None}, "e": "text"}) == {"a": 1.0, "b/c": 2.5}


def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    metrics = Metrics(tmp_path, Statistics(), roles={}, sinks=open_sinks(["tensorboard"], tmp_path, {}))
    for step in (1, 2):
        metrics.write_line({"step": step, "reward_mean": step / 4})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    values = [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors("reward_mean")]
    assert values == [(1, 0.25), (2, 0.5)]


def test_tensorboard_shows_samples_as_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tables = SampleTables(Tracking(samples=2, samples_every=2))
    sinks = open_sinks(["tensorboard"], tmp_path, {})
    metrics = Metrics(tmp_path, Statistics(), roles={}, sinks=sinks, tables=tables)
    for step in (1, 2, 3):
        for member in range(3):
            tables.add_row({"step": step, "prompt": "1|1\n<b>", "response": f"r{step}{member}", "state": "trained"})
        metrics.write_line({"step": step})
    tables.add_row({"step": 3, "prompt": "p", "response": "held", "state": "held_out", "reward": 0.5})
    metrics.write_evaluation("during", 3, {"evaluation/score": 0.5})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    texts = [(one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors("samples/text_summary")]
    assert [step for step, _ in texts] == [1, 3], "every second step"
    assert "| r11 |" in texts[0][1] and "r10" not in texts[0][1], "the last two"
    assert "1&#124;1<br>&lt;b>" in texts[0][1]
    (held_out,) = events.Tensors("held_out_samples/text_summary")
    assert b"| held | 0.5 |" in held_out.tensor_proto.string_val[0]
    assert format_markdown([]).count("\n") == 1


def test_a_run_is_named_by_option_then_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert Tracking(project="mine").find_name("project", "WANDB_PROJECT") == "mine"
    assert Tracking().find_name("project", "OTHER", "WANDB_PROJECT") == "theirs"
    monkeypatch.delenv("WANDB_PROJECT")
    assert Tracking().find_name("project", "WANDB_PROJECT") is None
    with pytest.raises(ConfigError, match=r"--tracking\.samples-every is -1"):
        Tracking(samples_every=-1)


class Tracker:
    """Stands for the packages wandb and trackio: it keeps what a run was begun with."""

    Error = RuntimeError

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []

    def init(self, **given: Any) -> None:
        self.begun.append(given)


@pytest.mark.parametrize("sink", [WandB, Trackio])
def test_a_new_run_continues_no_other_and_a_resumed_one_continues_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: type[WandB | Trackio]
) -> None:
    package = Tracker()
    monkeypatch.setattr(sinks, "_import_module", lambda *names: package)
    first, other = tmp_path / "a" / "runs#1", tmp_path / "b" / "runs#1"
    for run_dir in (first, other, first):
        run_dir.mkdir(parents=True, exist_ok=True)
        sink(run_dir, {}, Tracking())
    own, others, again = ((given.get("id") or given["name"]) for given in package.begun)
    assert own == again != others
    assert all(given["name"].startswith("runs#1") for given in package.begun)
    assert package.begun[0].get("id", "0").isalnum(), "W&B refuses some other characters"


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_in_the_run_directory(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_dir = tmp_path / "grpo-7"
    run_dir.mkdir()
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", TRACKED, str(run_dir)], env=environment, check=True, timeout=90)
    (kept,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")  # its last block is written when the process ends
    content = kept.read_bytes()
    for expected in (
        b"reward_mean",
        b"evaluation/score",
        b"0.75",
        b"0.25",
        b"alarm/kl_drift",
        b"mine",
        b"pair",
        b"first",
    ):
        assert expected in content, expected
    (first, second) = sorted(run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.json"))
    assert {"answer 1", "answer 2"} == {json.loads(path.read_text())["data"][0][3] for path in (first, second)}


TRACKED = """
import sys
from pathlib import Path
from flowrl.runtime.telemetry.metrics import Metrics
from flowrl.runtime.telemetry.sinks import open_sinks
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.runtime.telemetry.sinks import SampleTables, Tracking
run_dir = Path(sys.argv[1])
tables = SampleTables(Tracking(samples_every=1))
tracking = Tracking(project="mine", group="pair", name="first")
sinks = open_sinks(["wandb"], run_dir, {"lr": 0.5}, tracking)
metrics = Metrics(run_dir, Statistics(), roles={}, sinks=sinks, tables=tables)
for step in (1, 2):
    tables.add_row({"step": step, "prompt": "1+1=", "response": f"answer {step}", "state": "trained"})
    metrics.write_line({"step": step, "reward_mean": step / 4})
metrics.write_evaluation("during", 2, {"evaluation/score": 0.75})
metrics.close()
"""


@pytest.mark.slow
def test_trackio_keeps_a_run_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("trackio")
    run_dir = tmp_path / "grpo-7"
    run_dir.mkdir()
    # A driver opens its sinks in another task than it writes in: what is context of the one is not of the other.
    sinks = contextvars.copy_context().run(open_sinks, ["trackio"], run_dir, {"lr": 0.5})
    tables = SampleTables(Tracking(samples_every=1))
    metrics = Metrics(run_dir, Statistics(), roles={}, sinks=sinks, tables=tables)
    for step in (1, 2):
        tables.add_row({"step": step, "prompt": "1+1=", "response": f"answer {step}", "state": "trained"})
        metrics.write_line({"step": step, "reward_mean": step / 4})
    metrics.close()
    (database,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as db:
        rows = [json.loads(row) for (row,) in db.execute("SELECT metrics FROM metrics ORDER BY step")]
    assert [row["reward_mean"] for row in rows if "reward_mean" in row] == [0.25, 0.5]
    assert "answer 2" in json.dumps(rows)


def test_an_unknown_sink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no metrics sink is called 'tensorbord'; there are tensorboard"):
        open_sinks(["tensorbord"], tmp_path, {})


def test_a_sink_whose_package_is_missing_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match="metrics go to wandb, which is not installed"):
        open_sinks(["wandb"], tmp_path, {})


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [("WANDB_MODE", "", True), ("WANDB_MODE", "offline", False), ("WANDB_API_KEY", "a" * 40, False)],
)
def test_who_is_not_logged_in_is_told_before_the_run(tmp_path: Path, variable: str, value: str, refused: bool) -> None:
    pytest.importorskip("wandb")
    program = (
        "from flowrl.errors import ConfigError\n"
        "from flowrl.runtime.telemetry.sinks import require_logins\n"
        "try: require_logins(['tensorboard', 'wandb'])\n"
        "except ConfigError as error: print(error)"
    )
    known = {name: text for name, text in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**known, "HOME": str(tmp_path), **({variable: value} if value else {})}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("metrics go to wandb, where nobody is logged in; run wandb login") == refused
    assert bool(done.stdout) == refused
