"""`flowrl tune GRAPH`: where the time of a step goes on these devices, and the placement with the shortest step.

Short real runs measure the stages alone and together (`calibration`); the cost model predicts the step of every
placement that fits (`cost_model`, `placements`); the placements that are predicted to be the fastest are run to see how
far off the prediction is; the fastest of them is written to a run file. Every finished run is kept, so the command can
be interrupted, and continues where it stopped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flowrl.commands.prepare import Prepared, prepare_graph
from flowrl.commands.tune.calibration import Calibration, calibration_runs
from flowrl.commands.tune.measured_step import FEWEST, SKIPPED, MeasuredStep, measured_step
from flowrl.commands.tune.measurements import Measurements, measurement_key
from flowrl.commands.tune.measuring_run import RunTimedOut, remove_heavy, run_graph
from flowrl.commands.tune.placements import find_placements
from flowrl.commands.tune.tune_report import TunedRow, choose_row, in_order, row_records, row_table
from flowrl.commands.tune.tuned_graph import TunedGraph
from flowrl.commands.tune.tuned_placement import TunedPlacement
from flowrl.errors import ConfigError, FlowrlError, GraphError
from flowrl.graph.analysis.check import check
from flowrl.graph.load import dump_options, user_code
from flowrl.graph.machine import Cluster
from flowrl.graph.option_types import changed_config
from flowrl.graph.run_file import run_file_text
from flowrl.machine.orphans import ending_in_order
from flowrl.runtime.checkpoints.rundir import describe_origin, lock_directory
from flowrl.runtime.telemetry.metrics import node_roles
from flowrl.runtime.telemetry.standard_streams import print_text

CHOSEN = "chosen.yaml"


@dataclass(frozen=True)
class TuneOptions:
    """Options of `flowrl tune`."""

    steps: int = 20
    """Number of steps of each measured run."""
    run_dir: Path | None = None
    """Directory of the measurements, the runs and the result; None: runs/tune-GRAPH. What was measured before is not
    measured again."""
    verify: int = 2
    """Run this many of the placements that are predicted to be the fastest, and print how far off the prediction is."""
    most_staleness: int | None = None
    """Largest staleness of a placement; None: that of the graph."""
    budget: float | None = None
    """Minutes after which no run starts or continues; None: no limit."""
    again: bool = False
    """Repeat measurements that the directory already has."""
    dry_run: bool = False
    """Print the placements that fit and the runs that would be measured, and start nothing."""
    json: bool = False
    """Print one object of JSON in place of the table."""
    cluster: str = ""
    """Machines to plan for instead of this one, as in `flowrl check --cluster`; needs --dry-run or RAY_ADDRESS."""
    config: Path | None = None
    """Read options from this run file (YAML). Options on the command line take precedence; options from both are kept
    as given."""
    save_config: Path | None = None
    """Write the run file of the chosen placement here; None: chosen.yaml in the directory."""

    def __post_init__(self) -> None:
        for name, least in (("verify", 0), ("most_staleness", 0), ("steps", SKIPPED + FEWEST)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it has to be {least} or more")
        if self.budget is not None and not self.budget > 0:
            raise ConfigError(f"--budget is {self.budget}; it has to be above 0")


def tune_graph(args: Sequence[str]) -> int:
    """Measure, predict, verify, choose; returns the exit status. Raises FlowrlError."""
    prepared = prepare_graph("tune", (TuneOptions,), args)
    (options,) = prepared.own
    cluster = _parse_cluster(options)
    with user_code(prepared.file.path):
        found, runs, tuned = _list_placements(prepared, options, cluster)
    if options.dry_run:
        return _show_rows(found, runs, options)
    if len(found) == 1:
        print_text(f"flowrl: the given options leave one placement, {found[0].in_words}", stream=sys.stderr)
    directory = options.run_dir or Path("runs") / f"tune-{prepared.graph.name}"
    _refuse_files(options, directory)
    with lock_directory(directory, option="--run-dir", holder="flowrl tune"):
        with ending_in_order():
            tuning = Tuning(prepared, options, tuned, directory)
            rows = tuning.make_rows(found, runs)
        best = choose_row(rows)
        if best is None:
            raise FlowrlError(
                f"--budget {options.budget:g}: the time was up before a step could be predicted; what was measured is "
                f"in {directory}, and the same command goes on with it"
            )
        _print_report(
            rows, best, _write_files(prepared, best.placement, options.save_config or directory / CHOSEN), options
        )
    return 0


def _parse_cluster(options: TuneOptions) -> Cluster:
    elsewhere = bool(os.environ.get("RAY_ADDRESS"))
    if options.cluster and not (options.dry_run or elsewhere):
        raise ConfigError(
            "--cluster names machines that this command cannot measure; add --dry-run to see what fits there, or set "
            "RAY_ADDRESS to that cluster"
        )
    if elsewhere and not options.cluster:
        raise ConfigError("RAY_ADDRESS is set; name the machines of that cluster with --cluster, as '2 x 8 x H100'")
    return Cluster.parse(options.cluster) if options.cluster else Cluster.here()


def _list_placements(
    prepared: Prepared, options: TuneOptions, cluster: Cluster
) -> tuple[list[TunedPlacement], list[TunedPlacement], TunedGraph]:
    """(placements that fit, placements to measure, the graph). Raises GraphError and ConfigError."""
    report = check(prepared.graph, cluster)
    if report.problems and not report.too_large:
        raise GraphError(report.problems)
    tuned = TunedGraph(prepared.file, prepared.cfg, cluster, prepared.asked, options.most_staleness)
    assert tuned.trainer
    found = find_placements(tuned)
    if not found:
        raise GraphError(report.problems or ("no placement of the graph fits; flowrl check says what it needs.",))
    if not (runs := calibration_runs(find_placements(tuned, wide=True))):
        raise ConfigError(
            f"flowrl tune measures each stage by itself, at staleness 0, and {prepared.file.shown} has no such "
            "placement on these machines; compare placements of yours by flowrl run --steps 20"
        )
    longest = max(one.ahead for one in (*found, *runs))
    if options.steps < (least := SKIPPED + FEWEST + longest):
        raise ConfigError(
            f"--steps is {options.steps}; with staleness {longest} a measurement needs {least} or more: {SKIPPED} that "
            f"fill the pipeline, {FEWEST} to measure, {longest} that empty it"
        )
    return found, runs, tuned


def _refuse_files(options: TuneOptions, directory: Path) -> None:
    """Raise ConfigError if the directory is a file, or if a run file would be replaced."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--run-dir {directory} is a file; name a directory")
    if options.save_config is not None and options.save_config.exists():
        raise ConfigError(f"--save-config {options.save_config}: the file is there already and is not replaced")


@dataclass
class Tuning:
    """The measured runs of one command."""

    prepared: Prepared
    options: TuneOptions
    tuned: TunedGraph
    directory: Path
    _began_s: float = field(default_factory=time.monotonic)
    _longest_s: float = 0.0
    """Seconds of the longest run so far."""
    _over: bool = False
    """Whether the time budget is used up."""

    def make_rows(self, found: Sequence[TunedPlacement], runs: Sequence[TunedPlacement]) -> list[TunedRow]:
        """Predictions for all of `found` from measurements of `runs`; the fastest predictions are verified."""
        self._measurements = Measurements(self.directory, again=self.options.again)
        keys = [self._result_key("calibrate", one) for one in runs]
        if any(self._measurements.find_result(key) is None for key in keys):
            self._run_preflight()
        measured = [
            (one, self._measure_placement("calibrate", one, f"{i} of {len(runs)}")) for i, one in enumerate(runs, 1)
        ]
        calibration = Calibration(tuple((one, step) for one, step in measured if step is not None))
        rows = in_order([TunedRow(one, calibration.predict_placement(one)) for one in found])
        first = [row for row in rows if row.predicted is not None][: self.options.verify]
        for number, row in enumerate(first, 1):
            step = self._measure_placement("verify", row.placement, f"{number} of {len(first)}")
            rows[rows.index(row)] = replace(row, verified=step)
        return rows

    def _run_preflight(self) -> None:
        """Do once the checks that a run does before it starts: models, data, reward."""
        from flowrl.runtime.driver.launch import preflight

        preflight(self.prepared.graph, self.prepared.file.path)

    def _measure_placement(self, purpose: str, placement: TunedPlacement, which: str) -> MeasuredStep | None:
        """The mean step of a placement, measured now or before; None if there is no time to measure it."""
        key = self._result_key(purpose, placement)
        known = self._measurements.find_result(key)
        how = "measured before" if known is not None else "measuring"
        if known is None and not self._has_time():
            how = f"left out, --budget {self.options.budget:g} is over"
        self._report_run(f"{purpose} {which}: {placement.in_words}: {how}")
        if known is not None or not self._has_time():
            return known
        try:
            step = self._run_placement(key, placement)
        except RunTimedOut:
            self._over = True
            self._report_run(f"{purpose} {which}: ended, --budget {self.options.budget:g} is over")
            return None
        self._longest_s = max(self._longest_s, step.wall_s)
        self._measurements.add_result(key, step)
        return step

    def _has_time(self) -> bool:
        return not self._over and self._left_s() > self._longest_s

    def _left_s(self) -> float:
        budget = self.options.budget
        return float("inf") if budget is None else 60 * budget - (time.monotonic() - self._began_s)

    def _run_placement(self, key: str, placement: TunedPlacement) -> MeasuredStep:
        """Run a placement, and read how long its steps took."""
        cfg = changed_config(self.tuned.measured_cfg, placement.options)
        config, run_dir = self.directory / f"{key}.yaml", self.directory / key
        config.write_text(run_file_text(self.prepared.file.shown, dump_options(cfg)), encoding="utf-8")
        load, left_s = os.getloadavg()[0], self._left_s()
        limit_s = None if self.options.budget is None else left_s
        public = node_roles(self.tuned.base_graph)
        stages = {stage.node: (public.get(stage.node, stage.node), stage.size.replicas) for stage in placement.stages}
        try:
            wall_s = run_graph(config, run_dir, steps=self.options.steps, limit_s=limit_s)
            return measured_step(
                run_dir, stages, trainer=self.tuned.trainer, tail=placement.ahead, load=load, wall_s=wall_s
            )
        finally:  # also for a run that was interrupted
            remove_heavy(run_dir)

    def _result_key(self, purpose: str, placement: TunedPlacement) -> str:
        cfg = changed_config(self.tuned.measured_cfg, placement.options)
        return measurement_key(purpose, self.prepared.file.path, dump_options(cfg), **self._circumstances)

    @cached_property
    def _circumstances(self) -> dict[str, Any]:
        """What a measurement depends on besides the graph and its options."""
        return {
            "steps": self.options.steps,
            "packages": describe_origin(self.prepared.file.path)["packages"],
            "machines": [(len(one.cores), one.gpus) for one in self.tuned.cluster.machines],
        }

    @staticmethod
    def _report_run(text: str) -> None:
        print_text(text, stream=sys.stderr, flush=True)


def _write_files(prepared: Prepared, placement: TunedPlacement, path: Path) -> Path:
    """Write the run file of a placement, with the user's own options."""
    of_run = {name: str(value) if isinstance(value, Path) else value for name, value in prepared.of_run.items()}
    cfg = changed_config(prepared.cfg, placement.options)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(run_file_text(prepared.file.shown, of_run, dump_options(cfg)), encoding="utf-8")
    temporary.replace(path)
    return path


def _show_rows(found: Sequence[TunedPlacement], runs: Sequence[TunedPlacement], options: TuneOptions) -> int:
    """Print placements and runs; nothing was started."""
    if options.json:
        plain = [[{"placement": one.in_words, "options": one.as_options} for one in some] for some in (found, runs)]
        print_text(json.dumps(dict(zip(("placements", "runs"), plain, strict=True))))
        return 0
    for title, some in ((f"{len(found)} placements fit:", found), (f"\n{len(runs)} runs would be measured:", runs)):
        print_text(title)
        for placement in some:
            print_text(f"  {placement.in_words}\n      {placement.as_options}")
    return 0


def _print_report(rows: Sequence[TunedRow], best: TunedRow, path: Path, options: TuneOptions) -> None:
    loads = [row.verified.load for row in rows if row.verified is not None]
    if options.json:
        print_text(json.dumps({"config": str(path), "rows": list(row_records(rows, best))}))
        return
    print_text(row_table(rows, best))
    if missing := sum(row.predicted is None for row in rows):
        print_text(f"\n{missing} without a prediction: the time was up before the runs that it needs were measured")
    if loads:
        print_text(f"\nload average before the verified runs: {min(loads):.1f} to {max(loads):.1f}")
    print_text(f"\nchosen: {best.placement.as_options}\nflowrl run --config {path}")
