"""`run_graph`: a whole graph in this process, with the real driver, hosts, ledger and nodes; no Ray, no children.

Messages between hosts are handed over as objects, frozen as they are within a host. Nothing is pinned to cores. The
run ends as `flowrl run` ends, or after `timeout_s` with TimeoutError.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.graph import Graph
from flowrl.graph.load import load_file
from flowrl.graph.machine import Cluster, Machine
from flowrl.runtime.audit.audit import AuditReport, audit
from flowrl.runtime.checkpoints import resume as resuming
from flowrl.runtime.checkpoints.rundir import RunDir
from flowrl.runtime.driver.driver import Outcome
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.launch import Launch, RunStart
from flowrl.runtime.driver.local_cluster import LocalCluster
from flowrl.runtime.process.engine import ProcessEngine
from flowrl.runtime.telemetry import metrics
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.testing.clock import VirtualClock, run_on
from flowrl.testing.stand_ins import stand_in
from flowrl.wire.activity import HostLoop

EIGHT_CORES = Cluster((Machine(tuple(range(8)), memory_bytes=64 << 30),))


@dataclass
class KeptView:
    """A view that keeps what a terminal would have shown."""

    lines: list[str] = field(default_factory=list)
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """The metrics lines of this life of the run."""
    sample_ids: list[str] = field(default_factory=list)
    """Samples kept, in the order in which their states became known."""

    def progress(self, replica_id: str, text: str) -> None:
        self.lines.append(f"{replica_id}: {text}")

    def warning(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    def evaluation(self, phase: str, step: int, figures: Mapping[str, float], task: str = "") -> None:
        first = figures["exact_match" if "exact_match" in figures else "score"]
        self.lines.append(f"evaluation {phase} at {step}: {first} of {figures['num_answers']:.0f} {task}")

    def held_out(self, record: Mapping[str, Any]) -> None:
        self.lines.append(f"held-out rows at {record['step']}")

    def sample(self, row: Mapping[str, Any]) -> None:
        self.sample_ids.append(row["sample_id"])

    def step(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        """Kept nowhere: it changes every second."""

    def close(self) -> None:
        """There is no terminal to restore."""

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("warning: ")]


@dataclass(frozen=True)
class GraphRun:
    """A run that has ended, and what it left in its directory."""

    directory: Path
    outcome: Outcome | None
    error: Exception | None
    """What the run raised, None after an orderly end."""
    view: KeptView

    @property
    def steps(self) -> list[int]:
        """The numbers of the batches that this life of the run finished."""
        return [record["step"] for record in self.view.records]

    def audit(self) -> AuditReport:
        """What `flowrl audit` finds; `audit().ok`."""
        return audit(self.directory)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one a batch."""
        return metrics.read_lines(self.directory / "metrics.jsonl")

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """What an SQL query finds in the ledger."""
        with closing(sqlite3.connect(self.directory / "ledger.sqlite")) as db:
            return db.execute(query, arguments).fetchall()

    def states(self) -> dict[str, int]:
        """Number of samples in each "state" or "state: reason"."""
        counted = self.rows("SELECT state, reason, COUNT(*) FROM samples GROUP BY 1, 2")
        return {f"{state}: {reason}" if reason else state: count for state, reason, count in counted}

    def raise_for_error(self) -> GraphRun:
        """This run, if it ended in order; else raises its `error`."""
        if self.error is not None:
            raise self.error
        return self


def run_graph(
    file: Path | str,
    run_dir: Path,
    config: Mapping[str, Any] | None = None,
    *,
    steps: int | None = None,
    resume: bool = False,
    timeout_s: float = 60.0,
    clock: VirtualClock | None = None,
    cluster: Cluster = EIGHT_CORES,
    preflight: bool = True,
    must_succeed: bool = True,
    stand_ins: bool = False,
    **options: Any,
) -> GraphRun:
    """Check and run a graph, given by file or name, as `flowrl run` does, with records in `run_dir`:

        ran = run_graph("graphs/my_graph.py", tmp_path / "run", {"group_size": 4}, steps=6)
        assert ran.states() == {"trained": 48} and ran.audit().ok

    `config` overrides fields of the graph's configuration; `options` are further ones of `flowrl run` (`RunOptions`:
    seed, save_every, ...). `cluster` is the machine that the graph is checked and planned for. With a `clock` the run
    takes place in its time, and so does its timeout.

    With `stand_ins`, what is heavy in flowrl's nodes is made up (`flowrl.testing.stand_ins`): vLLM, the model in
    training, models that score. Rewards, losses and your own nodes are real.

    Raises GraphError where `flowrl check` finds problems, and what the run raises; without `must_succeed` the latter
    is the `error` of the GraphRun.
    """
    loaded = load_file(file)
    cfg = loaded.config_type(**(config or {}))
    graph = loaded.build(cfg)
    check(graph, cluster).raise_for_problems()
    engine: type[ProcessEngine] = ProcessEngine
    if stand_ins:
        graph, engine = stand_in(graph, run_dir), StandInProcess
    if preflight:
        for node in graph.nodes.values():
            node.preflight()
    launch = Launch(loaded.path, graph, cfg, RunOptions(steps=steps, run_dir=run_dir, resume=resume, **options))
    ran = run_in_process(launch, cluster, LocalCluster(engine), timeout_s=timeout_s, clock=clock)
    return ran.raise_for_error() if must_succeed else ran


class StandInProcess(ProcessEngine):
    """The engine of a process whose nodes have stand-ins."""

    def build_graph(self) -> Graph:
        return stand_in(super().build_graph(), Path(self.spec.places[0].run_dir))


def run_in_process(
    launch: Launch,
    cluster: Cluster,
    hosts: LocalCluster,
    *,
    timeout_s: float,
    clock: VirtualClock | None = None,
    began: Callable[[Plan], None] = lambda plan: None,
) -> GraphRun:
    """Run what has been checked on `hosts`; the result has what the run raises. `began` is called on the loop."""
    options = launch.options
    assert options.run_dir is not None, "the caller names it"
    directory = RunDir(options.run_dir)
    directory.claim(resume=options.resume)
    view = KeptView()
    try:
        start = _find_start(launch, directory, cluster)

        async def drive() -> Outcome:
            began(start.plan)
            async with asyncio.timeout(timeout_s):
                return await launch.drive_run(start, cast(Any, hosts), view)

        try:
            outcome = run_on(HostLoop, drive()) if clock is None else clock.run(drive())
        except Exception as error:  # a test examines whatever the run raises
            return GraphRun(directory.path, None, error, view)
        return GraphRun(directory.path, outcome, None, view)
    finally:
        directory.release()


def _find_start(launch: Launch, directory: RunDir, cluster: Cluster) -> RunStart:
    """The start of the launch after its checks, with the checkpoint that a resumed run continues from."""
    version, resume_from = directory.newest_checkpoint() if launch.options.resume else (0, None)
    plan = make_plan(launch.graph, cluster)
    if resume_from is None:
        launch.write_description(directory, plan)
        return RunStart(directory, plan)
    versions = resuming.require_resumable(resume_from, launch.graph, plan, launch.options.seed)
    return RunStart(directory, plan, version, resume_from, versions)
