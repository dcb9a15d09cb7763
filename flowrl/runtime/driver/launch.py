"""`flowrl run`: from a declared graph to a finished run directory.

User mistakes are found before Ray starts, in this order: the graph's checks, the run directory, then every
node's preflight (models, tokenizer, task, reward, one trial reward).
"""

from __future__ import annotations

import asyncio
import math
import os
import pdb
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from flowrl.errors import ConfigError
from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.numbers import longest_asked
from flowrl.graph.analysis.plan import HostPlan, Plan, make_plan, routes_of
from flowrl.graph.analysis.size_rules import has_leftovers
from flowrl.graph.graph import Graph
from flowrl.graph.load import dump_options, user_code
from flowrl.graph.machine import Cluster, raise_limit
from flowrl.hub import pinned_commits, take_commits
from flowrl.machine.proxies import reach_directly
from flowrl.runtime.checkpoints import resume
from flowrl.runtime.checkpoints.rundir import (
    RunDir,
    convert_write_errors,
    describe_origin,
    make_files_private,
    read_best,
)
from flowrl.runtime.checkpoints.unfinished_evaluation import UnfinishedEvaluation
from flowrl.runtime.driver.driver import RunSignals
from flowrl.runtime.driver.job import RunOptions, check_options
from flowrl.runtime.driver.local_cluster import HereCluster, HereLoop, HereProcess, fit_here
from flowrl.runtime.driver.ray_cluster import require_same_versions
from flowrl.runtime.driver.resources import process_slots
from flowrl.runtime.ledger.ledger_file import Terms
from flowrl.runtime.samples.sample_notes import SampleShare
from flowrl.runtime.telemetry.sinks import require_logins
from flowrl.runtime.telemetry.standard_streams import LastingOutput, print_line

if TYPE_CHECKING:
    from flowrl.runtime.audit.audit import AuditReport
    from flowrl.runtime.driver.driver import Driver, Outcome
    from flowrl.runtime.driver.ray_cluster import RayCluster
    from flowrl.runtime.process.engine import ProcessSpec
    from flowrl.runtime.telemetry.view import View
    from flowrl.wire.connection import EndpointTransport


@dataclass(frozen=True)
class Result:
    """The result of a finished run."""

    run_dir: Path
    outcome: Outcome
    audit: AuditReport | None
    """None for graphs without admission: without tickets there is nothing to audit."""


@dataclass(frozen=True)
class RunStart:
    """Where and from what a run starts whose checks have passed."""

    directory: RunDir
    plan: Plan
    version: int = 0
    resume_from: Path | None = None
    """The checkpoint from which it continues."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Trainer -> the version from which it continues, if that is not `version`."""


@dataclass
class Launch:
    """One launch of one graph."""

    graph_file: Path
    graph: Graph
    config: Any
    options: RunOptions
    derived: str = ""
    """Text that says which options, left out by the user, were derived from the model's size; "" if none were."""
    started_s: float = field(default_factory=time.monotonic)
    """When the command was given; --max-hours counts from here."""
    advise: Callable[[Mapping[str, Any]], str] | None = None
    """As in `Job`."""
    trial: Callable[[], str] | None = None
    """Waits for a trial of the graph, and returns what the user should know of it; called when everything else is
    checked. Raises ConfigError for a mistake."""
    here: bool = False
    """Whether all nodes run in this process, without Ray."""
    driver: Driver | None = None
    """Runs it, as soon as it begins."""
    called: str = ""
    """The beginning of the name of a directory that the user does not name; "": the graph's name."""

    def run(self) -> Result:
        """Check, prepare, run, audit. Raises FlowrlError with a message for the user."""
        from flowrl.runtime.driver.ray_cluster import RayCluster

        raise_limit()
        reach_directly()
        changes = fit_here(self.graph) if self.here else []
        cluster: Any = HereCluster(HereProcess) if self.here else RayCluster()
        directory = None
        try:
            machines = self._find_machines(cluster)
            with user_code(self.graph_file):
                check(self.graph, machines).raise_for_problems()
                directory = self._claim_directory()
            return self._run_in(directory, machines, cluster, changes)
        finally:
            cluster.stop()
            if directory is not None:
                directory.release()

    def _claim_directory(self) -> RunDir:
        """The claimed directory of the run: a new one, or that of the run that is continued."""
        named, resume = self.options.run_dir, self.options.resume
        if self.unfinished is not None and (self.unfinished.is_in(named) or not resume):
            return self.unfinished.claim_directory(named)
        if named is None and not resume:
            return RunDir.claimed_fresh(self.called or self.graph.name)
        return RunDir.open_claimed(named or RunDir.name_fresh(self.graph.name), resume=resume)

    @cached_property
    def unfinished(self) -> UnfinishedEvaluation | None:
        """What the answers depend on, for a graph that only evaluates; None for any other graph."""
        return UnfinishedEvaluation.of(self.graph, dump_options(self.config))

    def _find_machines(self, cluster: RayCluster) -> Cluster:
        """Join a running cluster now, because the plan depends on its machines; flowrl's own Ray starts later."""
        if self.here or not os.environ.get("RAY_ADDRESS"):
            return Cluster.here()
        limit_s = 60 * self.options.start_minutes
        cluster.start(graph_dir=self.graph_file.parent, num_cpus=0, num_gpus=0, limit_s=limit_s)
        machines = cluster.machines()
        reach_directly(*cluster.addresses)
        if len(machines.machines) > 1:
            require_same_versions()
        return machines

    def _run_in(self, directory: RunDir, machines: Cluster, cluster: RayCluster, changes: Sequence[str]) -> Result:
        from flowrl.runtime.audit.audit import audit

        resumes = self.options.resume and not directory.goes_on
        version, resume_from = directory.newest_checkpoint() if resumes else (0, None)
        if resume_from is not None:
            self._check_steps(version, resume_from)
        check_options(self.options, self.graph)
        plan = make_plan(self.graph, machines)
        versions: dict[str, int] = {}
        if resume_from is not None:
            versions = resume.require_resumable(resume_from, self.graph, plan, self.options.seed)
            take_commits(directory.hub_commits())
            read_best(directory.path, newest_step=version)  # a damaged one is refused before anything starts
        findings = preflight(self.graph, self.graph_file)
        if self.trial is not None:
            findings["trial"] = self.trial()
        if self._left_s <= 0:
            raise ConfigError(f"--max-hours {self.options.max_hours:g} were over before the set-up ended; give it more")
        require_logins(self.options.track)
        view = self._open_view(plan, directory.path)
        for name, text in findings.items():
            view.progress(name, text)
        view.progress("driver", f"records go to {directory.path}")
        if self.derived:
            view.progress("driver", self.derived)
        for text in changes:
            view.warning(f"--here: {text}")
        if resume_from is not None and (changed := directory.changed_config(dump_options(self.config))):
            view.warning(f"--resume has other options than the run was started with: {'; '.join(changed)}")
        if directory.goes_on:
            view.progress("driver", "continuing an evaluation that ended early: its answers are kept")
        for problem in directory.damaged:
            assert resume_from is not None
            view.warning(f"checkpoint {problem}; it is put aside, and the run continues from {resume_from.name}")
        try:
            with make_files_private():
                if resume_from is None:
                    self.write_description(directory, plan)
                    if self.unfinished is not None:
                        self.unfinished.mark_begun(directory)
                if not cluster.started:
                    view.progress("driver", "starting Ray")
                    num_cpus = max(len(machines.machines[0].cores), len(plan.hosts))
                    where, num_gpus = self.graph_file.parent, machines.num_gpus
                    cluster.start(
                        graph_dir=where,
                        num_cpus=num_cpus,
                        num_gpus=num_gpus,
                        limit_s=60 * self.options.start_minutes,
                        warn=view.warning,
                    )
                start = RunStart(directory, plan, version, resume_from, versions)
                try:
                    with asyncio.Runner(loop_factory=HereLoop if self.here else None) as runner, self._debug_in(view):
                        outcome = runner.run(self.drive_run(start, cluster, view))
                except asyncio.CancelledError:  # a second interrupt
                    raise KeyboardInterrupt from None
        finally:
            view.close()
        if self.unfinished is not None:
            self.unfinished.mark_ended(directory)
        cluster.stop()  # others may use its GPUs while this process audits the ledger
        return Result(directory.path, outcome, audit(directory.path) if plan.admission is not None else None)

    @contextmanager
    def _debug_in(self, view: View) -> Iterator[None]:
        """Inside, `breakpoint()` in a node of this process stops the view, and enters a debugger in the caller's frame.
        A debugger that the user has chosen (PYTHONBREAKPOINT, sys.breakpointhook) is kept."""
        before = sys.breakpointhook

        def enter_debugger(*args: Any, **options: Any) -> Any:
            if isinstance(view, LiveView):
                view.stop_drawing()
            if before is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT"):
                return before(*args, **options)
            return pdb.Pdb().set_trace(sys._getframe(1))

        from flowrl.runtime.telemetry.view import LiveView

        if self.here:
            sys.breakpointhook = enter_debugger
        try:
            yield
        finally:
            sys.breakpointhook = before

    def _open_view(self, plan: Plan, run_dir: Path) -> View:
        from flowrl.runtime.telemetry.view import Board, SafeConsole, open_view

        board = Board(
            name=self.graph.name,
            run_dir=str(run_dir),
            steps=self.options.steps,
            bound=plan.numbers.max_staleness,
            capacities={edge.name: edge.capacity for edge in plan.edges},
        )
        told = sys.stderr

        def say_lost(error: OSError) -> None:
            print_line(
                f"flowrl: the output of the run cannot be written ({error.strerror or error}); the run goes on without "
                f"it, and its records go to {run_dir}",
                told,
            )

        output = cast(TextIO, LastingOutput(sys.stdout, say_lost))
        return open_view(
            board, SafeConsole(file=output, force_terminal=False if self.options.plain or self.here else None)
        )

    def _check_steps(self, version: int, resume_from: Path) -> None:
        steps = self.options.steps
        if steps == version and resume.lacks_evaluation(resume_from, self.graph, version):
            return
        if steps is not None and steps <= version:
            raise ConfigError(
                f"--resume: the newest checkpoint is of step {version} and --steps is {steps}, so "
                "nothing is left to do; ask for more steps"
            )

    @property
    def _left_s(self) -> float:
        """Seconds that --max-hours leaves."""
        hours = self.options.max_hours
        return math.inf if hours is None else 3600 * hours - (time.monotonic() - self.started_s)

    @contextmanager
    def limit_hours(self, stop: Callable[[str], None]) -> Iterator[None]:
        """Inside, `stop` is called with a reason when the hours of the run are over."""
        if self.options.max_hours is None:
            yield
            return
        reason = f"--max-hours {self.options.max_hours:g} are over; a checkpoint follows the current batch"
        timer = asyncio.get_running_loop().call_later(max(0.0, self._left_s), stop, reason)
        try:
            yield
        finally:
            timer.cancel()

    def write_description(self, directory: RunDir, plan: Plan) -> None:
        """Write the description of the run: `config.json` and `graph.json`."""
        options = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.options).items()}
        config = {
            "graph": self.graph.name,
            "graph_file": str(self.graph_file),
            "config": dump_options(self.config),
            "options": options,
            "hub": pinned_commits(),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **describe_origin(self.graph_file),
        }
        directory.write_json("config.json", config)
        directory.write_json("graph.json", plan.to_json())

    async def drive_run(self, start: RunStart, cluster: RayCluster, view: View) -> Outcome:
        """Open the driver's endpoint and the ledger, and run what has been checked."""
        from flowrl.runtime.driver.driver import Driver
        from flowrl.runtime.driver.job import Job
        from flowrl.wire.connection import IpcTransport, TcpTransport
        from flowrl.wire.endpoint import Endpoint
        from flowrl.wire.run_files import remove_run, sweep

        sweep()
        run_id = uuid.uuid4().hex[:12]
        plan, run_dir = start.plan, start.directory.path
        one_machine = len({host.machine for host in plan.hosts}) == 1
        transport = IpcTransport() if one_machine else TcpTransport()
        endpoint = Endpoint(
            "driver",
            run_id=run_id,
            driver_pid=os.getpid(),
            transport=transport,
            failed=lambda error: driver.fail(error),
        )
        await endpoint.open()
        slots = process_slots(plan.hosts)
        cluster.place(slots)

        def rewind() -> None:
            if start.resume_from is not None:
                resume.rewind_run(run_dir, start.resume_from, start.version, Terms.of(plan.to_json()))
                self.write_description(start.directory, plan)

        job = Job(
            graph=self.graph,
            plan=plan,
            options=self.options,
            run_dir=run_dir,
            slots=slots,
            specs={host.name: self._process_spec(host, start, run_id, transport, cluster) for host in plan.hosts},
            resume_from=start.resume_from,
            start_version=start.version,
            start_versions=start.versions,
            rewind=rewind,
            advise=self.advise,
        )
        with convert_write_errors(run_dir):
            driver = Driver(job, cluster, endpoint, view, dump_options(self.config))
        asyncio.get_running_loop().set_exception_handler(lambda _, context: driver.fail_unretrieved(context))
        try:
            at_once = self.unfinished is not None
            signals = RunSignals(driver, view, at_once=at_once)
            # Python takes signals in the main thread only; a run in another one is ended by its owner.
            taken = signals if threading.current_thread() is threading.main_thread() else nullcontext()
            with taken, self.limit_hours(signals.end_in_time):
                self.driver = driver
                return await driver.run()
        finally:
            await endpoint.close()
            remove_run(run_id)

    def _process_spec(
        self, host: HostPlan, start: RunStart, run_id: str, transport: EndpointTransport, cluster: RayCluster
    ) -> ProcessSpec:
        from flowrl.runtime.process.context import ReplicaPlace
        from flowrl.runtime.process.engine import ProcessSpec

        plan, options = start.plan, self.options
        places = []
        for replica_id in host.nodes:
            node, replica = replica_id.split("/")
            place = ReplicaPlace(
                node=node,
                replica=int(replica),
                num_replicas=self.graph.placed[node].replicas,
                run_dir=str(start.directory.path.resolve()),
                seed=options.seed,
                steps=options.steps,
                keep_episodes=options.keep_episodes > 0,
                keep_samples=SampleShare.parse(options.keep_samples),
                keep_token_ids=options.keep_token_ids,
                cores=host.cores,
                gpus=host.gpus,
                resume_dir=str(start.resume_from.resolve()) if start.resume_from else None,
                start_version=start.versions.get(node, start.version),
                run_id=run_id,
                max_staleness=plan.numbers.max_staleness,
                max_reused_age=plan.numbers.max_reused_age,
                window=plan.numbers.window,
                longest_asked=longest_asked(self.graph, node),
                own_clock=node in plan.own_clock,
                has_leftovers=has_leftovers(self.graph, plan, node),
                in_pieces=node in plan.in_pieces,
                lease=host.lease,
                stand_ins=plan.stand_ins,
                weight_routes=routes_of(plan, node),
            )
            places.append(place)
        return ProcessSpec(
            process=host.name,
            run_id=run_id,
            driver_pid=os.getpid(),
            graph_file=str(self.graph_file.resolve()),
            config=dump_options(self.config),
            places=tuple(places),
            plan=plan,
            cores=host.cores,
            transport=transport,
            commits=pinned_commits(),
            directory=os.getcwd(),
            machines=cluster.addresses,
        )


def run(graph_file: Path, graph: Graph, config: Any, options: RunOptions, *, called: str = "") -> Result:
    """Run `graph`, built from `graph_file` with `config`; `called` is that of `Launch`."""
    return Launch(graph_file, graph, config, options, called=called).run()


__all__ = ["Launch", "Result", "RunStart", "run"]


def preflight(graph: Graph, graph_file: Path) -> dict[str, str]:
    """Run every node's preflight. Returns the findings by node.

    All problems become one ConfigError; a problem of several nodes appears once.
    """
    findings: dict[str, str] = {}
    problems: dict[str, None] = {}
    for name, node in graph.nodes.items():
        try:
            with user_code(graph_file):
                if (text := node.preflight()) is not None:
                    findings[name] = text
        except ConfigError as error:
            problems[str(error)] = None
    if len(problems) > 1:
        listed = "".join(f"\n- {text}" for text in problems)
        raise ConfigError(f"the run cannot start, {len(problems)} problems:{listed}")
    if problems:
        raise ConfigError(*problems)
    return findings
